//! Low latency calls: kernels are enqueued on the caller's stream, and no call waits for them.

use std::sync::Arc;

use parking_lot::Mutex;
use pyo3::prelude::*;
use uccl_device::cuda::Stream;
use uccl_ep::cuda::{
    COMBINE_SCRATCH_LEN, Choices,
    low_latency::{
        Combine, CombineInput, CombineOutput, Dispatch, DispatchInput, DispatchOutput, Handle,
        RowTables, ScalesOut, WorkspaceLayout,
    },
};

use super::PyCudaGroup;
use crate::ep::{
    call_over,
    calls::payload,
    detached_drop::DetachedDrop,
    exception,
    scales::{RowScales, ScaleTiles},
};

/// Bytes of memory that a combine needs on the GPU until it has ended.
#[pyfunction(name = "ep_cuda_combine_scratch_len")]
pub(crate) fn cuda_combine_scratch_len() -> usize {
    COMBINE_SCRATCH_LEN
}

/// The offsets of a dispatch's sub-buffers in one allocation, in words of four bytes.
#[pyclass(name = "EpCudaLowLatencyWorkspace", module = "uccl._core", frozen, get_all)]
pub(crate) struct PyLowLatencyWorkspace {
    /// Scratch of the handle's first combine.
    combine_scratch: usize,
    /// Scratch of the dispatch.
    dispatch_scratch: usize,
    /// The records for the combine.
    records: usize,
    /// `[E/R, R * T]` i32: token numbers at their ranks.
    src_info: usize,
    /// `[E/R]` i32: rows of each local expert.
    count: usize,
    /// Words of the memory.
    len: usize,
}

#[pymethods]
impl PyLowLatencyWorkspace {
    /// The workspace of a dispatch with at most `max_tokens` tokens of each rank.
    #[new]
    #[pyo3(signature = (*, tokens, top_k, num_experts, max_tokens, ranks))]
    fn new(
        tokens: usize,
        top_k: usize,
        num_experts: usize,
        max_tokens: usize,
        ranks: usize,
    ) -> Self {
        let choices = Choices { experts: 0, is_64: false, tokens, top_k, num_experts };
        let WorkspaceLayout { combine_scratch, dispatch_scratch, records, src_info, count, len } =
            WorkspaceLayout::of(&choices, max_tokens, ranks);
        Self { combine_scratch, dispatch_scratch, records, src_info, count, len }
    }
}

/// A dispatch.
#[pyclass(name = "EpCudaLowLatencyDispatch", module = "uccl._core", frozen)]
pub(crate) struct PyLowLatencyDispatch {
    dispatch: DetachedDrop<Mutex<Option<Dispatch>>>,
    stream: Stream,
}

#[pymethods]
impl PyLowLatencyDispatch {
    /// Makes a dispatch of tokens, without enqueuing it. NVFP4's global scale is at an address,
    /// unless that is 0, and else a number. The outputs have `expert_rows` rows for each local
    /// expert.
    #[new]
    #[pyo3(signature = (group, *, rows, stride, format, len, global_scale, global_scale_at, experts, is_64, tokens, top_k, num_experts, max_tokens, expert_rows, scratch, stream))]
    #[expect(clippy::too_many_arguments, reason = "Python names them")]
    fn new(
        group: &PyCudaGroup,
        rows: u64,
        stride: usize,
        format: &str,
        len: usize,
        global_scale: f32,
        global_scale_at: u64,
        experts: u64,
        is_64: bool,
        tokens: usize,
        top_k: usize,
        num_experts: usize,
        max_tokens: usize,
        expert_rows: usize,
        scratch: u64,
        stream: u64,
    ) -> PyResult<Self> {
        let stream = group.stream(stream);
        let choices = Choices { experts, is_64, tokens, top_k, num_experts };
        let payload = payload(format, len, global_scale)?;
        let tokens = DispatchInput { rows, stride, payload, global_scale: global_scale_at };
        // SAFETY: `uccl.ep` passes tensors of these sizes, and torch gives their memory to later
        // work of the stream only.
        let new = unsafe { Dispatch::new(&group.group, &tokens, &choices, max_tokens, scratch) };
        let new = new.and_then(|dispatch| dispatch.with_expert_rows(expert_rows));
        let dispatch = Mutex::new(Some(new.map_err(|e| exception(&e))?));
        Ok(Self { dispatch: DetachedDrop::new(dispatch), stream })
    }

    /// Enqueues the sends.
    fn begin(&self, py: Python<'_>) -> PyResult<()> {
        let begun = py.detach(|| {
            let mut dispatch = self.dispatch.lock();
            // SAFETY: the stream is of the group's context; otherwise as above.
            unsafe { dispatch.as_mut().ok_or_else(call_over)?.begin(&self.stream) }
        });
        begun.map_err(|e| exception(&e))
    }

    /// Enqueues the receipt, and the sends unless they were enqueued. `src_info`, `records` and
    /// `layout_range` are the handle's tables.
    #[pyo3(signature = (
        *, rows, stride, count, stats, waits, src_info, records, layout_range, scales=None,
        tiles=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "Python names them")]
    fn receive(
        &self,
        py: Python<'_>,
        rows: u64,
        stride: usize,
        count: u64,
        stats: u64,
        waits: u64,
        src_info: u64,
        records: u64,
        layout_range: u64,
        scales: Option<RowScales>,
        tiles: Option<ScaleTiles>,
    ) -> PyResult<PyLowLatencyHandle> {
        let strided = |RowScales { words, row_stride, expert_stride, word_stride }| {
            ScalesOut::Strided { words, row_stride, expert_stride, word_stride }
        };
        let in_tiles = |ScaleTiles { words, tile_rows }| ScalesOut::Tiled { words, tile_rows };
        let scales = scales.map(strided).or(tiles.map(in_tiles));
        let tables = RowTables { src_info, records, layout_range };
        let outputs = DispatchOutput { rows, stride, scales, count, stats, waits, tables };
        let received = py.detach(|| {
            let dispatch = self.dispatch.lock().take().ok_or_else(call_over)?;
            // SAFETY: `uccl.ep` passes tensors with a row for each token that may come, which no
            // other code uses yet.
            unsafe { dispatch.receive(&outputs, &self.stream) }
        });
        let handle = Arc::new(received.map_err(|e| exception(&e))?);
        Ok(PyLowLatencyHandle { handle: DetachedDrop::new(handle) })
    }
}

/// The state of a dispatch that its combine needs.
#[pyclass(name = "EpCudaLowLatencyHandle", module = "uccl._core", frozen)]
pub(crate) struct PyLowLatencyHandle {
    handle: DetachedDrop<Arc<Handle>>,
}

/// A combine.
#[pyclass(name = "EpCudaLowLatencyCombine", module = "uccl._core", frozen)]
pub(crate) struct PyLowLatencyCombine {
    combine: DetachedDrop<Mutex<Option<Combine>>>,
    stream: Stream,
}

#[pymethods]
impl PyLowLatencyCombine {
    /// Makes a combine, without enqueuing it. It sends rows back to the ranks of their tokens, as
    /// LogFMT-10 if `is_packed`.
    #[new]
    #[pyo3(signature = (group, handle, *, rows, hidden, records, is_packed, scratch, stream))]
    #[expect(clippy::too_many_arguments, reason = "Python names them")]
    fn new(
        group: &PyCudaGroup,
        handle: &PyLowLatencyHandle,
        rows: u64,
        hidden: usize,
        records: u64,
        is_packed: bool,
        scratch: u64,
        stream: u64,
    ) -> PyResult<Self> {
        let stream = group.stream(stream);
        let input = CombineInput { rows, stride: 2 * hidden, hidden, records, is_packed };
        // SAFETY: `uccl.ep` passes tensors of these sizes, and torch gives their memory to later
        // work of the stream only.
        let new = unsafe { Combine::new(&handle.handle, &input, scratch) };
        let combine = Mutex::new(Some(new.map_err(|e| exception(&e))?));
        Ok(Self { combine: DetachedDrop::new(combine), stream })
    }

    /// Enqueues the sends.
    fn begin(&self, py: Python<'_>) -> PyResult<()> {
        let begun = py.detach(|| {
            let mut combine = self.combine.lock();
            // SAFETY: the stream is of the group's context, and comes after the dispatch; otherwise
            // as above.
            unsafe { combine.as_mut().ok_or_else(call_over)?.begin(&self.stream) }
        });
        begun.map_err(|e| exception(&e))
    }

    /// Enqueues the sums, and the sends unless they were enqueued.
    #[pyo3(signature = (*, rows, weights, experts, waits))]
    fn finish(
        &self,
        py: Python<'_>,
        rows: u64,
        weights: u64,
        experts: u64,
        waits: u64,
    ) -> PyResult<()> {
        let combined = CombineOutput { rows, weights, experts, waits };
        let finished = py.detach(|| {
            let combine = self.combine.lock().take().ok_or_else(call_over)?;
            // SAFETY: `uccl.ep` passes tensors with a row, and weights and choices, for each token
            // of the dispatch.
            unsafe { combine.finish(&combined, &self.stream) }
        });
        finished.map_err(|e| exception(&e))
    }
}
