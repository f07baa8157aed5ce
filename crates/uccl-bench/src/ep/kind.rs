//! The kinds of calls, and the bytes that each moves.

use uccl_ep::{
    combine::{CombineRows, Order, SumOrder},
    nodes::Nodes,
    numerics::quantise::ScaleFormat,
};

use super::shape::Shape;

/// A kind of call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Work {
    LowLatencyFp8,
    LowLatency,
    LowLatencyCombine,
    /// A combine of rows in memory that ranks of this node read in place.
    LowLatencyCombineInPlace,
    Elastic,
    ElasticCombine,
    Normal,
    NormalCombine,
}

/// Rows of one rank in one call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RowCounts {
    /// Rows that experts read or write.
    pub(super) all: usize,
    /// The part of these that belongs to other ranks.
    pub(super) foreign: usize,
    /// Rows that cross to other nodes.
    pub(super) across: usize,
}

impl Work {
    /// The calls in the order of a round: a combine takes the rows of the last dispatch before it.
    pub(super) const ALL: [Self; 8] = [
        Self::LowLatencyFp8,
        Self::LowLatency,
        Self::LowLatencyCombine,
        Self::LowLatencyCombineInPlace,
        Self::Elastic,
        Self::ElasticCombine,
        Self::Normal,
        Self::NormalCombine,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::LowLatencyFp8 => "low latency dispatch, FP8",
            Self::LowLatency => "low latency dispatch, bf16",
            Self::LowLatencyCombine => "low latency combine",
            Self::LowLatencyCombineInPlace => "low latency combine, in place",
            Self::Elastic => "elastic dispatch, expanded",
            Self::ElasticCombine => "elastic combine, expanded",
            Self::Normal => "normal dispatch",
            Self::NormalCombine => "normal combine",
        }
    }

    pub(super) fn is_combine(self) -> bool {
        use Work::{ElasticCombine, LowLatencyCombine, LowLatencyCombineInPlace, NormalCombine};
        let combines = [LowLatencyCombine, LowLatencyCombineInPlace, ElasticCombine, NormalCombine];
        combines.contains(&self)
    }

    /// Whether tokens may travel through relays, where there are any.
    pub(super) fn may_relay(self) -> bool {
        matches!(self, Self::Elastic | Self::ElasticCombine) || self.is_normal()
    }

    /// Whether rows are those of ranks and not of experts.
    pub(super) fn is_normal(self) -> bool {
        matches!(self, Self::Normal | Self::NormalCombine)
    }

    /// The rows that a combine sends back of a token, and the order of their sum.
    pub(super) fn sends(self, weights: &[f32]) -> (CombineRows, SumOrder, Option<Order>) {
        match self {
            Self::NormalCombine => (CombineRows::Row, SumOrder::ByRank, Some(Order::ByRank)),
            Self::ElasticCombine => {
                (CombineRows::SumOfExperts, SumOrder::ByChoice, Some(Order::ByChoice))
            }
            _ => (CombineRows::EachExpert, SumOrder::Weighted(weights.as_ptr()), None),
        }
    }

    /// Bytes of a row with its scales.
    pub(super) fn row(self, hidden: usize) -> usize {
        match self {
            Self::LowLatencyFp8 => hidden + 4 * ScaleFormat::Exact.words(hidden),
            _ => 2 * hidden,
        }
    }

    /// Bytes from one row to the next.
    pub(super) fn payload(self, hidden: usize) -> usize {
        if self == Self::LowLatencyFp8 { hidden } else { 2 * hidden }
    }

    /// The rows of a rank's tokens.
    pub(super) fn counted(self, shape: Shape, me: usize, choices: &[i32]) -> RowCounts {
        let nodes = Nodes { count: shape.nodes, ranks: shape.ranks / shape.nodes };
        let is_relayed = self.may_relay() && nodes.count > 1 && nodes.ranks > 1;
        let goes_by_expert =
            matches!(self, Self::LowLatencyCombine | Self::LowLatencyCombineInPlace);
        let mut counted = RowCounts { all: 0, foreign: 0, across: 0 };
        for chosen in choices.chunks(shape.num_topk) {
            let ranks = || chosen.iter().map(|expert| *expert as usize / shape.local());
            let distinct = |of: &dyn Fn(usize) -> usize| {
                let mut all: Vec<_> = ranks().map(of).collect();
                all.sort_unstable();
                all.dedup();
                all
            };
            let by_rank = distinct(&|rank| rank);
            let read = if self.is_normal() { by_rank.clone() } else { ranks().collect() };
            counted.all += read.len();
            counted.foreign += read.iter().filter(|rank| **rank != me).count();
            let is_far = |rank: &&usize| nodes.node_of(**rank) != nodes.node_of(me);
            counted.across += match (is_relayed, goes_by_expert) {
                (true, _) => {
                    let own = nodes.node_of(me);
                    distinct(&|rank| nodes.node_of(rank))
                        .iter()
                        .filter(|node| **node != own)
                        .count()
                }
                (false, true) => read.iter().filter(is_far).count(),
                (false, false) => by_rank.iter().filter(is_far).count(),
            };
        }
        counted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_counted_once_for_each_rank_or_node_that_gets_them() {
        // Four ranks of two experts on two nodes; rank 0's two tokens.
        let shape =
            Shape { ranks: 4, nodes: 2, num_tokens: 2, hidden: 128, num_topk: 4, num_experts: 8 };
        let choices = [0, 4, 5, 6, 0, 1, 2, 7];
        let counted = |work: Work| {
            let RowCounts { all, foreign, across } = work.counted(shape, 0, &choices);
            (all, foreign, across)
        };
        assert_eq!(counted(Work::LowLatency), (8, 5, 3));
        assert_eq!(counted(Work::LowLatencyCombine), (8, 5, 4));
        assert_eq!(counted(Work::Elastic), (8, 5, 2));
        assert_eq!(counted(Work::Normal), (6, 4, 2));
    }
}
