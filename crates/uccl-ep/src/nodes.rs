//! Ranks on several nodes, as many on each: rank = node * ranks of a node + number on its node.

/// How the ranks of a group are spread over nodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Nodes {
    /// How many nodes there are.
    pub count: usize,
    /// Ranks of each.
    pub ranks: usize,
}

impl Nodes {
    /// All ranks on one node.
    #[must_use]
    pub fn one(ranks: usize) -> Self {
        Self { count: 1, ranks }
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
