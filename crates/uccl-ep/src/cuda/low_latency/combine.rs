//! Low latency combine: the experts' rows come back and are summed, each times its weight: for each
//! rank choice by choice, and then these partial sums, rounded to 24 bits, in the order of their
//! ranks' first choices. The sum is rounded once.
//!
//! A rank with several choices of a token sends its partial sum instead of their rows, if it
//! has the weights: a combine of one launch sends them at its begin.

use std::sync::Arc;

use uccl_device::cuda::Stream;

use super::{
    dispatch::Handle,
    memory::{CombineInput, CombineOutput},
};
use crate::{
    cuda::{
        call::combine_call,
        group::Group,
        memory::check_rows,
        params::{CHUNKS, CallParams, Return, Routes, Sum, TAGGED_WORDS, WholeCombine},
    },
    numerics::{logfmt, quantise::GROUP},
    shared::{
        error::{Error, Phase, Result},
        record::Row,
    },
};

/// A combine.
pub struct Combine {
    handle: Arc<Handle>,
    send: Return,
    is_packed: bool,
    is_begun: bool,
}

impl Combine {
    /// Prepares a combine of rows that go back to the ranks of their tokens, and enqueues nothing
    /// yet.
    ///
    /// # Errors
    /// Arguments are wrong, or an earlier call has failed.
    ///
    /// # Safety
    /// `input` describes memory that the GPU may read until the combine's work has ended: as many
    /// rows as the dispatch had, and its records. `scratch` has
    /// [`COMBINE_SCRATCH_LEN`](crate::cuda::COMBINE_SCRATCH_LEN) bytes, aligned to 8, which only
    /// this combine uses until then.
    pub unsafe fn new(handle: &Arc<Handle>, input: &CombineInput, scratch: u64) -> Result<Self> {
        let Handle { group, routes, slots, generation, placement, .. } = &**handle;
        group.check_of(*generation, Phase::Combine)?;
        let len = 2 * input.hidden;
        check_rows("rows", input.rows, input.stride, len)?;
        let CombineInput { hidden, is_packed, .. } = *input;
        if is_packed && !hidden.is_multiple_of(GROUP) {
            let why = format!("rows to pack have a multiple of {GROUP} values, not {hidden}");
            return Err(Error::invalid(why));
        }
        let values = if is_packed { logfmt::max_len(hidden) } else { len };
        let row = Row { values, weights: 0, slots: routes.top_k as usize };
        let pieces = if is_packed { 0 } else { pieces_per_row(group, *slots, len / VECTOR) };
        let call = combine_call(group, &row, *slots, is_packed, scratch)?;
        let call = CallParams { dispatch_placement: *placement, ..call };
        let send = Return {
            group: group.params,
            call,
            rows: input.rows,
            row_stride: input.stride as u64,
            records: input.records,
            slot_stride: row.stride() as u64,
            row_len: len as u32,
            len: handle.expert_rows() as u32 * routes.local_experts,
            slots: *slots as u32,
            top_k: routes.top_k,
            pieces: pieces as u32,
            sums: u32::from(
                pieces > 0 && are_partial_sums_faster(group.ranks(), *slots, row.slots),
            ),
        };
        Ok(Self { handle: Arc::clone(handle), send, is_packed, is_begun: false })
    }

    /// Enqueues the send.
    ///
    /// # Errors
    /// An earlier call has failed, or the driver refuses.
    ///
    /// # Safety
    /// The stream is of the group's context, and comes after the dispatch; otherwise as for
    /// [`new`](Self::new).
    pub unsafe fn begin(&mut self, stream: &Stream) -> Result<()> {
        let group = &self.handle.group;
        group.check_of(self.handle.generation, Phase::Combine)?;
        self.is_begun = true;
        let kernels = group.kernels();
        let kernel =
            if self.is_packed { kernels.combine_send_packed } else { kernels.combine_send };
        // SAFETY: the kernel takes this struct; the module is never unloaded; the caller guarantees
        // the rest. Windows are open as long as the group lives, and freed when the GPU's work has
        // ended.
        unsafe { group.launch(stream, (kernel, self.rows()), &self.send) }
    }

    /// The most rows that go back.
    fn rows(&self) -> usize {
        self.handle.expert_rows() * self.handle.routes.top_k as usize
    }

    /// Enqueues the sums, which end the call; and the send, in the same launch if possible, if it
    /// has not begun.
    ///
    /// # Errors
    /// Arguments are wrong, or an earlier call has failed.
    ///
    /// # Safety
    /// The stream is of the group's context, and comes after the work of [`begin`](Self::begin).
    /// `combined` has a row and weights for each of this rank's tokens, and their choices; no other
    /// code uses the rows until this work has ended.
    pub unsafe fn finish(mut self, combined: &CombineOutput, stream: &Stream) -> Result<()> {
        let group = Arc::clone(&self.handle.group);
        group.check_of(self.handle.generation, Phase::Combine)?;
        let Return { call, row_len, slot_stride, slots, pieces, .. } = self.send;
        check_rows("sums", combined.rows, row_len as usize, row_len as usize)?;
        let routes = Routes { choices: combined.experts, ..self.handle.routes };
        let sum = Sum {
            group: group.params,
            call,
            routes,
            weights: combined.weights,
            waits: combined.waits,
            out: combined.rows,
            slot_stride,
            row_len,
            slots,
            pieces,
            zero: 0,
        };
        let (kernels, tokens) = (group.kernels(), routes.tokens as usize);
        if !self.is_begun && !self.is_packed && pieces > 0 {
            let rows = self.rows().max(tokens);
            let fused = WholeCombine { send: self.send, sum };
            // SAFETY: the kernel takes this struct; for the rest, as for `begin`.
            return unsafe { group.launch(stream, (kernels.fused()?.combine, rows), &fused) };
        }
        if !self.is_begun {
            // SAFETY: the caller guarantees it.
            unsafe { self.begin(stream)? };
        }
        let (kernel, blocks) = match self.is_packed {
            // Several blocks share each of a few tokens.
            true => (kernels.sum_packed, tokens * (row_len as usize).div_ceil(PACKED_STEP)),
            false => (kernels.sum, tokens),
        };
        // SAFETY: the kernel takes this struct; for the rest, as for `begin`.
        unsafe { group.launch(stream, (kernel, blocks), &sum) }
    }
}

/// Bytes of a sum that a warp makes at a time from packed rows.
const PACKED_STEP: usize = 1024;

/// Bytes of a vector, which a thread moves at a time.
const VECTOR: usize = 16;

/// The number of pieces, each with a ready flag, that a token's rows of so many vectors are cut
/// into: the same on all ranks. 0: they have no ready flags.
fn pieces_per_row(group: &Group, slots: usize, vectors: usize) -> usize {
    /// More would be no faster, as each takes a wait.
    const MOST: usize = 16;
    /// Warps of a launch, about. A warp that sends a second piece, once the first is there, leaves
    /// the link idle for a while.
    const WARPS: usize = 1792;
    /// Vectors that a warp moves at a time.
    const WIDTH: usize = 32;
    let (slots, peers) = (slots.max(1), (group.ranks() - 1).max(1));
    if !group.can_fuse() || slots > CHUNKS {
        return 0;
    }
    let most = (CHUNKS / slots).min((WARPS / (slots * peers)).clamp(1, MOST));
    // No piece is empty.
    let each = vectors.div_ceil(most * WIDTH) * WIDTH;
    vectors.div_ceil(each.max(1))
}

/// Whether ranks may send partial sums: a rank has two choices of each token on average, there are
/// so many tokens that a wait for the weights is shorter than the transfer of the rows, and there
/// are tagged words for the weights. All ranks compute the same.
fn are_partial_sums_faster(ranks: usize, slots: usize, top_k: usize) -> bool {
    /// Tokens: on two and four H100s, 32 take less time this way, and 16 about as long either way.
    const LEAST: usize = 24;
    ranks > 1 && top_k >= 2 * ranks && slots >= LEAST && slots * top_k < TAGGED_WORDS
}
