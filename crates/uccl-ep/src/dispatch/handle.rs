//! What a dispatch leaves behind.

use std::sync::Arc;

use super::Room;
use crate::{group::Group, routing::Routing};

/// How much arrives.
#[derive(Clone, Debug)]
pub struct Counts {
    /// Tokens that each rank sends to this one.
    pub from: Vec<u32>,
    /// How many of them chose each of this rank's experts, rank by rank.
    pub per_expert: Vec<u32>,
    /// Tokens that each rank has.
    pub tokens_of: Vec<u32>,
}

impl Counts {
    /// Tokens that arrive.
    #[must_use]
    pub fn total(&self) -> usize {
        self.from.iter().map(|count| *count as usize).sum()
    }

    /// Which of the tokens that arrive are from a rank.
    pub(crate) fn rows_from(&self, rank: usize) -> std::ops::Range<usize> {
        let start = self.from[..rank].iter().sum::<u32>() as usize;
        start..start + self.from[rank] as usize
    }

    /// Rows of each of this rank's experts.
    #[must_use]
    pub fn of_experts(&self) -> Vec<u32> {
        let local = self.per_expert.len() / self.from.len();
        let of = |expert| self.per_expert.iter().skip(expert).step_by(local).sum();
        (0..local).map(of).collect()
    }
}

/// What a combine needs to know of the dispatch before it.
#[derive(Clone)]
pub struct Handle {
    /// Where the ranks are.
    pub group: Arc<Group>,
    /// Where this rank's own tokens went.
    pub routing: Arc<Routing>,
    /// How much of the window the dispatch used.
    pub room: Room,
    /// By rank, whether the dispatch went there to its end. Rows come back from no other rank, whoever takes part by then.
    pub sent_to: Vec<bool>,
    /// What arrived.
    pub counts: Counts,
    /// For each token that arrived: its number at its rank, its rank, and, for each choice, the row that it has by experts, or -1.
    pub table: Vec<i32>,
    /// For each token that arrived: the last of its choices that is this rank's.
    pub masters: Vec<u8>,
    /// By node: what this rank passed on from it. None if tokens are not relayed.
    pub relayed: Vec<Relayed>,
}

/// The tokens of one rank that a relay passed on, in the order of their numbers.
#[derive(Clone, Default, Debug)]
pub struct Relayed {
    /// Their numbers at their rank.
    pub tokens: Vec<u32>,
    /// For each of them: bit `i` if it went to this node's rank number `i`.
    pub goes: Vec<u64>,
    /// What they chose.
    pub choices: Vec<i32>,
}

impl Handle {
    /// Integers of a row of the table.
    #[must_use]
    pub fn width(&self) -> usize {
        2 + self.routing.top_k()
    }
}
