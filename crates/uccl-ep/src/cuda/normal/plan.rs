//! The plan of dispatches of one shape: the estimate of how much arrives, and the layout of the
//! workspace. A caller allocates the memory, and gives its sub-buffers to the calls.

use parking_lot::Mutex;

use super::ReceiveCounts;

/// Estimates of received rows have headroom for one sixteenth more rows, and at least for 64.
const HEADROOM_PART: usize = 16;
const MIN_HEADROOM: usize = 64;

/// Alignment of an offset, in words of four bytes: torch has other kernels for tensors that are not
/// aligned so.
const OFFSET_WORDS: usize = 4;

/// Rounds a count up to a multiple. The alignment is not 0.
fn align(count: usize, to: usize) -> usize {
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

/// The properties of a dispatch that its plan needs.
#[derive(Clone, Copy, Debug)]
pub struct PlanShape {
    /// Ranks of the group.
    pub ranks: usize,
    /// Words of a row's scales.
    pub scales: usize,
    /// Choices of a token.
    pub top_k: usize,
    /// Experts of all ranks.
    pub num_experts: usize,
    /// The alignment of an expert's rows; `None` for rows by token.
    pub alignment: Option<usize>,
    /// Words of each returned choice, or 0.
    pub choice_words: usize,
    /// Whether weights are received.
    pub has_weights: bool,
    /// Whether the dispatch fills the handle's tables.
    pub fills_tables: bool,
    /// Whether the scales of one channel are contiguous, in memory of their own.
    pub is_col_major: bool,
    /// Whether memory for received rows may be allocated from an estimate.
    pub has_estimate: bool,
}

/// The offsets of a workspace's sub-buffers, and its length, in words of four bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WorkspaceLayout {
    /// Scratch of the handle's first combine.
    pub combine_scratch: usize,
    /// Scratch of the dispatch.
    pub dispatch_scratch: usize,
    /// `[R + 1]`: the first token of each rank.
    pub starts: usize,
    /// `[E/R]`: tokens of each local expert.
    pub per_expert: usize,
    /// `[m]`: token numbers at their ranks.
    pub src_info: usize,
    /// `[m]`: ranks of tokens, and this rank's index among the token's ranks.
    pub origin: usize,
    /// `[E/R]`: the end of each expert's rows, for rows by expert.
    pub ends: usize,
    /// `[m, K + 2]`: sources and rows of tokens, for rows by expert.
    pub metadata: usize,
    /// Received choices.
    pub choices: usize,
    /// Received weights.
    pub weights: usize,
    /// Received scales.
    pub scales: usize,
    /// Words of the workspace.
    pub len: usize,
}

/// The plan of dispatches of one shape.
#[derive(Debug)]
pub struct Plan {
    shape: PlanShape,
    /// The estimated layout of the next received rows.
    estimate: Mutex<Option<RowLayout>>,
}

impl Plan {
    /// A plan without an estimate.
    #[must_use]
    pub fn new(shape: PlanShape) -> Self {
        Self { shape, estimate: Mutex::new(None) }
    }

    /// The estimated layout of the next received rows.
    pub fn estimate(&self) -> Option<RowLayout> {
        *self.estimate.lock()
    }

    /// Replaces the estimate.
    pub fn set_estimate(&self, estimate: Option<RowLayout>) {
        *self.estimate.lock() = estimate;
    }

    /// Remembers the received layout as the estimate for the next call, where each rank has up to
    /// `max_tokens` tokens.
    pub fn learn(&self, received: &RowLayout, max_tokens: usize) {
        let PlanShape { ranks, top_k, num_experts, alignment, has_estimate, .. } = self.shape;
        if has_estimate {
            let tokens = ranks.saturating_mul(max_tokens);
            let local_experts = num_experts / ranks.max(1);
            let limit = RowLayout::upper_bound(tokens, alignment, top_k, local_experts);
            self.set_estimate(Some(received.with_headroom(&limit)));
        }
    }

    /// The layout of a workspace with so many words of scratch, for a combine and for the dispatch,
    /// and, for received `rows`, with tables and small tensors.
    #[must_use]
    pub fn workspace(
        &self,
        combine_scratch: usize,
        dispatch_scratch: usize,
        rows: Option<&RowLayout>,
    ) -> WorkspaceLayout {
        let shape = &self.shape;
        let rows = rows.copied().unwrap_or_else(|| RowLayout::by_token(0));
        let (tokens, num_rows) = (rows.tokens, rows.num_rows());
        let (has_tables, is_by_expert) = (shape.fills_tables, rows.alignment.is_some());
        let has_expert_tables = has_tables && is_by_expert;
        let local_experts = shape.num_experts / shape.ranks.max(1);
        let by_choice = tokens.saturating_mul(shape.top_k);
        let has_scales = !shape.is_col_major && !rows.is_view;
        let mut len: usize = 0;
        let mut offset = |is_present: bool, words: usize| {
            let offset = len;
            len = len.saturating_add(if is_present { align(words, OFFSET_WORDS) } else { 0 });
            offset
        };
        WorkspaceLayout {
            combine_scratch: offset(true, combine_scratch),
            dispatch_scratch: offset(true, dispatch_scratch),
            starts: offset(has_tables, 1 + shape.ranks),
            per_expert: offset(has_tables, local_experts),
            src_info: offset(has_tables, tokens),
            origin: offset(has_tables, tokens),
            ends: offset(has_expert_tables, local_experts),
            metadata: offset(has_expert_tables, tokens.saturating_mul(2 + shape.top_k)),
            choices: offset(true, by_choice.saturating_mul(shape.choice_words)),
            weights: offset(shape.has_weights, if is_by_expert { num_rows } else { by_choice }),
            scales: offset(has_scales, num_rows.saturating_mul(shape.scales)),
            len,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: PlanShape = PlanShape {
        ranks: 4,
        scales: 3,
        top_k: 2,
        num_experts: 8,
        alignment: Some(8),
        choice_words: 0,
        has_weights: true,
        fills_tables: true,
        is_col_major: false,
        has_estimate: true,
    };

    #[test]
    fn counts_are_rows_with_gaps_between_experts() {
        let counts = ReceiveCounts { per_rank: vec![3, 0, 5, 2], per_expert: vec![9, 4] };
        let by_token = RowLayout::of_counts(&counts, None);
        assert_eq!(by_token, RowLayout { min_combine_rows: 10, ..RowLayout::by_token(10) });
        let by_expert = RowLayout::of_counts(&counts, Some(8));
        assert_eq!((by_expert.tokens, by_expert.rows), (10, Some(24)));
        assert_eq!(by_expert.min_combine_rows, 20, "no combine needs the gap behind the last rows");
    }

    #[test]
    fn an_estimate_has_headroom_up_to_the_limit() {
        let plan = Plan::new(SHAPE);
        let received =
            RowLayout { alignment: Some(8), rows: Some(1600), ..RowLayout::by_token(800) };
        plan.learn(&received, 1000);
        let estimate = plan.estimate().expect("the shape has an estimate");
        assert_eq!((estimate.tokens, estimate.rows), (864, Some(1704)));
        plan.learn(&received, 205);
        let estimate = plan.estimate().expect("the shape has an estimate");
        assert_eq!((estimate.tokens, estimate.rows), (820, Some(1656)), "no rank has more");
        let plan = Plan::new(PlanShape { has_estimate: false, ..SHAPE });
        plan.learn(&received, 1000);
        assert_eq!(plan.estimate(), None);
    }

    #[test]
    fn a_workspace_has_the_sub_buffers_of_its_call() {
        let plan = Plan::new(SHAPE);
        let rows = RowLayout { alignment: Some(8), rows: Some(24), ..RowLayout::by_token(10) };
        let layout = plan.workspace(5, 9, Some(&rows));
        let offsets = [layout.dispatch_scratch, layout.starts, layout.per_expert, layout.src_info];
        assert_eq!(offsets, [8, 20, 28, 32]);
        let offsets = [layout.origin, layout.ends, layout.metadata, layout.choices];
        assert_eq!(offsets, [44, 56, 60, 100]);
        assert_eq!([layout.weights, layout.scales, layout.len], [100, 124, 196]);
        let view = RowLayout { is_view: true, ..RowLayout::by_token(10) };
        let layout = plan.workspace(0, 0, Some(&view));
        assert_eq!((layout.scales, layout.len), (layout.len, 56), "a view has its scales");
        let plan = Plan::new(PlanShape { fills_tables: false, has_weights: false, ..SHAPE });
        assert_eq!(plan.workspace(0, 8, None).len, 8);
    }

    #[test]
    fn sizes_that_no_memory_has_do_not_wrap_around() {
        let rows = RowLayout::upper_bound(usize::MAX, Some(128), 8, 32);
        assert!(Plan::new(SHAPE).workspace(0, 0, Some(&rows)).len > usize::MAX / 2);
    }
}
