//! The handle that a dispatch leaves.

use std::sync::Arc;

use super::Room;
use crate::{host::group::Group, shared::routing::Routing};

/// Counts of received tokens.
#[derive(Clone, Debug)]
pub struct ReceiveCounts {
    /// Tokens that each rank sends to this one.
    pub per_rank: Vec<u32>,
    /// Tokens that chose each of this rank's experts, rank by rank.
    pub per_expert: Vec<u32>,
    /// Tokens that each rank has.
    pub tokens_of: Vec<u32>,
}

impl ReceiveCounts {
    /// Received tokens.
    #[must_use]
    pub fn total(&self) -> usize {
        self.per_rank.iter().map(|count| *count as usize).sum()
    }

    /// The received tokens of a rank.
    pub(crate) fn rows_from(&self, rank: usize) -> std::ops::Range<usize> {
        let start = self.per_rank[..rank].iter().sum::<u32>() as usize;
        start..start + self.per_rank[rank] as usize
    }

    /// Rows of each of this rank's experts.
    #[must_use]
    pub fn of_experts(&self) -> Vec<u32> {
        let local = self.per_expert.len() / self.per_rank.len();
        let of = |expert| self.per_expert.iter().skip(expert).step_by(local).sum();
        (0..local).map(of).collect()
    }
}

/// A dispatch's handle, for its combine.
#[derive(Clone)]
pub struct Handle {
    /// The group of the dispatch.
    pub group: Arc<Group>,
    /// The routing of this rank's own tokens.
    pub routing: Arc<Routing>,
    /// The part of the window that the dispatch used.
    pub room: Room,
    /// By rank, whether the dispatch went there to its end. Rows come back from no other rank, even
    /// if it takes part by then.
    pub sent_to: Vec<bool>,
    /// Counts of received tokens.
    pub counts: ReceiveCounts,
    /// For each received token: its number at its rank, its rank, and, for each choice, its row
    /// where rows are by expert, or -1.
    pub table: Vec<i32>,
    /// For each received token: the last of its choices that is this rank's.
    pub last_choices: Vec<u8>,
    /// By node: the tokens that this rank passed on from it. Empty if tokens are not relayed.
    pub relayed: Vec<RelayedTokens>,
}

/// The tokens of one rank that a relay passed on, in the order of their numbers.
#[derive(Clone, Default, Debug)]
pub struct RelayedTokens {
    /// Their numbers at their rank.
    pub tokens: Vec<u32>,
    /// For each of them: bit `i` if it went to this node's rank number `i`.
    pub destinations: Vec<u64>,
    /// Their choices.
    pub choices: Vec<i32>,
}

impl Handle {
    /// Integers of a row of the table.
    #[must_use]
    pub fn width(&self) -> usize {
        2 + self.routing.top_k()
    }
}
