//! Calls of normal mode: only who asks how much arrives waits for it.

use std::{num::NonZero, sync::Arc};

use parking_lot::Mutex;
use pyo3::{exceptions::PyValueError, prelude::*};
use uccl_device::cuda::Stream;
use uccl_ep::{
    combine::{Order, Sends},
    cuda::{
        Choices,
        normal::{
            ByExpert, Combine, Combined, Dispatch, Handle, LaidOut, Layout, Outputs, Ranks,
            Results, Routed, ScalesIn, ScalesOut, Sizes, Table, Tokens, Tried,
        },
    },
};

use super::PyCudaGroup;
use crate::ep::{apart::Apart, calls::engine, exception, over, timeout_of};

/// The most tokens of each rank that a call has room for, where nobody says: rows of `payload` bytes with so many words of `scales`,
/// and rows of `hidden` bf16 that go back. Raises if this rank has more.
#[pyfunction(name = "ep_cuda_room_for")]
#[pyo3(signature = (group, tokens, *, payload, scales, hidden, top_k, local_experts, stays))]
#[expect(clippy::too_many_arguments, reason = "Python names them")]
pub(crate) fn cuda_room_for(
    group: &PyCudaGroup,
    tokens: usize,
    payload: usize,
    scales: usize,
    hidden: usize,
    top_k: usize,
    local_experts: usize,
    stays: bool,
) -> PyResult<usize> {
    let sizes = Sizes { payload, scales, hidden, top_k, local_experts, stays };
    sizes.room_for(tokens, &group.group).map_err(|e| exception(&e))
}

/// Tokens that were laid out, for dispatches to where they go.
#[pyclass(name = "EpCudaLaidOut", module = "uccl._core", frozen)]
pub(crate) struct PyLaidOut {
    laid_out: LaidOut,
}

/// Enqueues the counting of tokens: i32 by rank, i32 by expert, and a byte by token and rank. Dispatches with what is returned use
/// the scratch memory.
#[pyfunction(name = "ep_cuda_layout")]
#[pyo3(signature = (group, *, experts, is_64, tokens, top_k, num_experts, per_rank, per_expert, goes, scratch, stream))]
#[expect(clippy::too_many_arguments, reason = "Python names them")]
pub(crate) fn cuda_layout(
    py: Python<'_>,
    group: &PyCudaGroup,
    experts: u64,
    is_64: bool,
    tokens: usize,
    top_k: usize,
    num_experts: usize,
    per_rank: u64,
    per_expert: u64,
    goes: u64,
    scratch: u64,
    stream: u64,
) -> PyResult<PyLaidOut> {
    let stream = group.stream(stream);
    let choices = Choices { experts, is_64, tokens, top_k, num_experts };
    let layout = Layout { per_rank, per_expert, goes };
    // SAFETY: `uccl.ep` passes tensors of these sizes, whose memory torch gives to later work of the stream only; it keeps the scratch
    // memory with what is returned.
    let done = py.detach(|| unsafe { layout.count(&group.group, &choices, (scratch, &stream)) });
    let laid_out = done.map_err(|e| exception(&e))?;
    Ok(PyLaidOut { laid_out })
}

/// `(address, words of a token, token stride, word stride)`.
type ScalesGiven = (u64, usize, usize, usize);

/// Tokens by rank, and how many chose each local expert.
type CountsTold = (Vec<u32>, Vec<u32>);

/// A dispatch that was begun.
#[pyclass(name = "EpCudaNormalDispatch", module = "uccl._core", frozen)]
pub(crate) struct PyNormalDispatch {
    dispatch: Apart<Mutex<Option<Dispatch>>>,
    stream: Stream,
}

#[pymethods]
impl PyNormalDispatch {
    /// Enqueues the sending of tokens: to the ranks of their `experts`; or of those that they had when they were `laid_out`; or to `ranks`,
    /// a byte by token and rank, and i32 by expert, how many tokens it is told of; or to where those went that `again`, a handle, is of.
    /// Launches have `blocks` blocks at most; 0: all.
    #[new]
    #[pyo3(signature = (group, *, rows, len, scales, weights, experts, is_64, ranks, tokens, top_k, num_experts, laid_out, again, slots, blocks, scratch, stream))]
    #[expect(clippy::too_many_arguments, reason = "Python names them")]
    fn new(
        py: Python<'_>,
        group: &PyCudaGroup,
        rows: u64,
        len: usize,
        scales: Option<ScalesGiven>,
        weights: u64,
        experts: u64,
        is_64: bool,
        ranks: Option<(u64, u64)>,
        tokens: usize,
        top_k: usize,
        num_experts: usize,
        laid_out: Option<&PyLaidOut>,
        again: Option<&PyNormalHandle>,
        slots: usize,
        blocks: usize,
        scratch: u64,
        stream: u64,
    ) -> PyResult<Self> {
        let scales = scales.map(|(words, count, token_stride, word_stride)| ScalesIn {
            words,
            count,
            token_stride,
            word_stride,
        });
        let most_blocks = NonZero::new(blocks);
        let sent = Tokens { rows, stride: len, payload: len, scales, weights, most_blocks };
        let stream = group.stream(stream);
        let begun = py.detach(|| {
            let routed = match (again, laid_out, ranks) {
                (Some(again), ..) => Routed::Again(&again.handle),
                (None, Some(before), _) => Routed::LaidOut(&before.laid_out),
                (None, None, Some((goes, per_expert))) => {
                    Routed::Ranks(Ranks { goes, per_expert, tokens, num_experts })
                }
                (None, None, None) => {
                    Routed::Choices(Choices { experts, is_64, tokens, top_k, num_experts })
                }
            };
            // SAFETY: `uccl.ep` passes tensors of these sizes, whose memory torch gives to later work of the stream only; its layouts and
            // handles are of this group, and their streams are waited for.
            unsafe { Dispatch::begin(&group.group, &sent, routed, slots, (scratch, &stream)) }
        });
        let dispatch = Mutex::new(Some(begun.map_err(|e| exception(&e))?));
        Ok(Self { dispatch: Apart::new(dispatch), stream })
    }

    /// How much arrives, when every rank has told: tokens by rank, and how many chose each local expert. Waits `limit` seconds at most.
    fn counts(&self, py: Python<'_>, limit: f64) -> PyResult<CountsTold> {
        let limit = timeout_of(limit)?;
        engine(py, |interrupted| {
            let mut dispatch = self.dispatch.lock();
            let dispatch = dispatch.as_mut().ok_or_else(over)?;
            // SAFETY: the stream is the one that the dispatch was begun on.
            let counts = unsafe { dispatch.counts(&self.stream, limit, interrupted) }?;
            Ok((counts.from, counts.per_expert))
        })
    }

    /// Where rows can stay, if they can: how many there are, where the first is in the pool, how many bytes they are apart, and where the first
    /// scale is.
    fn in_place(&self) -> PyResult<Option<(usize, u64, usize, u64)>> {
        let dispatch = self.dispatch.lock();
        let place = dispatch.as_ref().ok_or_else(|| exception(&over()))?.in_place();
        Ok(place.map(|place| {
            let scales_at = place.scales.map_or(0, |scales| scales.words - place.pool);
            (place.len, place.rows - place.pool, place.stride, scales_at)
        }))
    }

    /// Enqueues the taking out of what arrives, behind the sending. `scales` are an address, and strides in words by row and word;
    /// `table` has the addresses of `src_info`, `origin`, `starts` and `per_expert`, unless tokens go where others went. `by_expert` are the
    /// alignment, how many tokens there is room for in tables, and the addresses of `ends` and `metadata`. With a `limit` in seconds the
    /// room is a guess: counts are waited for while rows are on their way, and there is a handle if they fit. Else another call has to follow.
    /// Rows that are `in_place` are told to stay there.
    #[pyo3(signature = (*, len, rows, stride, scales, choices, is_64, weights, zeroes_foreign, zeroes_gaps, table, by_expert, limit=None, stays=false))]
    #[expect(clippy::too_many_arguments, reason = "Python names them")]
    fn receive(
        &self,
        py: Python<'_>,
        len: usize,
        rows: u64,
        stride: usize,
        scales: Option<(u64, usize, usize)>,
        choices: u64,
        is_64: bool,
        weights: u64,
        zeroes_foreign: bool,
        zeroes_gaps: bool,
        table: Option<(u64, u64, u64, u64)>,
        by_expert: Option<(usize, usize, u64, u64)>,
        limit: Option<f64>,
        stays: bool,
    ) -> PyResult<(Option<PyNormalHandle>, Option<CountsTold>)> {
        let outputs = Outputs {
            len,
            rows,
            stride,
            scales: scales.map(|(words, row_stride, word_stride)| ScalesOut {
                words,
                row_stride,
                word_stride,
            }),
            choices,
            is_64,
            weights,
            zeroes_foreign_weights: zeroes_foreign,
            zeroes_gaps,
            table: table.map(|(src_info, origin, starts, per_expert)| Table {
                src_info,
                origin,
                starts,
                per_expert,
            }),
            by_expert: by_expert.map(|(alignment, tokens, ends, metadata)| ByExpert {
                alignment,
                tokens,
                ends,
                metadata,
            }),
        };
        if let Some(limit) = limit {
            let tried = self.try_receive(py, &outputs, limit)?;
            let counts = (tried.counts.from, tried.counts.per_expert);
            return Ok((tried.handle.map(PyNormalHandle::new), Some(counts)));
        }
        let received = py.detach(|| {
            let dispatch = self.dispatch.lock().take().ok_or_else(over)?;
            // SAFETY: `uccl.ep` passes tensors with as many rows, which nobody else has yet; it keeps the table with the handle.
            unsafe {
                match stays {
                    true => dispatch.receive_in_place(&outputs, &self.stream),
                    false => dispatch.receive(&outputs, &self.stream),
                }
            }
        });
        Ok((Some(PyNormalHandle::new(received.map_err(|e| exception(&e))?)), None))
    }
}

impl PyNormalDispatch {
    fn try_receive(&self, py: Python<'_>, outputs: &Outputs, limit: f64) -> PyResult<Tried> {
        let limit = timeout_of(limit)?;
        engine(py, |interrupted| {
            let mut dispatch = self.dispatch.lock();
            let tried = dispatch.as_mut().ok_or_else(over)?;
            // SAFETY: as for `receive`; the stream is the one that the dispatch was begun on.
            let tried = unsafe { tried.try_receive(outputs, (&self.stream, limit), interrupted) }?;
            if tried.handle.is_some() {
                *dispatch = None;
            }
            Ok(tried)
        })
    }
}

/// What a combine, or a dispatch to where tokens went, needs of a dispatch.
#[pyclass(name = "EpCudaNormalHandle", module = "uccl._core", frozen)]
pub(crate) struct PyNormalHandle {
    handle: Apart<Arc<Handle>>,
}

impl PyNormalHandle {
    fn new(handle: Handle) -> Self {
        Self { handle: Apart::new(Arc::new(handle)) }
    }
}

/// A combine that was begun.
#[pyclass(name = "EpCudaNormalCombine", module = "uccl._core", frozen)]
pub(crate) struct PyNormalCombine {
    combine: Apart<Mutex<Option<Combine>>>,
    stream: Stream,
}

#[pymethods]
impl PyNormalCombine {
    /// Enqueues the sending of rows back to where their tokens came from. What is sent is "row", or, of rows by expert, "sum" or "each".
    #[new]
    #[pyo3(signature = (group, handle, *, len, rows, hidden, weights, sends, blocks, scratch, stream))]
    #[expect(clippy::too_many_arguments, reason = "Python names them")]
    fn new(
        py: Python<'_>,
        group: &PyCudaGroup,
        handle: &PyNormalHandle,
        len: usize,
        rows: u64,
        hidden: usize,
        weights: u64,
        sends: &str,
        blocks: usize,
        scratch: u64,
        stream: u64,
    ) -> PyResult<Self> {
        let stream = group.stream(stream);
        let sends = match sends {
            "row" => Sends::Row,
            "sum" => Sends::SumOfExperts,
            "each" => Sends::EachExpert,
            other => return Err(PyValueError::new_err(format!("no {other:?} is sent"))),
        };
        let most_blocks = NonZero::new(blocks);
        let results =
            Results { len, rows, stride: 2 * hidden, hidden, weights, sends, most_blocks };
        // SAFETY: `uccl.ep` passes tensors of these sizes, whose memory torch gives to later work of the stream only.
        let begun =
            py.detach(|| unsafe { Combine::begin(&handle.handle, &results, (scratch, &stream)) });
        let combine = Mutex::new(Some(begun.map_err(|e| exception(&e))?));
        Ok(Self { combine: Apart::new(combine), stream })
    }

    /// Enqueues the sums. `sums` is "rank" or "choice".
    #[pyo3(signature = (*, rows, sums, bias, weights))]
    fn finish(
        &self,
        py: Python<'_>,
        rows: u64,
        sums: &str,
        bias: (u64, u64),
        weights: u64,
    ) -> PyResult<()> {
        let order = match sums {
            "rank" => Order::ByRank,
            "choice" => Order::ByChoice,
            other => return Err(PyValueError::new_err(format!("no sums by {other:?}"))),
        };
        let combined = Combined { rows, order, bias: [bias.0, bias.1], weights };
        let finished = py.detach(|| {
            let combine = self.combine.lock().take().ok_or_else(over)?;
            // SAFETY: `uccl.ep` passes tensors with a row, and weights, for each token of the dispatch.
            unsafe { combine.finish(&combined, &self.stream) }
        });
        finished.map_err(|e| exception(&e))
    }
}
