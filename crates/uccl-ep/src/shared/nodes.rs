//! Ranks on several nodes, as many on each: rank = node * ranks of a node + number on its node.

use std::io;

use uccl_device::HostIdentity;
use uccl_wire::ep_card::HOST_LEN;

use crate::shared::error::{Error, Result};

/// A rank's node: ranks of one node map each other's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Node {
    /// The boot id of its kernel.
    pub(crate) host: [u8; HOST_LEN],
    /// A number that ranks of one node of this kernel share.
    pub(crate) node: u64,
}

impl Node {
    /// This process's node: the one with this number, or, without one, that of the processes that
    /// can see it.
    ///
    /// # Errors
    /// The kernel does not tell its boot id.
    pub fn of_this_process(node: Option<u64>) -> Result<Self> {
        let identity = HostIdentity::of_this_process();
        let node = node.unwrap_or_else(|| node_of(&identity));
        Ok(Self { host: host_of(&identity)?, node })
    }

    /// Bytes that are the same for ranks of one node, and only for them.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        [&self.host[..], &self.node.to_le_bytes()].concat()
    }
}

/// The kernel that this process runs on.
pub(crate) fn host_of(identity: &HostIdentity) -> Result<[u8; HOST_LEN]> {
    let boot_id = identity.boot_id.as_ref();
    boot_id.and_then(|id| id.as_bytes().first_chunk().copied()).ok_or_else(|| {
        let source = io::ErrorKind::InvalidData.into();
        Error::Os { what: "reading the kernel's boot id".into(), source }
    })
}

/// A number that is equal for processes of one kernel that can map each other's memory: those in
/// other containers cannot.
fn node_of(identity: &HostIdentity) -> u64 {
    let [processes, users] = [identity.pid_namespace, identity.user_namespace];
    processes.unwrap_or(0) << 32 ^ users.unwrap_or(0)
}

/// The spread of a group's ranks over nodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Nodes {
    /// The number of nodes.
    pub count: usize,
    /// Ranks on each node.
    pub ranks: usize,
}

impl Nodes {
    /// All ranks on one node.
    #[must_use]
    pub fn one(ranks: usize) -> Self {
        Self { count: 1, ranks }
    }

    /// The spread of ranks with these nodes: one node, unless all nodes have as many ranks, one
    /// behind the other.
    #[must_use]
    pub fn of<K: PartialEq>(node_of: &[Option<K>]) -> Self {
        let one = Self::one(node_of.len());
        let Some(Some(first)) = node_of.first() else { return one };
        let is_first = |other: &&Option<K>| other.as_ref() == Some(first);
        let ranks = node_of.iter().take_while(is_first).count();
        let is_a_node = |(nth, node): (usize, &[Option<K>])| {
            let is_whole = node.len() == ranks && node.iter().all(|rank| *rank == node[0]);
            is_whole && node[0].is_some() && !node_of[..nth * ranks].contains(&node[0])
        };
        match node_of.chunks(ranks).enumerate().all(is_a_node) {
            true => Self { count: node_of.len() / ranks, ranks },
            false => one,
        }
    }

    /// Ranks of all nodes together.
    #[must_use]
    pub fn all_ranks(self) -> usize {
        self.count * self.ranks
    }

    /// The node of a rank.
    #[must_use]
    pub fn node_of(self, rank: usize) -> usize {
        rank / self.ranks
    }

    /// A rank's number on its node.
    #[must_use]
    pub fn local_of(self, rank: usize) -> usize {
        rank % self.ranks
    }

    /// The rank with a number on a node.
    #[must_use]
    pub fn rank(self, node: usize, local: usize) -> usize {
        node * self.ranks + local
    }

    /// The ranks of a node.
    #[must_use]
    pub fn ranks_of(self, node: usize) -> std::ops::Range<usize> {
        node * self.ranks..(node + 1) * self.ranks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_have_as_many_ranks_one_behind_the_other_or_count_as_one() {
        let of = |nodes: &[i32]| {
            let nodes: Vec<_> = nodes.iter().map(|node| (*node >= 0).then_some(*node)).collect();
            let Nodes { count, ranks } = Nodes::of(&nodes);
            (count, ranks)
        };
        assert_eq!([of(&[4]), of(&[4, 4]), of(&[4, 2]), of(&[])], [(1, 1), (1, 2), (2, 1), (1, 0)]);
        assert_eq!(of(&[3, 3, 1, 1, 2, 2]), (3, 2));
        for uneven in
            [&[1, 1, 2][..], &[1, 2, 1], &[1, 2, 2, 1], &[1, 1, 2, 2, 1, 1], &[1, -1], &[-1, 1]]
        {
            assert_eq!(of(uneven), (1, uneven.len()), "{uneven:?}");
        }
        let nodes = Nodes { count: 3, ranks: 2 };
        assert_eq!((nodes.node_of(5), nodes.local_of(5), nodes.rank(2, 1)), (2, 1, 5));
        assert_eq!(nodes.ranks_of(1), 2..4);
    }
}
