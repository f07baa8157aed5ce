//! Rounds of calls, where ranks have more tokens than the pool has room for. One call sends the
//! counts of all tokens, and then each round is a call of its own, with the next tokens of each
//! rank. Rows go to their places at once (`kernels/ep/normal/rounds.cuh`).

use super::memory::ReceivedRows;
use crate::cuda::{
    memory::{COMBINE_SCRATCH_LEN, Choices, scratch_len},
    params::{self, Routes},
};

/// How a call's tokens are cut into rounds: the same on all ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RoundCut {
    /// The most tokens of each rank in a round.
    pub(super) slots: usize,
    /// The number of rounds.
    pub(super) count: usize,
    /// The most tokens of any rank in the call.
    pub(super) most: usize,
}

impl RoundCut {
    /// Rounds of `slots` tokens, for ranks with up to `most`.
    pub(super) fn new(slots: usize, most: usize) -> Self {
        Self { slots, count: most.div_ceil(slots.max(1)).max(1), most }
    }

    /// The tokens of a round, for a rank that has so many.
    fn tokens_of(&self, round: usize, tokens: usize) -> usize {
        tokens.saturating_sub(round * self.slots).min(self.slots)
    }
}

/// A round of a dispatch: the routing of its tokens, and the address of its number and place.
#[derive(Clone, Copy)]
pub(super) struct RoundRoutes {
    pub(super) routes: Routes,
    pub(super) placement: u64,
}

/// The rounds of a handle.
pub(super) struct HandleRounds {
    pub(super) cut: RoundCut,
    pub(super) by_round: Vec<RoundRoutes>,
    pub(super) tables: RoundTables,
}

/// Tables about the first rows of each round, with an entry more for the rows behind the last one.
#[derive(Clone, Copy)]
pub(super) struct RoundTables {
    pub(super) firsts: u64,
    /// Bytes of a round in `firsts`.
    pub(super) ranks_len: usize,
    /// 0 for rows by token.
    pub(super) expert_rows: u64,
    /// Bytes of a round in `expert_rows`.
    pub(super) experts_len: usize,
    /// The ranks' tokens in all rounds, and the most of any rank.
    pub(super) tokens: u64,
}

/// The layout of the memory for the rounds of a dispatch, which its handle keeps.
pub(super) struct RoundMemory {
    /// By round: the offset of the placement, and of the routing's tables behind it.
    pub(super) by_round: Vec<usize>,
    pub(super) firsts: usize,
    pub(super) expert_rows: usize,
    pub(super) tokens: usize,
    /// Bytes of all.
    pub(super) len: usize,
}

impl RoundMemory {
    /// For tokens with these routes.
    pub(super) fn of(cut: &RoundCut, routes: &Routes, ranks: usize, by_expert: bool) -> Self {
        let mut len = 0;
        let mut next = |bytes: usize| {
            let offset = len;
            len += bytes.next_multiple_of(16);
            offset
        };
        let tokens = routes.tokens as usize;
        let by_round = (0..cut.count).map(|round| {
            let keeps_routes = round == 0 && tokens <= cut.slots;
            let own = choices_of(cut, routes, ranks, round);
            next(if keeps_routes { COMBINE_SCRATCH_LEN } else { scratch_len(&own, ranks) })
        });
        let by_round = by_round.collect();
        let firsts = next(4 * ranks * (cut.count + 1));
        let experts = if by_expert { ranks * routes.local_experts as usize } else { 0 };
        let expert_rows = next(4 * experts * (cut.count + 1));
        let tokens = next(4 * (ranks + 1));
        Self { by_round, firsts, expert_rows, tokens, len }
    }
}

/// The choices of a round's tokens.
pub(super) fn choices_of(cut: &RoundCut, routes: &Routes, ranks: usize, round: usize) -> Choices {
    let tokens = cut.tokens_of(round, routes.tokens as usize);
    let (top_k, is_64) = (routes.top_k as usize, routes.is_64 != 0);
    let len = round * cut.slots * top_k * if is_64 { 8 } else { 4 };
    // No address is behind the last choice.
    let experts = if tokens == 0 { routes.choices } else { routes.choices + len as u64 };
    Choices { experts, is_64, tokens, top_k, num_experts: routes.local_experts as usize * ranks }
}

impl HandleRounds {
    /// The kernels' parameters of a round; the rows' tables are the handle's.
    pub(super) fn params(&self, round: usize, rows: &ReceivedRows) -> params::Round {
        let RoundTables { firsts, ranks_len, expert_rows, experts_len, tokens } = self.tables;
        let at = |table: u64, len: usize, round: usize| match table {
            0 => 0,
            table => table + (round * len) as u64,
        };
        params::Round {
            starts: rows.tables.starts,
            per_expert: rows.tables.per_expert,
            firsts: at(firsts, ranks_len, round),
            next_firsts: at(firsts, ranks_len, round + 1),
            expert_rows: at(expert_rows, experts_len, round),
            next_expert_rows: at(expert_rows, experts_len, round + 1),
            tokens,
            first_token: self.first_token(round) as u32,
            most: u32::try_from(self.cut.most).unwrap_or(u32::MAX),
            is_last: u32::from(round + 1 == self.cut.count),
            zero: 0,
        }
    }

    /// The number of a rank's first token in a round.
    pub(super) fn first_token(&self, round: usize) -> usize {
        round * self.cut.slots
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_have_all_tokens_once() {
        for (slots, most) in [(1, 1), (3, 7), (4, 8), (7, 6), (65_535, 65_536), (5, 0)] {
            let cut = RoundCut::new(slots, most);
            for tokens in [0, most.min(1), most / 2, most] {
                let of = |round| cut.tokens_of(round, tokens);
                assert_eq!((0..cut.count).map(of).sum::<usize>(), tokens.min(most), "{cut:?}");
                assert!((0..cut.count).all(|round| of(round) <= slots), "{cut:?}");
            }
            let is_needed = cut.count == 1 || cut.tokens_of(cut.count - 1, most) > 0;
            assert!(is_needed, "{cut:?}: no rank has tokens in the last round");
        }
    }
}
