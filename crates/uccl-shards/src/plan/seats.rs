//! Where the ranks of a plan are.

use std::collections::HashMap;

use super::{
    cells::{Cell, SliceId},
    layout::Layout,
};

/// The hosts of all ranks, as numbers. A rank of an unknown host has one of its own.
#[derive(Default)]
pub(crate) struct Seats {
    sources: Vec<usize>,
    targets: Vec<usize>,
    /// By source.
    source_lanes: Vec<u64>,
    /// By host: the most lanes of its ranks.
    host_lanes: Vec<u64>,
}

impl Seats {
    pub(crate) fn new(sources: &[Layout], targets: &[Layout]) -> Self {
        let (mut seats, mut known) = (Self::default(), HashMap::new());
        seats.sources = sources.iter().map(|source| seats.host(source, &mut known)).collect();
        seats.targets = targets.iter().map(|target| seats.host(target, &mut known)).collect();
        seats.source_lanes = sources.iter().map(lanes_of).collect();
        seats
    }

    /// The number of a rank's host, whose lanes it notes.
    fn host<'a>(&mut self, layout: &'a Layout, known: &mut HashMap<&'a str, usize>) -> usize {
        let next = self.host_lanes.len();
        let host = match &layout.seat.host {
            Some(name) => *known.entry(name).or_insert(next),
            None => next,
        };
        match self.host_lanes.get_mut(host) {
            Some(lanes) => *lanes = (*lanes).max(lanes_of(layout)),
            None => self.host_lanes.push(lanes_of(layout)),
        }
        host
    }

    pub(crate) fn host_of_source(&self, rank: usize) -> usize {
        self.sources[rank]
    }

    pub(crate) fn host_of_target(&self, rank: usize) -> usize {
        self.targets[rank]
    }

    pub(crate) fn lanes_of_source(&self, rank: usize) -> u64 {
        self.source_lanes[rank]
    }

    pub(crate) fn lanes_of_host(&self, host: usize) -> u64 {
        self.host_lanes[host]
    }

    /// The holders of a cell on the host of a target.
    pub(crate) fn near_holders(&self, cell: &Cell, target: usize) -> impl Iterator<Item = SliceId> {
        let host = self.host_of_target(target);
        let is_near = move |holder: &&SliceId| self.host_of_source(holder.rank) == host;
        cell.holders.iter().filter(is_near).copied()
    }

    /// The readers of a cell that have no holder on their host.
    pub(crate) fn far_readers<'a>(
        &'a self,
        cell: &'a Cell,
    ) -> impl Iterator<Item = &'a SliceId> + 'a {
        cell.readers.iter().filter(|reader| self.near_holders(cell, reader.rank).next().is_none())
    }
}

fn lanes_of(layout: &Layout) -> u64 {
    u64::from(layout.seat.lanes.max(1))
}
