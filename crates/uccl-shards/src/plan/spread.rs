//! Which rank each reader of a cell reads from.
//!
//! In a tree a cell is read once from each holder; then a reader is a source for the next ones, of
//! at most a fan-out of them. Cells begin with different readers, so that a source sends each byte
//! once and all readers send about the same. By host, the readers over the network are in such a
//! tree, or all read from holders; cells go to different readers of a host, and its others read
//! from these.

use std::collections::BTreeMap;

use super::{
    FanOut, Peer,
    cells::{Cell, SliceId},
    fan_out::{Network, Way},
    seats::Seats,
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
pub(crate) struct Loads<'a> {
    seats: &'a Seats,
    sources: Vec<u64>,
    targets: Vec<u64>,
    /// Bytes that each target reads from holders, of cells with a tree.
    firsts: Vec<u64>,
    /// Bytes that each target reads over the network, for its host too.
    leads: Vec<u64>,
}

impl<'a> Loads<'a> {
    pub(crate) fn new(seats: &'a Seats, (sources, targets): (usize, usize)) -> Self {
        let (sources, empty) = (vec![0; sources], vec![0; targets]);
        Self { seats, sources, targets: empty.clone(), firsts: empty.clone(), leads: empty }
    }

    /// Chooses the source of every reader of a cell, which has a holder.
    pub(crate) fn spread(&mut self, cell: &Cell, bytes: u64, fan_out: FanOut) -> Vec<Choice> {
        match fan_out.way(cell, self.seats) {
            Way::Direct => self.all_direct(cell, bytes),
            Way::Tree(fan_out) => self.tree(cell, bytes, fan_out),
            Way::ByHost { network, .. } => self.by_host(cell, bytes, network),
        }
    }

    fn all_direct(&mut self, cell: &Cell, bytes: u64) -> Vec<Choice> {
        cell.readers.iter().map(|reader| self.direct(&cell.holders, *reader, bytes)).collect()
    }

    fn by_host(&mut self, cell: &Cell, bytes: u64, network: Network) -> Vec<Choice> {
        let seats = self.seats;
        let (mut choices, mut by_host) = (Vec::with_capacity(cell.readers.len()), BTreeMap::new());
        for reader in &cell.readers {
            let near: Vec<_> = seats.near_holders(cell, reader.rank).collect();
            if near.is_empty() {
                let host = seats.host_of_target(reader.rank);
                by_host.entry(host).or_insert_with(Vec::new).push(*reader);
            } else {
                choices.push(self.direct(&near, *reader, bytes));
            }
        }
        let readers: Vec<_> = by_host.values().map(|readers| self.leader(readers, bytes)).collect();
        let (area, holders) = (cell.area.clone(), cell.holders.clone());
        let leaders = Cell { area, holders, readers };
        let leads = match network {
            Network::Direct => self.all_direct(&leaders, bytes),
            Network::Tree(fan_out) => self.tree(&leaders, bytes, fan_out),
        };
        for lead in leads {
            let Choice { reader: SliceId { rank, slice }, level, .. } = lead;
            let followers = by_host.remove(&seats.host_of_target(rank)).unwrap_or_default();
            for reader in followers.into_iter().filter(|reader| *reader != lead.reader) {
                // A rank may want a cell twice.
                choices.push(if reader.rank == rank {
                    self.direct(&cell.holders, reader, bytes)
                } else {
                    add(&mut self.targets[rank], bytes);
                    Choice { reader, from: Peer::Target(rank), slice, level: level + 1 }
                });
            }
            choices.push(lead);
        }
        choices
    }

    /// The reader of a host that has read the least over the network.
    fn leader(&mut self, readers: &[SliceId], bytes: u64) -> SliceId {
        let least = readers.iter().min_by_key(|reader| self.leads[reader.rank]);
        let leader = *least.unwrap_or(&readers[0]);
        add(&mut self.leads[leader.rank], bytes);
        leader
    }

    fn tree(&mut self, cell: &Cell, bytes: u64, fan_out: usize) -> Vec<Choice> {
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
            let has_room =
                |i: &usize| children[*i] < fan_out && choices[*i].reader.rank != reader.rank;
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
                None => self.direct(&cell.holders, *reader, bytes),
            };
            choices.push(choice);
            children.push(0);
        }
        choices
    }

    /// The holder that has the least to send.
    fn direct(&mut self, holders: &[SliceId], reader: SliceId, bytes: u64) -> Choice {
        let least = holders.iter().min_by_key(|holder| self.sources[holder.rank]);
        let holder = *least.unwrap_or(&holders[0]);
        add(&mut self.sources[holder.rank], bytes);
        Choice { reader, from: Peer::Source(holder.rank), slice: holder.slice, level: 0 }
    }
}

/// Ranks may claim any length of memory.
fn add(load: &mut u64, bytes: u64) {
    *load = load.saturating_add(bytes);
}
