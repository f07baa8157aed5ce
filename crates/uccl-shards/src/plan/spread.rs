//! Which rank each reader of a cell reads from.
//!
//! A cell with as many holders as readers, or more, is read from the holders with the least to
//! send. One with more readers than holders is read once from each holder, and then by a tree: a
//! reader is a source for the next ones, of at most `fan_out` of them. Cells begin with different
//! readers, so that a source sends each byte once and all readers send about the same.

use super::{
    Options, Peer,
    cells::{Cell, SliceId},
};

/// The source of one reader's copy of a cell.
pub(crate) struct Choice {
    pub(crate) reader: SliceId,
    pub(crate) from: Peer,
    /// The slice of the source that contains the cell.
    pub(crate) slice: usize,
    /// The number of readers between the source's holder and this reader.
    pub(crate) level: usize,
}

/// The bytes that each rank has to send so far.
pub(crate) struct Loads {
    sources: Vec<u64>,
    targets: Vec<u64>,
    /// Bytes that each target reads from holders, of cells with a tree.
    firsts: Vec<u64>,
}

impl Loads {
    pub(crate) fn new(sources: usize, targets: usize) -> Self {
        Self { sources: vec![0; sources], targets: vec![0; targets], firsts: vec![0; targets] }
    }

    /// Chooses the source of every reader of a cell, which has a holder.
    pub(crate) fn spread(&mut self, cell: &Cell, bytes: u64, options: &Options) -> Vec<Choice> {
        if !has_tree(cell, options) {
            return cell.readers.iter().map(|reader| self.direct(cell, *reader, bytes)).collect();
        }
        let mut readers = cell.readers.clone();
        readers.sort_by_key(|reader| self.firsts[reader.rank]);
        let mut holders = cell.holders.clone();
        holders.sort_by_key(|holder| self.sources[holder.rank]);
        let mut choices: Vec<Choice> = Vec::with_capacity(readers.len());
        let mut children = Vec::with_capacity(readers.len());
        for (holder, reader) in holders.iter().zip(&readers) {
            add(&mut self.sources[holder.rank], bytes);
            add(&mut self.firsts[reader.rank], bytes);
            let from = Peer::Source(holder.rank);
            choices.push(Choice { reader: *reader, from, slice: holder.slice, level: 0 });
            children.push(0);
        }
        for reader in &readers[choices.len()..] {
            let has_room = |i: &usize| {
                children[*i] < options.fan_out && choices[*i].reader.rank != reader.rank
            };
            let parent = (0..choices.len())
                .filter(has_room)
                .min_by_key(|i| (choices[*i].level, self.targets[choices[*i].reader.rank]));
            let choice = match parent {
                Some(parent) => {
                    children[parent] += 1;
                    let Choice { reader: SliceId { rank, slice }, level, .. } = choices[parent];
                    add(&mut self.targets[rank], bytes);
                    let from = Peer::Target(rank);
                    Choice { reader: *reader, from, slice, level: level + 1 }
                }
                // All other readers are slices of the same rank.
                None => self.direct(cell, *reader, bytes),
            };
            choices.push(choice);
            children.push(0);
        }
        choices
    }

    /// The holder that has the least to send.
    fn direct(&mut self, cell: &Cell, reader: SliceId, bytes: u64) -> Choice {
        let least = cell.holders.iter().min_by_key(|holder| self.sources[holder.rank]);
        let holder = *least.unwrap_or(&cell.holders[0]);
        add(&mut self.sources[holder.rank], bytes);
        Choice { reader, from: Peer::Source(holder.rank), slice: holder.slice, level: 0 }
    }
}

/// Ranks may claim any length of memory.
fn add(load: &mut u64, bytes: u64) {
    *load = load.saturating_add(bytes);
}

/// Whether readers of a cell read from each other.
pub(crate) fn has_tree(cell: &Cell, options: &Options) -> bool {
    options.fan_out > 0 && cell.readers.len() > cell.holders.len()
}
