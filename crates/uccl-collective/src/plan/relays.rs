//! The messages of a broadcast in which ranks pass on the chunks that they receive: plain data.
//!
//! ```text
//!     root --- chunk 0 ---> leader of host 1 ---> leaders of hosts 2, 3 ---> other ranks there
//!          \-- chunk 1 ---> leader of host 2 ---> leaders of hosts 3, 1 ---> other ranks there
//! ```
//!
//! The root sends each chunk once. The hosts take turns as the first one of a chunk, and the ranks
//! of a host as its leader, so that all of them receive and send at the same time, and each byte
//! reaches each host once. Ranks of the root's own host get all from the root.

use std::net::IpAddr;

use super::{Direction, Message, Piece, Place, check_rank};
use crate::error::{Error, Result};

/// Shorter buffers go from the root to every rank: a relay costs more than the root's link.
const SHORTEST: usize = 1 << 20;
/// The shortest chunk, but for the last one.
const CHUNK: usize = 256 << 10;
/// The most chunks that begin at one host.
const MOST_CHUNKS: usize = 16;

/// The hosts of a group's ranks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Hosts {
    /// The host of each rank.
    of_rank: Vec<usize>,
    /// The ranks of each host, in their order.
    ranks: Vec<Vec<usize>>,
}

impl Hosts {
    /// The hosts of ranks with these addresses.
    #[must_use]
    pub fn of(addrs: impl IntoIterator<Item = IpAddr>) -> Self {
        let (mut known, mut hosts) = (Vec::new(), Self { of_rank: Vec::new(), ranks: Vec::new() });
        for (rank, addr) in addrs.into_iter().enumerate() {
            let host = known.iter().position(|other| *other == addr).unwrap_or_else(|| {
                known.push(addr);
                hosts.ranks.push(Vec::new());
                known.len() - 1
            });
            hosts.of_rank.push(host);
            hosts.ranks[host].push(rank);
        }
        hosts
    }

    /// Whether some broadcast of these ranks is one with relays.
    #[must_use]
    pub fn need_relays(&self) -> bool {
        self.ranks.len() > 1 && self.of_rank.len() > 2
    }
}

/// A message that this rank sends once it has received the same bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Relay {
    /// The index of their receive among the call's messages: those of `direct`, then `received`.
    pub after: usize,
    /// The message.
    pub message: Message,
}

/// The messages of a rank. Those of a pair of ranks are in one order on both sides, separately for
/// messages of the root and for others.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RelayPlan {
    /// Those to or from the root.
    pub direct: Vec<Message>,
    /// Those from ranks that pass on.
    pub received: Vec<Message>,
    /// Those that this rank passes on.
    pub relays: Vec<Relay>,
}

/// A broadcast with relays; `None` if the root sends to every rank itself.
///
/// # Errors
/// There is no such root, or the hosts are those of another number of ranks.
pub fn relayed_broadcast(
    at: Place,
    root: usize,
    piece: Piece,
    hosts: &Hosts,
) -> Result<Option<RelayPlan>> {
    check_rank(at, root)?;
    if hosts.of_rank.len() != at.ranks {
        let why = format!("hosts of {} ranks for {}", hosts.of_rank.len(), at.ranks);
        return Err(Error::Invalid(why));
    }
    let Some(chunks) = Chunks::of(root, piece, hosts) else { return Ok(None) };
    let own = hosts.of_rank[at.rank];
    let plan = if at.rank == root {
        chunks.of_root(at)
    } else if own == hosts.of_rank[root] {
        let direct = vec![Message { direction: Direction::Recv, peer: root, piece }];
        RelayPlan { direct, ..RelayPlan::default() }
    } else {
        chunks.of_receiver(at, &hosts.ranks[own])
    };
    Ok(Some(plan))
}

/// The chunks of a broadcast, and the hosts that they go to.
struct Chunks<'a> {
    root: usize,
    piece: Piece,
    len: usize,
    /// The ranks of each host but the root's.
    far: Vec<&'a [usize]>,
    /// The ranks of the root's host.
    near: &'a [usize],
}

impl<'a> Chunks<'a> {
    /// `None` where relays do not help.
    fn of(root: usize, piece: Piece, hosts: &'a Hosts) -> Option<Self> {
        let of_root = hosts.of_rank[root];
        let others = hosts.ranks.iter().enumerate().filter(|(host, _)| *host != of_root);
        let far: Vec<_> = others.map(|(_, ranks)| ranks.as_slice()).collect();
        let receivers: usize = far.iter().map(|ranks| ranks.len()).sum();
        if piece.len < SHORTEST || receivers < 2 {
            return None;
        }
        let len = piece.len.div_ceil(MOST_CHUNKS * far.len()).next_multiple_of(4096).max(CHUNK);
        Some(Self { root, piece, len, far, near: &hosts.ranks[of_root] })
    }

    /// The chunks with their numbers.
    fn all(&self) -> impl Iterator<Item = (usize, Piece)> {
        let Self { piece: Piece { buffer, offset, len: whole }, len, .. } = *self;
        (0..whole.div_ceil(len)).map(move |number| {
            let begin = number * len;
            (number, Piece { buffer, offset: offset + begin, len: len.min(whole - begin) })
        })
    }

    /// The index of the host that a chunk reaches first.
    fn first(&self, number: usize) -> usize {
        number % self.far.len()
    }

    /// The rank of a host that gets a chunk from another host.
    fn leader(&self, ranks: &[usize], number: usize) -> usize {
        ranks[number / self.far.len() % ranks.len()]
    }

    fn of_root(&self, at: Place) -> RelayPlan {
        let send = |peer, piece| Message { direction: Direction::Send, peer, piece };
        let far = self.all().map(|(number, piece)| send(self.begins(number), piece));
        let near = others(self.near, at.rank).map(|peer| send(peer, self.piece));
        RelayPlan { direct: far.chain(near).collect(), ..RelayPlan::default() }
    }

    /// The rank of another host that the root sends a chunk to.
    fn begins(&self, number: usize) -> usize {
        self.leader(self.far[self.first(number)], number)
    }

    /// The messages of a rank of another host; `ranks` are those of its host.
    fn of_receiver(&self, at: Place, ranks: &[usize]) -> RelayPlan {
        let mut plan = RelayPlan::default();
        let from_root = self.all().filter(|(number, _)| self.begins(*number) == at.rank).count();
        for (number, piece) in self.all() {
            let (begins, leads) = (self.begins(number), self.leader(ranks, number));
            let recv = |peer| Message { direction: Direction::Recv, peer, piece };
            let after = if at.rank == begins {
                plan.direct.push(recv(self.root));
                plan.direct.len() - 1
            } else {
                plan.received.push(recv(if at.rank == leads { begins } else { leads }));
                from_root + plan.received.len() - 1
            };
            let mut pass = |peer| {
                let message = Message { direction: Direction::Send, peer, piece };
                plan.relays.push(Relay { after, message });
            };
            if at.rank == begins {
                let (first, hosts) = (self.first(number), self.far.len());
                let far = (1..hosts).map(|step| self.far[(first + step) % hosts]);
                far.for_each(|ranks| pass(self.leader(ranks, number)));
            }
            if at.rank == leads {
                others(ranks, at.rank).for_each(pass);
            }
        }
        plan
    }
}

/// The other ranks of a list, beginning behind one.
fn others(ranks: &[usize], rank: usize) -> impl Iterator<Item = usize> {
    let at = ranks.iter().position(|other| *other == rank).unwrap_or_default();
    ranks[at..].iter().chain(&ranks[..at]).copied().filter(move |other| *other != rank)
}

#[cfg(test)]
mod tests;
