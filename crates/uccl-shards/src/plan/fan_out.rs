//! The choice between reads from sources alone and reads from other readers.
//!
//! Between hosts the network of a source is the limit: a byte should leave it once, and a host
//! should receive it once. Within a host the ranks share one memory, so a copy from rank to rank
//! takes from the same limit as a copy from the source, and comes later.

use super::{
    cells::{Cell, SliceId},
    seats::Seats,
};

/// The least fan-out that is chosen: a tree of two levels then has 20 readers of other hosts.
const LEAST: usize = 4;

/// How many readers of one byte read it from the same reader.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum FanOut {
    /// Chosen for each part of the bytes from the [seats](super::layout::Seat) of its ranks.
    /// Readers on a source's host read from it. On each other host one reader reads a part over the
    /// network, and the host's other readers read it from this one. The readers over the network
    /// are a tree if they can take more than the sources can send. Ranks of unknown hosts count as
    /// on hosts of their own.
    #[default]
    Automatic,
    /// At most this many, wherever ranks are. 0: all read from sources.
    AtMost(usize),
}

/// The way in which the readers of a cell get it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Way {
    /// All read from holders.
    Direct,
    /// As many as there are holders read from these, and the others from at most so many readers
    /// each.
    Tree(usize),
    /// One reader of each host reads over the network, as `network` says, and the others from it.
    ByHost { network: Network, has_followers: bool },
}

/// The way between hosts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Network {
    Direct,
    Tree(usize),
}

impl Way {
    /// Whether some readers read from others.
    pub(crate) fn has_levels(self) -> bool {
        match self {
            Self::Direct => false,
            Self::Tree(_) => true,
            Self::ByHost { network, has_followers } => has_followers || network != Network::Direct,
        }
    }
}

impl FanOut {
    /// The way of a cell.
    pub(crate) fn way(self, cell: &Cell, seats: &Seats) -> Way {
        match self {
            Self::AtMost(0) => Way::Direct,
            Self::AtMost(_) if cell.readers.len() <= cell.holders.len() => Way::Direct,
            Self::AtMost(fan_out) => Way::Tree(fan_out),
            Self::Automatic => by_host(cell, seats),
        }
    }
}

fn by_host(cell: &Cell, seats: &Seats) -> Way {
    let far: Vec<&SliceId> = seats.far_readers(cell).collect();
    let mut hosts: Vec<usize> =
        far.iter().map(|reader| seats.host_of_target(reader.rank)).collect();
    hosts.sort_unstable();
    hosts.dedup();
    let taken: u64 = hosts.iter().map(|host| seats.lanes_of_host(*host)).sum();
    let sent: u64 = cell.holders.iter().map(|holder| seats.lanes_of_source(holder.rank)).sum();
    let network = match taken > sent {
        true => Network::Tree(fan_out(hosts.len(), cell.holders.len())),
        false => Network::Direct,
    };
    Way::ByHost { network, has_followers: far.len() > hosts.len() }
}

/// The fan-out with which the readers of a holder are at most two levels behind it.
fn fan_out(hosts: usize, holders: usize) -> usize {
    let behind = hosts.div_ceil(holders.max(1));
    (LEAST..behind).find(|fan_out| 1 + fan_out + fan_out * fan_out >= behind).unwrap_or(LEAST)
}

#[cfg(test)]
mod tests {
    use super::fan_out;

    #[test]
    fn a_chosen_tree_has_two_levels_behind_the_first() {
        assert_eq!([1, 4, 20, 21].map(|hosts| fan_out(hosts, 1)), [4; 4]);
        assert_eq!([22, 31, 32, 64].map(|hosts| fan_out(hosts, 1)), [5, 5, 6, 8]);
        assert_eq!(fan_out(64, 4), 4);
    }
}
