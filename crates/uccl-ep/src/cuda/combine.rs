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
    error::{Phase, Result},
    header::Header,
    record::Row,
};

/// A combine that was begun.
pub struct Combine {
    handle: Arc<Handle>,
    call: CallParams,
    row: Row,
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
        let row = Row { values: len, weights: 0, slots: routes.top_k as usize };
        let call = call_of(group, &row, *slots, scratch)?;
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
        // SAFETY: the kernel takes this struct; the module is never unloaded; the caller's promise. Windows are reached for as
        // long as the group lives, and freed when the GPU's work has ended.
        unsafe {
            let rows = handle.expert_rows() * routes.top_k as usize;
            group.launch(stream, (group.kernels().give_back, rows), &sent)?;
        }
        Ok(Self { handle: Arc::clone(handle), call, row })
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
        let Self { handle, call, row } = self;
        let group = &handle.group;
        group.check()?;
        check_rows("sums", combined.rows, row.values, row.values)?;
        let sum = Sum {
            group: group.params(),
            call,
            routes: Routes { choices: combined.experts, ..handle.routes },
            weights: combined.weights,
            waits: combined.waits,
            out: combined.rows,
            slot_stride: row.stride() as u64,
            row_len: row.values as u32,
            slots: handle.slots as u32,
        };
        // SAFETY: the kernel takes this struct; otherwise as above.
        unsafe { group.launch(stream, (group.kernels().sum, handle.routes.tokens as usize), &sum) }
    }
}

/// What the kernels need to know of a call with such rows.
pub(super) fn call_of(group: &Group, row: &Row, slots: usize, scratch: u64) -> Result<CallParams> {
    let agreed = [row.values, row.weights, row.slots, slots, 0];
    let header = Header::<5, 0> {
        phase: Phase::Combine,
        agreed: std::array::from_fn(|at| (COMBINE_AGREED[at], agreed[at])),
        told: [],
    };
    group.call(row.place(slots), &header, scratch)
}
