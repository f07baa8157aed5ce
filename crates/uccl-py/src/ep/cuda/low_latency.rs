//! Low latency calls: kernels are enqueued on the caller's stream, and no call waits for them.

use std::sync::Arc;

use parking_lot::Mutex;
use pyo3::prelude::*;
use uccl_device::cuda::Stream;
use uccl_ep::cuda::{
    COMBINE_SCRATCH_LEN, Choices,
    low_latency::{
        Combine, CombineInput, CombineOutput, Dispatch, DispatchInput, DispatchOutput, Handle,
        RowTables, ScalesOut, records_len,
    },
    scratch_len,
};

use super::PyCudaGroup;
use crate::ep::{call_over, calls::payload, detached_drop::DetachedDrop, exception};

/// Bytes of memory that a dispatch needs on the GPU until its combine has ended.
#[pyfunction(name = "ep_cuda_scratch_len")]
pub(crate) fn cuda_scratch_len(
    tokens: usize,
    top_k: usize,
    num_experts: usize,
    ranks: usize,
) -> usize {
    let choices = Choices { experts: 0, is_64: false, tokens, top_k, num_experts };
    scratch_len(&choices, ranks)
}

/// Bytes of memory that a combine needs on the GPU until it has ended.
#[pyfunction(name = "ep_cuda_combine_scratch_len")]
pub(crate) fn cuda_combine_scratch_len() -> usize {
    COMBINE_SCRATCH_LEN
}

/// Bytes of GPU memory for the records of a dispatch that its combine reads, with at most
/// `max_tokens` tokens of each rank.
#[pyfunction(name = "ep_cuda_records_len")]
pub(crate) fn cuda_records_len(max_tokens: usize, ranks: usize, top_k: usize) -> usize {
    records_len(max_tokens, ranks, top_k)
}

/// Addresses of `src_info`, records and `layout_range`.
type TablesTuple = (u64, u64, u64);

fn table((src_info, records, layout_range): TablesTuple) -> RowTables {
    RowTables { src_info, records, layout_range }
}

/// A dispatch.
#[pyclass(name = "EpCudaLowLatencyDispatch", module = "uccl._core", frozen)]
pub(crate) struct PyLowLatencyDispatch {
    dispatch: DetachedDrop<Mutex<Option<Dispatch>>>,
    stream: Stream,
}

#[pymethods]
impl PyLowLatencyDispatch {
    /// Makes a dispatch of tokens, without enqueuing it. NVFP4's global scale is a number, or lies
    /// at an address that is not 0.
    #[new]
    #[pyo3(signature = (group, *, rows, stride, format, len, global_scale, experts, is_64, tokens, top_k, num_experts, max_tokens, scratch, stream))]
    #[expect(clippy::too_many_arguments, reason = "Python names them")]
    fn new(
        group: &PyCudaGroup,
        rows: u64,
        stride: usize,
        format: &str,
        len: usize,
        global_scale: (f32, u64),
        experts: u64,
        is_64: bool,
        tokens: usize,
        top_k: usize,
        num_experts: usize,
        max_tokens: usize,
        scratch: u64,
        stream: u64,
    ) -> PyResult<Self> {
        let stream = group.stream(stream);
        let choices = Choices { experts, is_64, tokens, top_k, num_experts };
        let (value, global_scale) = global_scale;
        let payload = payload(format, len, value)?;
        let tokens = DispatchInput { rows, stride, payload, global_scale };
        // SAFETY: `uccl.ep` passes tensors of these sizes, and torch gives their memory to later
        // work of the stream only.
        let new = unsafe { Dispatch::new(&group.group, &tokens, &choices, max_tokens, scratch) };
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

    /// Enqueues the receipt, and the sends unless they were enqueued. `scales` are an address, and
    /// strides in words by row, expert and word; `tiles` an address, and the number of tile rows of
    /// each expert.
    #[pyo3(signature = (*, rows, stride, count, stats, waits, table, scales=None, tiles=None))]
    #[expect(clippy::too_many_arguments, reason = "Python names them")]
    fn receive(
        &self,
        py: Python<'_>,
        rows: u64,
        stride: usize,
        count: u64,
        stats: u64,
        waits: u64,
        table: TablesTuple,
        scales: Option<(u64, usize, usize, usize)>,
        tiles: Option<(u64, usize)>,
    ) -> PyResult<PyLowLatencyHandle> {
        let strided = |(words, row_stride, expert_stride, word_stride)| ScalesOut::Strided {
            words,
            row_stride,
            expert_stride,
            word_stride,
        };
        let in_tiles = |(words, tile_rows)| ScalesOut::Tiled { words, tile_rows };
        let scales = scales.map(strided).or(tiles.map(in_tiles));
        let outputs = DispatchOutput {
            rows,
            stride,
            scales,
            count,
            stats,
            waits,
            tables: self::table(table),
        };
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
