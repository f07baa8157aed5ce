//! The callers' tensors in a GPU's memory, and the layout of a workspace with the small ones.
//! Addresses are those that the GPU uses, aligned to 16 bytes where rows of bytes begin; 0 is none.

use std::num::NonZero;

use uccl_device::cuda::Stream;

use super::row_layout::RowLayout;
use crate::{
    cuda::{
        memory::Offsets,
        params::{self, NormalReceive, NormalSend},
    },
    shared::error::{Error, Result},
};

/// The stream that a call is enqueued on, and the scratch memory that it uses there.
#[derive(Clone, Copy)]
pub struct Launch<'a> {
    /// A stream of the group's context.
    pub stream: &'a Stream,
    /// The address of the scratch memory, aligned to 8.
    pub scratch: u64,
}

/// A rank's tokens.
#[derive(Clone, Copy, Debug)]
pub struct DispatchInput {
    /// The first row.
    pub rows: u64,
    /// Bytes from one row to the next, a multiple of 16.
    pub stride: usize,
    /// Bytes of a row, a multiple of 16.
    pub payload: usize,
    /// Scales that come with the rows: opaque words.
    pub scales: Option<ScalesIn>,
    /// f32 by token and choice, or 0.
    pub weights: u64,
    /// The most blocks of the call's launches, to leave other multiprocessors of the GPU free.
    pub max_blocks: Option<NonZero<usize>>,
}

/// Scales of tokens: word `w` of token `t` is at `t * token_stride + w * word_stride`, in words.
#[derive(Clone, Copy, Debug)]
pub struct ScalesIn {
    /// The first word.
    pub words: u64,
    /// Words of a token.
    pub count: usize,
    /// From one token to the next.
    pub token_stride: usize,
    /// From one word to the next.
    pub word_stride: usize,
}

impl NormalSend {
    /// The send of the tokens from one on.
    pub(super) fn starting_at(&self, first: u64, send: params::Send) -> Self {
        let rows = self.send.rows + first * self.send.row_stride;
        let word = |address: u64, words: u64| match address {
            0 => 0,
            address => address + 4 * first * words,
        };
        Self {
            send: params::Send { rows, ..send },
            scales: word(self.scales, self.scales_token),
            weights: word(self.weights, u64::from(send.routes.top_k)),
            ..*self
        }
    }
}

const NO_SCALES: ScalesIn = ScalesIn { words: 0, count: 0, token_stride: 0, word_stride: 0 };

impl DispatchInput {
    /// Words of a token's scales.
    pub(super) fn scale_count(&self) -> usize {
        self.scales.map_or(0, |scales| scales.count)
    }

    /// The kernels' parameters.
    pub(super) fn params(&self, send: params::Send) -> NormalSend {
        let scales = self.scales.unwrap_or(NO_SCALES);
        NormalSend {
            send: params::Send { rows: self.rows, row_stride: self.stride as u64, ..send },
            scales: scales.words,
            scales_token: scales.token_stride as u64,
            scales_word: scales.word_stride as u64,
            weights: self.weights,
            round_tokens: 0,
        }
    }
}

/// Output memory. Tokens of rank 0 come first, in the order of their rank: a row for each, or,
/// where rows are by expert, one for each token and expert of this rank.
#[derive(Clone, Copy, Debug)]
pub struct DispatchOutput {
    /// The number of rows. More fail the call.
    pub len: usize,
    /// Payloads: the first row.
    pub rows: u64,
    /// Bytes from one row to the next, a multiple of 16.
    pub stride: usize,
    /// Scales, where rows come with them.
    pub scales: Option<ScalesOut>,
    /// Integers by row and choice, with numbers of this rank's experts: -1 for other ranks'
    /// experts, and in rows without a token. Or 0. There are none where rows are by expert.
    pub choices: u64,
    /// Whether they have 64 bits, or 32.
    pub is_64: bool,
    /// f32 by row and choice; or, where rows are by expert, by row; or 0.
    pub weights: u64,
    /// Whether weights of other ranks' experts become 0.
    pub zero_foreign_weights: bool,
    /// Whether the rows that alignment leaves between experts become 0, with their scales and
    /// weights.
    pub zero_gaps: bool,
    /// The handle's tables. `None` with [`Routing::Cached`](super::Routing::Cached), which has
    /// those of the earlier dispatch.
    pub tables: Option<RowTables>,
    /// The layout of rows by expert. With [`Routing::Cached`](super::Routing::Cached) the earlier
    /// dispatch's layout is used instead.
    pub by_expert: Option<ExpertLayout>,
}

impl DispatchOutput {
    /// The kernels' parameters of a receive into this memory. With `is_cached`, `rows` are those of
    /// an earlier dispatch, whose tables are not written again.
    pub(super) fn params(
        &self,
        send: &params::Send,
        rows: &ReceivedRows,
        is_cached: bool,
        slots: usize,
    ) -> Result<NormalReceive> {
        let params::Send { group, call, routes, area, .. } = *send;
        let len = u32::try_from(self.len)
            .map_err(|_| Error::invalid(format!("{} rows are too many", self.len)))?;
        let scales = match self.scales {
            Some(scales) => scales,
            None if area.scales == 0 => ScalesOut { words: 0, row_stride: 0, word_stride: 0 },
            None => return Err(Error::invalid("rows come with scales")),
        };
        let is_new = |address: u64| if is_cached { 0 } else { address };
        let ReceivedRows { tables, by_expert, spread, .. } = rows;
        Ok(NormalReceive {
            group,
            call,
            area,
            rows: self.rows,
            row_stride: self.stride as u64,
            scales: scales.words,
            scales_row: scales.row_stride as u64,
            scales_word: scales.word_stride as u64,
            choices: if by_expert.is_none() { self.choices } else { 0 },
            weights: self.weights,
            src_info: is_new(tables.src_info),
            origin: is_new(tables.origin),
            starts: is_new(tables.starts),
            per_expert: is_new(tables.per_expert),
            ends: is_new(by_expert.map_or(0, |layout| layout.ends)),
            metadata: is_new(by_expert.map_or(0, |layout| layout.metadata)),
            len,
            tokens: by_expert
                .map_or(len, |layout| u32::try_from(layout.tokens).unwrap_or(u32::MAX)),
            slots: slots as u32,
            top_k: routes.top_k,
            local_experts: routes.local_experts,
            is_64: u32::from(self.is_64),
            zero_foreign_weights: u32::from(self.zero_foreign_weights),
            alignment: by_expert.map_or(0, |layout| layout.alignment as u32),
            zero_gaps: u32::from(self.zero_gaps && by_expert.is_some()),
            spread: *spread as u32,
        })
    }
}

/// The layout of scales: word `w` of a row is at `row * row_stride + w * word_stride`, in words.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ScalesOut {
    /// The first word.
    pub words: u64,
    /// From one row to the next.
    pub row_stride: usize,
    /// From one word to the next.
    pub word_stride: usize,
}

/// A dispatch's tables about its rows, which its combines need.
#[derive(Clone, Copy, Debug)]
pub struct RowTables {
    /// i32 by received token: its number at its rank.
    pub src_info: u64,
    /// i32 by received token: `rank *` [`ORIGIN_RANK`](crate::cuda::ORIGIN_RANK), plus this rank's
    /// index among the token's ranks.
    pub origin: u64,
    /// i32, one more than there are ranks: received tokens before those of each rank, and then all
    /// of them.
    pub starts: u64,
    /// i32 by local expert: tokens that chose it.
    pub per_expert: u64,
}

/// Rows by expert: expert after expert, in order of rank and token.
#[derive(Clone, Copy, Debug)]
pub struct ExpertLayout {
    /// The first row of each expert is a multiple of this.
    pub alignment: usize,
    /// The number of tokens that the tables have room for. More fail the call.
    pub tokens: usize,
    /// i32 by local expert: the row behind its last.
    pub ends: u64,
    /// i32, `2 + top_k` by received token: `rank * slots + token`, `rank * top_k` plus the last
    /// choice of this rank's experts, and the row of each choice, or -1.
    pub metadata: u64,
}

/// The rows that a dispatch received: its tables, and their layout.
#[derive(Clone, Copy)]
pub(super) struct ReceivedRows {
    pub(super) tables: RowTables,
    pub(super) by_expert: Option<ExpertLayout>,
    /// Rows from a rank's first to the next rank's; 0: without gaps.
    pub(super) spread: usize,
    /// The address of the dispatch's number and place, and of the ranks that it left out.
    pub(super) placement: u64,
}

/// The largest alignment of an expert's rows: more than any matrix product needs, and so small that
/// rows of all experts can be counted in 32 bits.
const MAX_ALIGNMENT: usize = 1 << 16;

impl ExpertLayout {
    /// Fails for a layout that kernels cannot take.
    pub(super) fn check(&self, top_k: u32) -> Result<()> {
        if top_k == 0 {
            return Err(Error::invalid(
                "tokens that have ranks and no choices have no rows by expert",
            ));
        }
        if self.ends == 0 || self.metadata == 0 {
            return Err(Error::invalid(
                "a dispatch tells of its rows by expert in two more tables",
            ));
        }
        check_alignment(self.alignment)
    }
}

/// Fails for an alignment that kernels cannot take.
pub(super) fn check_alignment(alignment: usize) -> Result<()> {
    if (1..=MAX_ALIGNMENT).contains(&alignment) {
        return Ok(());
    }
    Err(Error::invalid(format!("expert_alignment is 1 to {MAX_ALIGNMENT}, not {alignment}")))
}

/// The properties of a dispatch on which its memory depends. Calls of one shape share a plan.
#[derive(Clone, Copy, Debug)]
pub struct PlanShape {
    /// Ranks of the group.
    pub ranks: usize,
    /// Values of a row.
    pub hidden: usize,
    /// Bytes of a row.
    pub row_bytes: usize,
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
    /// Whether weights of other ranks' experts become 0.
    pub zero_foreign_weights: bool,
    /// Whether the rows that alignment leaves between experts become 0.
    pub zero_gaps: bool,
    /// Whether the dispatch fills the handle's tables: one to the rows of an earlier one does not.
    pub fills_tables: bool,
    /// Whether the scales of one channel are contiguous, in memory of their own.
    pub is_col_major: bool,
    /// Whether the rows may be a view of the pool.
    pub zero_copy: bool,
    /// Whether one launch may do a whole call: see
    /// [`Group::can_fuse`](crate::cuda::Group::can_fuse).
    pub can_fuse: bool,
}

/// Bytes of scratch in a workspace.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ScratchLens {
    /// For the handle's first combine.
    pub combine: usize,
    /// For the dispatch.
    pub dispatch: usize,
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

impl WorkspaceLayout {
    /// The layout of a workspace with scratch, and, for received `rows`, with tables and small
    /// tensors.
    #[must_use]
    pub fn of(shape: &PlanShape, scratch: ScratchLens, rows: Option<&RowLayout>) -> Self {
        let rows = rows.copied().unwrap_or_else(|| RowLayout::by_token(0));
        let (tokens, num_rows) = (rows.tokens, rows.num_rows());
        let (has_tables, is_by_expert) = (shape.fills_tables, rows.alignment.is_some());
        let has_expert_tables = has_tables && is_by_expert;
        let local_experts = shape.num_experts / shape.ranks.max(1);
        let by_choice = tokens.saturating_mul(shape.top_k);
        let has_scales = !shape.is_col_major && !rows.is_view;
        let mut offsets = Offsets::default();
        let mut offset =
            |is_present: bool, words: usize| offsets.next(if is_present { words } else { 0 });
        let layout = Self {
            combine_scratch: offset(true, scratch.combine.div_ceil(4)),
            dispatch_scratch: offset(true, scratch.dispatch.div_ceil(4)),
            starts: offset(has_tables, 1 + shape.ranks),
            per_expert: offset(has_tables, local_experts),
            src_info: offset(has_tables, tokens),
            origin: offset(has_tables, tokens),
            ends: offset(has_expert_tables, local_experts),
            metadata: offset(has_expert_tables, tokens.saturating_mul(2 + shape.top_k)),
            choices: offset(true, by_choice.saturating_mul(shape.choice_words)),
            weights: offset(shape.has_weights, if is_by_expert { num_rows } else { by_choice }),
            scales: offset(has_scales, num_rows.saturating_mul(shape.scales)),
            len: 0,
        };
        Self { len: offsets.len, ..layout }
    }

    /// The output memory of a dispatch with a workspace of this layout at an address.
    pub(super) fn outputs(
        &self,
        shape: &PlanShape,
        layout: &RowLayout,
        memory: &RecvMemory,
    ) -> DispatchOutput {
        let address = |words: usize| memory.workspace + 4 * words as u64;
        let address_if = |is_there: bool, words: usize| if is_there { address(words) } else { 0 };
        let in_workspace = (shape.scales > 0 && !layout.is_view).then(|| ScalesOut {
            words: address(self.scales),
            row_stride: shape.scales,
            word_stride: 1,
        });
        let by_expert =
            shape.alignment.filter(|_| shape.fills_tables).map(|alignment| ExpertLayout {
                alignment,
                tokens: layout.tokens,
                ends: address(self.ends),
                metadata: address(self.metadata),
            });
        DispatchOutput {
            len: layout.num_rows(),
            rows: memory.rows,
            stride: shape.row_bytes,
            scales: memory.scales.or(in_workspace),
            choices: address_if(shape.choice_words > 0, self.choices),
            is_64: shape.choice_words == 2,
            weights: address_if(shape.has_weights, self.weights),
            zero_foreign_weights: shape.zero_foreign_weights,
            zero_gaps: shape.zero_gaps,
            tables: shape.fills_tables.then(|| RowTables {
                src_info: address(self.src_info),
                origin: address(self.origin),
                starts: address(self.starts),
                per_expert: address(self.per_expert),
            }),
            by_expert,
        }
    }
}

/// The memory that a caller gives to a dispatch for its results.
#[derive(Clone, Copy, Debug)]
pub struct RecvMemory {
    /// The workspace.
    pub workspace: u64,
    /// The first row; 0 for rows that are a view of the pool.
    pub rows: u64,
    /// The scales of a shape with memory of their own for them; else the workspace has them.
    pub scales: Option<ScalesOut>,
}

/// The blocks of a launch for so many rows, limited to `most`.
pub(super) fn blocks_for(rows: usize, most: Option<NonZero<usize>>) -> usize {
    most.map_or(rows, |most| rows.min(most.get()))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::cuda::normal) const SHAPE: PlanShape = PlanShape {
        ranks: 4,
        hidden: 8,
        row_bytes: 16,
        scales: 3,
        top_k: 2,
        num_experts: 8,
        alignment: Some(8),
        choice_words: 0,
        has_weights: true,
        zero_foreign_weights: false,
        zero_gaps: false,
        fills_tables: true,
        is_col_major: false,
        zero_copy: false,
        can_fuse: true,
    };

    #[test]
    fn a_workspace_has_the_sub_buffers_of_its_call() {
        let scratch = ScratchLens { combine: 20, dispatch: 36 };
        let rows = RowLayout { alignment: Some(8), rows: Some(24), ..RowLayout::by_token(10) };
        let layout = WorkspaceLayout::of(&SHAPE, scratch, Some(&rows));
        let offsets = [layout.dispatch_scratch, layout.starts, layout.per_expert, layout.src_info];
        assert_eq!(offsets, [8, 20, 28, 32]);
        let offsets = [layout.origin, layout.ends, layout.metadata, layout.choices];
        assert_eq!(offsets, [44, 56, 60, 100]);
        assert_eq!([layout.weights, layout.scales, layout.len], [100, 124, 196]);
        let view = RowLayout { is_view: true, ..RowLayout::by_token(10) };
        let layout = WorkspaceLayout::of(&SHAPE, ScratchLens::default(), Some(&view));
        assert_eq!((layout.scales, layout.len), (layout.len, 56), "a view has its scales");
        let shape = PlanShape { fills_tables: false, has_weights: false, ..SHAPE };
        let scratch = ScratchLens { combine: 0, dispatch: 29 };
        assert_eq!(WorkspaceLayout::of(&shape, scratch, None).len, 8);
    }

    #[test]
    fn outputs_are_in_the_workspace_unless_they_have_memory_of_their_own() {
        let rows = RowLayout { alignment: Some(8), rows: Some(24), ..RowLayout::by_token(10) };
        let layout = WorkspaceLayout::of(&SHAPE, ScratchLens::default(), Some(&rows));
        let memory = RecvMemory { workspace: 1 << 20, rows: 1 << 30, scales: None };
        let outputs = layout.outputs(&SHAPE, &rows, &memory);
        let at = |words: usize| (1 << 20) + 4 * words as u64;
        assert_eq!((outputs.len, outputs.rows, outputs.choices), (24, 1 << 30, 0));
        assert_eq!(outputs.weights, at(layout.weights));
        let scales = ScalesOut { words: at(layout.scales), row_stride: 3, word_stride: 1 };
        assert_eq!(outputs.scales, Some(scales));
        let own = ScalesOut { words: 7, row_stride: 1, word_stride: 24 };
        let shape = PlanShape { is_col_major: true, ..SHAPE };
        let outputs = layout.outputs(&shape, &rows, &RecvMemory { scales: Some(own), ..memory });
        assert_eq!(outputs.scales, Some(own));
        let view = RowLayout { is_view: true, ..RowLayout::by_token(10) };
        assert_eq!(layout.outputs(&SHAPE, &view, &memory).scales, None, "a view has its scales");
    }

    #[test]
    fn sizes_that_no_memory_has_do_not_wrap_around() {
        let rows = RowLayout::upper_bound(usize::MAX, Some(128), 8, 32);
        let layout = WorkspaceLayout::of(&SHAPE, ScratchLens::default(), Some(&rows));
        assert!(layout.len > usize::MAX / 2);
    }
}
