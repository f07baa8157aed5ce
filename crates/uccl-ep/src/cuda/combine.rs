//! What experts made of tokens comes back, and is summed: choice by choice, each times its weight, rounded once.

use std::sync::Arc;

use uccl_device::cuda::Stream;

use super::{
    dispatch::Handle,
    group::Group,
    memory::{Combined, Results, check_rows},
    params::{CallParams, Return, Routes, Sum},
    status::COMBINE_AGREED,
};
use crate::{
    error::{Error, Phase, Result},
    header::Header,
    numerics::{logfmt, quantise::GROUP},
    record::Row,
};

/// A combine that was begun.
pub struct Combine {
    handle: Arc<Handle>,
    call: CallParams,
    row: Row,
    /// Bytes of a row that is not packed.
    row_len: usize,
    is_packed: bool,
}

impl Combine {
    /// Enqueues the sending of rows back to where their tokens came from.
    ///
    /// # Errors
    /// Arguments are wrong, or an earlier call has failed.
    ///
    /// # Safety
    /// The stream is of the group's context, and comes after the dispatch. `results` describes memory that the GPU may read
    /// until this work has ended: as many rows as the dispatch had, and what it told of them. `scratch` has
    /// [`COMBINE_SCRATCH_LEN`](super::COMBINE_SCRATCH_LEN) bytes, aligned to 8, which only this combine uses until then.
    pub unsafe fn begin(
        handle: &Arc<Handle>,
        results: &Results,
        (scratch, stream): (u64, &Stream),
    ) -> Result<Self> {
        let Handle { group, routes, slots } = &**handle;
        group.check()?;
        let len = 2 * results.hidden;
        check_rows("rows", results.rows, results.stride, len)?;
        let Results { hidden, is_packed, .. } = *results;
        if is_packed && !hidden.is_multiple_of(GROUP) {
            let why = format!("rows to pack have a multiple of {GROUP} values, not {hidden}");
            return Err(Error::invalid(why));
        }
        let values = if is_packed { logfmt::max_len(hidden) } else { len };
        let row = Row { values, weights: 0, slots: routes.top_k as usize };
        let call = call_of(group, &row, *slots, is_packed, scratch)?;
        let sent = Return {
            group: group.params(),
            call,
            rows: results.rows,
            row_stride: results.stride as u64,
            src_info: results.table.src_info,
            origin: results.table.origin,
            layout_range: results.table.layout_range,
            slot_stride: row.stride() as u64,
            row_len: len as u32,
            expert_rows: handle.expert_rows() as u32,
            slots: *slots as u32,
            top_k: routes.top_k,
            local_experts: routes.local_experts,
            zero: 0,
        };
        let kernels = group.kernels();
        let kernel = if is_packed { kernels.give_back_packed } else { kernels.give_back };
        let rows = handle.expert_rows() * routes.top_k as usize;
        // SAFETY: the kernel takes this struct; the module is never unloaded; the caller's promise. Windows are reached for as
        // long as the group lives, and freed when the GPU's work has ended.
        unsafe { group.launch(stream, (kernel, rows), &sent)? };
        Ok(Self { handle: Arc::clone(handle), call, row, row_len: len, is_packed })
    }

    /// Enqueues the sums, which end the call.
    ///
    /// # Errors
    /// Arguments are wrong, or an earlier call has failed.
    ///
    /// # Safety
    /// The stream is of the group's context, and comes after the work of [`begin`](Self::begin). `combined` has a row and
    /// weights for each of this rank's tokens, and their choices; nobody else uses the rows until this work has ended.
    pub unsafe fn finish(self, combined: &Combined, stream: &Stream) -> Result<()> {
        let Self { handle, call, row, row_len, is_packed } = self;
        let group = &handle.group;
        group.check()?;
        check_rows("sums", combined.rows, row_len, row_len)?;
        let sum = Sum {
            group: group.params(),
            call,
            routes: Routes { choices: combined.experts, ..handle.routes },
            weights: combined.weights,
            waits: combined.waits,
            out: combined.rows,
            slot_stride: row.stride() as u64,
            row_len: row_len as u32,
            slots: handle.slots as u32,
        };
        let kernels = group.kernels();
        let kernel = if is_packed { kernels.sum_packed } else { kernels.sum };
        // SAFETY: the kernel takes this struct; otherwise as above.
        unsafe { group.launch(stream, (kernel, handle.routes.tokens as usize), &sum) }
    }
}

/// What the kernels need to know of a call with such rows.
pub(super) fn call_of(
    group: &Group,
    row: &Row,
    slots: usize,
    is_packed: bool,
    scratch: u64,
) -> Result<CallParams> {
    let agreed = [row.values, row.weights, row.slots, slots, usize::from(is_packed)];
    let header = Header::<5, 0> {
        phase: Phase::Combine,
        agreed: std::array::from_fn(|at| (COMBINE_AGREED[at], agreed[at])),
        told: [],
    };
    group.call(row.place(slots), &header, scratch)
}
