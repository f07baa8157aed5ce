//! The layout of received rows, and the counts of which it is made.

/// Estimates of received rows have headroom for one sixteenth more rows, and at least for 64.
const HEADROOM_PART: usize = 16;
const MIN_HEADROOM: usize = 64;

/// Counts of the tokens that arrive.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ReceiveCounts {
    /// Tokens that each rank sends to this one.
    pub per_rank: Vec<u32>,
    /// Tokens, of all ranks, that chose each of this rank's experts.
    pub per_expert: Vec<u32>,
    /// The most tokens of any rank, for all receivers.
    pub most_tokens: usize,
}

impl ReceiveCounts {
    /// Tokens that arrive.
    #[must_use]
    pub fn total(&self) -> usize {
        self.per_rank.iter().map(|count| *count as usize).sum()
    }
}

/// Rounds a count up to a multiple. The alignment is not 0.
pub(super) fn align(count: usize, to: usize) -> usize {
    count.div_ceil(to.max(1)).saturating_mul(to)
}

/// The layout of received rows: one for each token, or one for each token and local expert.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RowLayout {
    /// Received tokens, or an upper bound if the host has no counts.
    pub tokens: usize,
    /// The alignment of each expert's first row; `None` for rows by token.
    pub alignment: Option<usize>,
    /// Rows by expert, with the gaps between experts; `None` for rows by token.
    pub rows: Option<usize>,
    /// The least rows of a combine's input, as far as the host has counts.
    pub min_combine_rows: usize,
    /// Whether the rows are a view of the pool.
    pub is_view: bool,
}

impl RowLayout {
    /// Rows by token, without counts.
    #[must_use]
    pub fn by_token(tokens: usize) -> Self {
        Self { tokens, alignment: None, rows: None, min_combine_rows: 0, is_view: false }
    }

    /// The layout for these counts.
    #[must_use]
    pub fn of_counts(counts: &ReceiveCounts, alignment: Option<usize>) -> Self {
        let tokens = counts.total();
        let by_token = Self { min_combine_rows: tokens, ..Self::by_token(tokens) };
        let Some(unit) = alignment else { return by_token };
        // The last expert's rows have a gap behind them, which no combine needs.
        let (mut rows, mut last_end) = (0, 0);
        for count in &counts.per_expert {
            last_end = rows + *count as usize;
            rows = align(last_end, unit);
        }
        Self { alignment, rows: Some(rows), min_combine_rows: last_end, ..by_token }
    }

    /// The layout with room for `tokens` tokens, for any choices of local experts.
    #[must_use]
    pub fn upper_bound(
        tokens: usize,
        alignment: Option<usize>,
        top_k: usize,
        local_experts: usize,
    ) -> Self {
        let max_rows = |unit: usize| {
            let rows = tokens.saturating_mul(top_k.min(local_experts));
            let gaps = unit.saturating_sub(1).saturating_mul(local_experts);
            align(rows.saturating_add(gaps), unit)
        };
        Self { alignment, rows: alignment.map(max_rows), ..Self::by_token(tokens) }
    }

    /// Rows of the output memory.
    #[must_use]
    pub fn num_rows(&self) -> usize {
        self.rows.unwrap_or(self.tokens)
    }

    /// The capacity for the next call: this size and headroom, but no more than `limit`.
    #[must_use]
    pub fn with_headroom(&self, limit: &Self) -> Self {
        let more = |count: usize| count.saturating_add((count / HEADROOM_PART).max(MIN_HEADROOM));
        let by_token = Self::by_token(more(self.tokens).min(limit.tokens));
        let Some(unit) = self.alignment else { return by_token };
        let rows = more(self.num_rows()).min(limit.num_rows());
        Self { alignment: Some(unit), rows: Some(align(rows, unit)), ..by_token }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_rows_with_gaps_between_experts() {
        let (per_rank, per_expert) = (vec![3, 0, 5, 2], vec![9, 4]);
        let counts = ReceiveCounts { per_rank, per_expert, most_tokens: 5 };
        let by_token = RowLayout::of_counts(&counts, None);
        assert_eq!(by_token, RowLayout { min_combine_rows: 10, ..RowLayout::by_token(10) });
        let by_expert = RowLayout::of_counts(&counts, Some(8));
        assert_eq!((by_expert.tokens, by_expert.rows), (10, Some(24)));
        assert_eq!(by_expert.min_combine_rows, 20, "no combine needs the gap behind the last rows");
    }
}
