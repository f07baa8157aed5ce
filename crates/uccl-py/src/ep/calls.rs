//! Dispatches and combines in flight.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use pyo3::{exceptions::PyValueError, prelude::*, types::PyTuple};
use uccl_ep::{
    Result,
    combine::{Combine, CombineChoices, CombineInput, CombineOutput, CombineRows, Order, SumOrder},
    dispatch::{
        ChoicesOut, Dispatch, DispatchInput, DispatchOutput, Payload, Room, RowLayout, ScalesIn,
        ScalesOut,
    },
    numerics::quantise::ScaleFormat,
    routing::Routing,
};

use super::{
    PyGroup, PyHandle, PyRouting, call_over,
    detached_drop::DetachedDrop,
    exception,
    scales::{RowScales, ScaleTiles, TokenScales},
};
use crate::interrupt::listening;

/// Arguments with addresses of tensors, which Python keeps until the call has ended.
struct TensorRefs<T>(T);

// SAFETY: tensors belong to no thread.
unsafe impl<T> Send for TensorRefs<T> {}

impl<T> TensorRefs<T> {
    fn into_inner(self) -> T {
        self.0
    }
}

/// Runs a call of the engine without the GIL.
pub(super) fn engine<T: Send>(
    py: Python<'_>,
    call: impl FnOnce(&mut dyn FnMut() -> bool) -> Result<T> + Send,
) -> PyResult<T> {
    let done = listening(py, |signals| call(&mut || signals.interrupted()))?;
    done.map_err(|e| exception(&e))
}

fn address<T>(at: usize) -> Option<*mut T> {
    (at != 0).then_some(at as *mut T)
}

pub(super) fn payload(format: &str, len: usize, global_scale: f32) -> PyResult<Payload> {
    Ok(match format {
        "bytes" => Payload::Bytes(len),
        "exact" => Payload::Quantised(len, ScaleFormat::Exact),
        "power" => Payload::Quantised(len, ScaleFormat::PowerOfTwo),
        "exponent" => Payload::Quantised(len, ScaleFormat::Exponent),
        "nvfp4" => Payload::Nvfp4(len, global_scale),
        other => return Err(PyValueError::new_err(format!("no payload {other:?}"))),
    })
}

/// A dispatch in flight. At the end of its context, peers are notified that this rank gave up on
/// it, unless it has ended.
#[pyclass(name = "EpDispatch", module = "uccl._core", frozen)]
pub(crate) struct PyDispatch {
    dispatch: DetachedDrop<Mutex<Option<Dispatch>>>,
}

#[pymethods]
impl PyDispatch {
    /// Starts to send tokens; with `relays`, once to each other node, if the group can.
    /// `max_tokens` is the limit of each rank's tokens; without it the tokens go in rounds.
    /// With `is_stable` the rows do not change until the call has ended.
    #[new]
    #[pyo3(signature = (group, routing, *, rows, stride, format, len, global_scale=1.0, scales=None, weights=0, max_tokens=None, relays=false, is_stable=false))]
    #[expect(clippy::too_many_arguments, reason = "Python names them")]
    fn new(
        py: Python<'_>,
        group: &PyGroup,
        routing: &PyRouting,
        rows: usize,
        stride: usize,
        format: &str,
        len: usize,
        global_scale: f32,
        scales: Option<TokenScales>,
        weights: usize,
        max_tokens: Option<usize>,
        relays: bool,
        is_stable: bool,
    ) -> PyResult<Self> {
        let scales = scales.map(|scales: TokenScales| ScalesIn {
            words: scales.words as *const u32,
            count: scales.token_words,
            token_stride: scales.token_stride,
            word_stride: scales.word_stride,
        });
        let weights = address(weights).map(<*mut f32>::cast_const);
        let tokens = DispatchInput {
            rows: rows as *const u8,
            stride,
            payload: payload(format, len, global_scale)?,
            scales,
            weights,
            is_stable,
        };
        let room = max_tokens.map_or_else(|| Room::of_rounds(group.group.pool_len()), Room::Tokens);
        let (group, routing, tokens) =
            (Arc::clone(&group.group), Arc::clone(&routing.routing), TensorRefs(tokens));
        let dispatch = engine(py, move |interrupted| {
            let tokens = tokens.into_inner();
            let routing = match group.relays() {
                Some(nodes) if relays && routing.nodes().count == 1 => {
                    Arc::new(Routing::clone(&routing).relayed(nodes)?)
                }
                _ => routing,
            };
            // SAFETY: `uccl.ep` passes tensors of these sizes, and keeps them until the dispatch
            // has ended.
            unsafe { Dispatch::begin(&group, routing, tokens, room, interrupted) }
        })?;
        Ok(Self { dispatch: DetachedDrop::new(Mutex::new(Some(dispatch))) })
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    /// Ends the dispatch, unless it has ended.
    #[pyo3(signature = (*_raised))]
    fn __exit__(&self, py: Python<'_>, _raised: &Bound<'_, PyTuple>) {
        py.detach(|| drop(self.dispatch.lock().take()));
    }

    /// The received numbers, once every rank has sent them.
    fn counts(&self, py: Python<'_>) -> PyResult<PyReceiveCounts> {
        engine(py, |interrupted| {
            let mut dispatch = self.dispatch.lock();
            let dispatch = dispatch.as_mut().ok_or_else(call_over)?;
            let counts = dispatch.counts(interrupted)?;
            Ok(PyReceiveCounts {
                per_rank: counts.per_rank.clone(),
                per_expert: counts.of_experts(),
            })
        })
    }

    /// By rank, the nanoseconds that `counts` waited for it.
    fn waited(&self) -> PyResult<Vec<u64>> {
        let dispatch = self.dispatch.lock();
        let waited = dispatch.as_ref().ok_or_else(|| exception(&call_over()))?.waited();
        Ok(waited.into_iter().map(nanoseconds).collect())
    }

    /// Takes the received rows. `starts`, if given, are the first rows of this rank's experts.
    #[pyo3(signature = (*, len, rows, stride, scales=None, tiles=None, choices=0, is_64=false, weights=0, zero_foreign_weights=false, starts=None))]
    #[expect(clippy::too_many_arguments, reason = "Python names them")]
    fn receive(
        &self,
        py: Python<'_>,
        len: usize,
        rows: usize,
        stride: usize,
        scales: Option<RowScales>,
        tiles: Option<ScaleTiles>,
        choices: usize,
        is_64: bool,
        weights: usize,
        zero_foreign_weights: bool,
        starts: Option<Vec<usize>>,
    ) -> PyResult<PyHandle> {
        let strided = |RowScales { words, row_stride, expert_stride, word_stride }| {
            let words = words as *mut u32;
            ScalesOut::Strided { words, row_stride, expert_stride, word_stride }
        };
        let in_tiles = |ScaleTiles { words, tile_rows }| ScalesOut::Tiled {
            words: words as *mut u32,
            tile_rows,
        };
        let scales = scales.map(strided).or(tiles.map(in_tiles));
        let choices = match is_64 {
            true => address(choices).map(ChoicesOut::I64),
            false => address(choices).map(ChoicesOut::I32),
        };
        let outputs = TensorRefs(DispatchOutput {
            len,
            rows: rows as *mut u8,
            stride,
            scales,
            choices,
            weights: address(weights),
            zero_foreign_weights,
        });
        let layout = starts.map_or(RowLayout::ByToken, RowLayout::ByExpert);
        let handle = engine(py, move |interrupted| {
            let outputs = outputs.into_inner();
            let dispatch = self.dispatch.lock().take().ok_or_else(call_over)?;
            // SAFETY: `uccl.ep` passes tensors with as many rows, which no other code uses yet.
            unsafe { dispatch.receive(outputs, &layout, interrupted) }
        })?;
        Ok(PyHandle { handle: DetachedDrop::new(Arc::new(handle)) })
    }
}

/// The received numbers of a dispatch.
#[pyclass(name = "EpReceiveCounts", module = "uccl._core", frozen, get_all)]
pub(crate) struct PyReceiveCounts {
    /// Tokens by rank.
    per_rank: Vec<u32>,
    /// Rows by local expert.
    per_expert: Vec<u32>,
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// A combine in flight.
#[pyclass(name = "EpCombine", module = "uccl._core", frozen)]
pub(crate) struct PyCombine {
    combine: DetachedDrop<Mutex<Option<Combine>>>,
}

#[pymethods]
impl PyCombine {
    /// Starts to send rows back. `sends` is "row", "each" or "sum". `relays`, "rank" or "choice",
    /// is the order in which relays sum them; without it every row is sent all the way. `has_hook`
    /// leaves rows in a block, where their receivers read them.
    #[new]
    #[pyo3(signature = (handle, *, rows, len, stride, hidden, sends, weights=0, is_packed=false, is_stable=false, has_hook=false, relays=None))]
    #[expect(clippy::too_many_arguments, reason = "Python names them")]
    fn new(
        py: Python<'_>,
        handle: &PyHandle,
        rows: usize,
        len: usize,
        stride: usize,
        hidden: usize,
        sends: &str,
        weights: usize,
        is_packed: bool,
        is_stable: bool,
        has_hook: bool,
        relays: Option<&str>,
    ) -> PyResult<Self> {
        let sends = match sends {
            "row" => CombineRows::Row,
            "each" => CombineRows::EachExpert,
            "sum" => CombineRows::SumOfExperts,
            other => return Err(PyValueError::new_err(format!("nothing is sent as {other:?}"))),
        };
        let relays = match relays {
            None => None,
            Some("rank") => Some(Order::ByRank),
            Some("choice") => Some(Order::ByChoice),
            Some(other) => {
                return Err(PyValueError::new_err(format!("no relays sum by {other:?}")));
            }
        };
        let weights = address(weights).map(<*mut f32>::cast_const);
        let rows = rows as *const u8;
        let input = TensorRefs(CombineInput {
            rows,
            len,
            stride,
            hidden,
            sends,
            weights,
            is_packed,
            relays,
            is_stable,
        });
        let handle = Arc::clone(&handle.handle);
        let combine = engine(py, move |interrupted| {
            let input = input.into_inner();
            // SAFETY: `uccl.ep` passes tensors of these sizes, and keeps them until the combine has
            // ended.
            let mut combine = unsafe { Combine::begin(&handle, input, interrupted) }?;
            if has_hook {
                combine.leave_rows();
            }
            Ok(combine)
        })?;
        Ok(Self { combine: DetachedDrop::new(Mutex::new(Some(combine))) })
    }

    /// Sums the returned rows. `sums` is "rank", "choice" or "weighted", with weights of choices.
    /// Rows of experts are left out if their choice is negative in `experts`, if that is given. The
    /// biases are up to two first addends, or 0. Returns, by rank, the nanoseconds that this waited
    /// for it.
    #[pyo3(signature = (*, rows, sums, choice_weights=0, bias=0, second_bias=0, weights=0, experts=0, is_64=false))]
    #[expect(clippy::too_many_arguments, reason = "Python names them")]
    fn finish(
        &self,
        py: Python<'_>,
        rows: usize,
        sums: &str,
        choice_weights: usize,
        bias: usize,
        second_bias: usize,
        weights: usize,
        experts: usize,
        is_64: bool,
    ) -> PyResult<Vec<u64>> {
        let sums = match sums {
            "rank" => SumOrder::ByRank,
            "choice" => SumOrder::ByChoice,
            "weighted" => SumOrder::Weighted(choice_weights as *const f32),
            other => return Err(PyValueError::new_err(format!("no sums by {other:?}"))),
        };
        let bias = [bias, second_bias].map(|bias| address(bias).map(<*mut u16>::cast_const));
        let combined = TensorRefs(CombineOutput {
            rows: rows as *mut u16,
            sums,
            bias,
            weights: address(weights),
        });
        let chosen = match is_64 {
            true => address::<i64>(experts).map(|at| CombineChoices::I64(at)),
            false => address::<i32>(experts).map(|at| CombineChoices::I32(at)),
        };
        let chosen = TensorRefs(chosen);
        let waited = engine(py, move |interrupted| {
            let (combined, chosen) = (combined.into_inner(), chosen.into_inner());
            let mut combine = self.combine.lock().take().ok_or_else(call_over)?;
            if let Some(chosen) = chosen {
                // SAFETY: `uccl.ep` passes a tensor with a number for each choice, and keeps it
                // until the combine has ended.
                unsafe { combine.leave_out(chosen) };
            }
            // SAFETY: `uccl.ep` passes tensors with a row for each token, which no other code uses
            // yet.
            unsafe { combine.finish(combined, interrupted) }
        })?;
        Ok(waited.into_iter().map(nanoseconds).collect())
    }
}
