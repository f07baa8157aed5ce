//! The tokens of each rank that a round of a call has room for.

use crate::{
    cuda::{Group, MAX_TOKENS},
    host::combine::slots_of,
    shared::{
        error::Error,
        nodes::Nodes,
        record::{Record, Row},
    },
};

/// Sizes of a call's rows, and of the rows of later calls with its handle.
#[derive(Clone, Copy, Debug)]
pub(super) struct CallShape {
    /// Bytes of a row.
    pub(super) payload: usize,
    /// Words of scales that go with it.
    pub(super) scales: usize,
    /// Values, in bf16, of a row that goes back, and of a row in a later dispatch with the handle.
    pub(super) hidden: usize,
    /// Choices of a token.
    pub(super) top_k: usize,
    /// Experts of each rank.
    pub(super) local_experts: usize,
    /// Whether the rows of a dispatch may be a view of the pool, which takes up to a row more for
    /// each rank.
    pub(super) zero_copy: bool,
}

impl CallShape {
    /// The most tokens that each rank may have: the group's whole pool has room for them in a
    /// dispatch, in its combine, and in a dispatch of bf16 with its handle. All ranks compute the
    /// same number, because no size that differs between them counts.
    pub(super) fn max_tokens(&self, group: &Group) -> usize {
        self.max_tokens_in(group.pool_len(), group.ranks())
    }

    /// The error of a rank with tokens, where the pool has no room for a token of each rank.
    pub(super) fn no_room(&self, group: &Group) -> Error {
        let (pool, needs) = (group.pool_len(), self.pool_for(1, group.ranks()));
        Error::TooManyTokens(format!(
            "the call needs {needs} bytes of the buffer, which has {pool}; make it with more"
        ))
    }

    /// Whether `most` tokens of each rank go in one round: the pool has room for the dispatch, and
    /// for rows that go back without weights.
    pub(super) fn is_one_round(&self, most: usize, group: &Group) -> bool {
        let (ranks, pool) = (group.ranks(), group.pool_len());
        let len = self.records()[0].area(self.local_experts, most).saturating_mul(ranks);
        most <= MAX_TOKENS
            && len.next_multiple_of(64) <= pool
            && self.row(ranks).place(most) <= pool
    }

    /// The tokens of each rank in a round of a call of several. Rows by expert may go back one by
    /// one, and a byte that is sent may stand for two values that go back.
    pub(super) fn tokens_in_round(&self, by_expert: bool, group: &Group) -> usize {
        let hidden = if self.payload == self.hidden { 2 * self.hidden } else { self.hidden };
        let wide = Self { hidden, ..*self };
        let most = wide.max_tokens(group);
        let each = Row { slots: self.top_k.max(1), ..wide.row(group.ranks()) };
        if by_expert { most.min(each.tokens_in(group.pool_len())) } else { most }
    }

    /// A row that goes back.
    fn row(&self, ranks: usize) -> Row {
        let slots = slots_of(Nodes::one(ranks), self.top_k).max(1);
        Row { values: 2 * self.hidden, weights: 0, slots }
    }

    fn max_tokens_in(&self, pool: usize, ranks: usize) -> usize {
        let (local, len) = (self.local_experts, pool / ranks);
        let of_records = |record: Record| {
            let most = record.slots_in(local, len);
            if self.zero_copy { most.min(record.slots_spread_in(local, len & !63)) } else { most }
        };
        let most = self.records().map(of_records).into_iter().min().unwrap_or_default();
        most.min(MAX_TOKENS)
    }

    /// Bytes of a pool with room for so many tokens of each rank.
    fn pool_for(&self, tokens: usize, ranks: usize) -> usize {
        let local = self.local_experts;
        let of_records = |record: Record| {
            let spread = record.spread(local, tokens) * record.stride();
            let spread = if self.zero_copy { spread.next_multiple_of(64) } else { 0 };
            record.area(local, tokens).max(spread) * ranks
        };
        self.records().map(of_records).into_iter().max().unwrap_or_default()
    }

    /// Records of this dispatch, and of later ones with the handle. Rows that go back take no more
    /// room: a token has at most one for each of its ranks, without choices.
    fn records(&self) -> [Record; 2] {
        let Self { payload, scales, hidden, top_k, .. } = *self;
        [Record { payload, scales, top_k }, Record { payload: 2 * hidden, scales: 0, top_k }]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_has_room_for_as_many_tokens_as_it_was_made_for() {
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..2000 {
            let (ranks, hidden) = (random.usize(1..=64), 8 * random.usize(0..=1024));
            let is_narrow = random.bool();
            let shape = CallShape {
                payload: if is_narrow { hidden } else { 2 * hidden },
                scales: if is_narrow { random.usize(..=600) } else { 0 },
                hidden,
                top_k: random.usize(..=32),
                local_experts: random.usize(..=256),
                zero_copy: random.bool(),
            };
            let tokens = random.usize(..=MAX_TOKENS);
            let pool = shape.pool_for(tokens, ranks);
            let most = shape.max_tokens_in(pool, ranks);
            assert!((tokens..=MAX_TOKENS).contains(&most), "{shape:?}: {most}, not {tokens}");
            assert!(shape.pool_for(most, ranks) <= pool, "{shape:?}: {most} do not fit");
            let slots = slots_of(Nodes::one(ranks), shape.top_k);
            let row = Row { values: 2 * hidden, weights: shape.top_k, slots };
            assert!(row.place(most) <= pool, "{shape:?}: rows of {most} do not fit");
            let is_most = most == MAX_TOKENS || shape.pool_for(most + 1, ranks) > pool;
            assert!(is_most, "{shape:?}: one more than {most} fits");
        }
        let (payload, hidden) = (14336, 7168);
        let shape =
            CallShape { payload, scales: 0, hidden, top_k: 8, local_experts: 32, zero_copy: false };
        assert_eq!(shape.max_tokens_in(0, 8), 0);
        assert_eq!(shape.max_tokens_in(usize::MAX / 2, 8), MAX_TOKENS);
    }
}
