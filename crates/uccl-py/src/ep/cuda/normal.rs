//! Calls of normal mode. A call waits on the host only if it returns received counts.

use std::{num::NonZero, sync::Arc};

use parking_lot::Mutex;
use pyo3::{exceptions::PyValueError, intern, prelude::*};
use uccl_device::cuda::Stream;
use uccl_ep::{
    Error,
    combine::{CombineRows, Order},
    cuda::{
        Choices, ORIGIN_RANK,
        normal::{
            Combine, CombineInput, CombineOutput, DispatchInput, DispatchLayout, DispatchOutcome,
            DispatchRequest, DispatchResult, Handle, Launch, LayoutOutput, LayoutWorkspace, Plan,
            PlanShape, RecvMemory, Routing, RowLayout, ScalesIn, ScalesOut, TokenRanks,
            WorkspaceLayout,
        },
    },
};

use super::PyCudaGroup;
use crate::ep::{
    call_over,
    calls::engine,
    detached_drop::DetachedDrop,
    exception,
    scales::{RowScales, TokenScales},
    timeout_of,
};

/// The origin of a received token is its rank times this, plus this rank's index among the token's
/// ranks.
#[pyfunction(name = "ep_cuda_origin_rank")]
pub(crate) fn cuda_origin_rank() -> usize {
    ORIGIN_RANK
}

/// The layout of tokens, for dispatches of the same tokens.
#[pyclass(name = "EpCudaDispatchLayout", module = "uccl._core", frozen)]
pub(crate) struct PyDispatchLayout {
    layout: DispatchLayout,
}

/// Enqueues the counts of tokens: i32 by rank, i32 by expert, and a byte by token and rank.
/// Dispatches with the returned layout use the scratch memory.
#[pyfunction(name = "ep_cuda_layout")]
#[pyo3(signature = (group, *, experts, is_64, tokens, top_k, num_experts, per_rank, per_expert, token_in_rank, scratch, stream))]
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
    token_in_rank: u64,
    scratch: u64,
    stream: u64,
) -> PyResult<PyDispatchLayout> {
    let stream = group.stream(stream);
    let choices = Choices { experts, is_64, tokens, top_k, num_experts };
    let layout = LayoutOutput { per_rank, per_expert, token_in_rank };
    // SAFETY: `uccl.ep` passes tensors of these sizes, and torch gives their memory to later work
    // of the stream only; `uccl.ep` keeps the scratch memory with the returned layout.
    let done = py.detach(|| unsafe {
        layout.count(&group.group, &choices, Launch { stream: &stream, scratch })
    });
    let layout = done.map_err(|e| exception(&e))?;
    Ok(PyDispatchLayout { layout })
}

/// The offsets of a layout's counts and scratch in one allocation, in words of four bytes.
#[pyclass(name = "EpCudaLayoutWorkspace", module = "uccl._core", frozen, get_all)]
pub(crate) struct PyLayoutWorkspace {
    /// `[E]` i32: tokens that chose each expert.
    per_expert: usize,
    /// `[R]` i32: tokens for each rank.
    per_rank: usize,
    /// Scratch.
    scratch: usize,
    /// Words of the memory.
    len: usize,
}

#[pymethods]
impl PyLayoutWorkspace {
    /// The workspace of `ep_cuda_layout`.
    #[new]
    #[pyo3(signature = (*, tokens, top_k, num_experts, ranks))]
    fn new(tokens: usize, top_k: usize, num_experts: usize, ranks: usize) -> Self {
        let choices = Choices { experts: 0, is_64: false, tokens, top_k, num_experts };
        let LayoutWorkspace { per_expert, per_rank, scratch, len } =
            LayoutWorkspace::of(&choices, ranks);
        Self { per_expert, per_rank, scratch, len }
    }
}

/// Properties that dispatches of one shape share: attributes of a Python object.
#[derive(FromPyObject)]
struct DispatchShape {
    /// Values of a row.
    hidden: usize,
    row_bytes: usize,
    /// Words of a row's scales.
    scales: usize,
    top_k: usize,
    num_experts: usize,
    /// The alignment of an expert's rows, for rows by expert.
    alignment: Option<usize>,
    /// Words of a choice; 0 if choices are not returned.
    choice_words: usize,
    has_weights: bool,
    zero_foreign_weights: bool,
    zero_gaps: bool,
    /// Whether the scales of one channel are contiguous.
    is_col_major: bool,
    /// Whether the rows may be a view of the communication buffer.
    zero_copy: bool,
    /// Whether tables of rows are written: not for a dispatch to earlier rows.
    fills_tables: bool,
}

/// The shape of dispatches, and their plan.
#[pyclass(name = "EpCudaDispatchPlan", module = "uccl._core", frozen)]
pub(crate) struct PyDispatchPlan {
    plan: Plan,
}

/// The input of a dispatch: attributes of a Python object. Tokens are sent to the rows of an
/// earlier dispatch, with its handle `cached`; or to the ranks of `layout`; or to those of
/// `token_in_rank`, a byte by token and rank, with the counts `per_expert`, i32; or to the ranks of
/// `experts`.
#[derive(FromPyObject)]
struct SendArgs {
    rows: u64,
    scales: Option<TokenScales>,
    weights: u64,
    experts: u64,
    /// Whether an expert is an i64, or an i32.
    is_64: bool,
    token_in_rank: Option<u64>,
    per_expert: u64,
    tokens: usize,
    layout: Option<Py<PyDispatchLayout>>,
    cached: Option<Py<PyNormalHandle>>,
    /// The layout of received rows; None: as many as arrive.
    row_layout: Option<Py<PyRowLayout>>,
    /// The most tokens of any rank; None: any number, but with a row layout its part of the rows.
    max_tokens: Option<usize>,
    /// Whether a dispatch with `cached` waits for counts, if the host has none.
    needs_counts: bool,
    /// The most blocks of a launch; 0: as many as the group has.
    max_blocks: usize,
    stream: u64,
}

/// The offsets of a workspace's sub-buffers, and its length, in words of four bytes.
#[pyclass(name = "EpCudaWorkspaceLayout", module = "uccl._core", frozen, get_all)]
#[derive(PartialEq)]
pub(crate) struct PyWorkspaceLayout {
    /// Scratch of the handle's first combine.
    combine_scratch: usize,
    /// Scratch of the dispatch.
    dispatch_scratch: usize,
    /// `[R + 1]`: the first token of each rank.
    starts: usize,
    /// `[E/R]`: tokens of each local expert.
    per_expert: usize,
    /// `[m]`: token numbers at their ranks.
    src_info: usize,
    /// `[m]`: ranks of tokens, and this rank's index among the token's ranks.
    origin: usize,
    /// `[E/R]`: the end of each expert's rows, for rows by expert.
    ends: usize,
    /// `[m, K + 2]`: sources and rows of tokens, for rows by expert.
    metadata: usize,
    /// Received choices.
    choices: usize,
    /// Received weights.
    weights: usize,
    /// Received scales.
    scales: usize,
    /// Words of the workspace.
    len: usize,
}

#[pymethods]
impl PyWorkspaceLayout {
    /// Whether sub-buffers have the same offsets and lengths.
    fn is_same(&self, other: &Self) -> bool {
        self == other
    }
}

impl PyWorkspaceLayout {
    fn of(layout: &WorkspaceLayout) -> Self {
        let &WorkspaceLayout { combine_scratch, dispatch_scratch, starts, per_expert, .. } = layout;
        let &WorkspaceLayout { src_info, origin, ends, metadata, .. } = layout;
        let &WorkspaceLayout { choices, weights, scales, len, .. } = layout;
        Self {
            combine_scratch,
            dispatch_scratch,
            starts,
            per_expert,
            src_info,
            origin,
            ends,
            metadata,
            choices,
            weights,
            scales,
            len,
        }
    }
}

/// The layout of received rows: one for each token, or one for each token and local expert.
#[pyclass(name = "EpRowLayout", module = "uccl._core", frozen)]
pub(crate) struct PyRowLayout {
    layout: RowLayout,
}

#[pymethods]
impl PyRowLayout {
    /// Makes the layout of `tokens` tokens, or of an upper bound of them. Without `alignment` and
    /// `rows` it has rows by token.
    #[new]
    #[pyo3(signature = (tokens, alignment=None, rows=None))]
    fn new(tokens: usize, alignment: Option<usize>, rows: Option<usize>) -> Self {
        Self { layout: RowLayout { alignment, rows, ..RowLayout::by_token(tokens) } }
    }

    /// The layout with room for `tokens` tokens, for any choices of local experts.
    #[staticmethod]
    #[pyo3(signature = (tokens, alignment, top_k, local_experts))]
    fn upper_bound(
        tokens: usize,
        alignment: Option<usize>,
        top_k: usize,
        local_experts: usize,
    ) -> Self {
        Self { layout: RowLayout::upper_bound(tokens, alignment, top_k, local_experts) }
    }

    /// Received tokens, or an upper bound if the host has no counts.
    #[getter]
    fn tokens(&self) -> usize {
        self.layout.tokens
    }

    /// The alignment of each expert's first row; None for rows by token.
    #[getter]
    fn alignment(&self) -> Option<usize> {
        self.layout.alignment
    }

    /// Rows by expert, with the gaps between experts; None for rows by token.
    #[getter]
    fn rows(&self) -> Option<usize> {
        self.layout.rows
    }

    /// Rows of the output tensor.
    fn num_rows(&self) -> usize {
        self.layout.num_rows()
    }
}

impl PyDispatchPlan {
    /// The dispatch that the arguments ask for.
    fn request<'a>(&self, send_args: &'a SendArgs) -> DispatchRequest<'a> {
        let shape = self.plan.shape();
        let scales = send_args.scales.map(
            |TokenScales { words, token_words, token_stride, word_stride }| ScalesIn {
                words,
                count: token_words,
                token_stride,
                word_stride,
            },
        );
        let &SendArgs { rows, weights, experts, is_64, per_expert, tokens, .. } = send_args;
        let (top_k, num_experts) = (shape.top_k, shape.num_experts);
        let routing = match (&send_args.cached, &send_args.layout, send_args.token_in_rank) {
            (Some(cached), ..) => Routing::Cached(&cached.get().handle),
            (None, Some(before), _) => Routing::Layout(&before.get().layout),
            (None, None, Some(token_in_rank)) => {
                Routing::Ranks(TokenRanks { token_in_rank, per_expert, tokens, num_experts })
            }
            (None, None, None) => {
                Routing::Choices(Choices { experts, is_64, tokens, top_k, num_experts })
            }
        };
        DispatchRequest {
            input: DispatchInput {
                rows,
                stride: shape.row_bytes,
                payload: shape.row_bytes,
                scales,
                weights,
                max_blocks: NonZero::new(send_args.max_blocks),
            },
            routing,
            row_layout: send_args.row_layout.as_ref().map(|rows| rows.get().layout),
            max_tokens: send_args.max_tokens,
            needs_counts: send_args.needs_counts,
        }
    }

    /// Asks the caller for memory: a workspace, and so many rows, if any.
    fn recv_memory(
        &self,
        memory: &Bound<'_, PyAny>,
        workspace: &WorkspaceLayout,
        num_rows: Option<usize>,
        waits: bool,
    ) -> PyResult<RecvMemory> {
        let py = memory.py();
        let layout = PyWorkspaceLayout::of(workspace);
        let workspace = memory.call_method1(intern!(py, "workspace"), (layout, waits))?;
        let mut made = RecvMemory { workspace: workspace.extract()?, rows: 0, scales: None };
        if let Some(num_rows) = num_rows {
            made.rows = memory.call_method1(intern!(py, "rows"), (num_rows,))?.extract()?;
            if self.plan.shape().is_col_major {
                let scales = memory.call_method1(intern!(py, "scales"), (num_rows,))?;
                let RowScales { words, row_stride, word_stride, .. } = scales.extract()?;
                made.scales = Some(ScalesOut { words, row_stride, word_stride });
            }
        }
        Ok(made)
    }
}

#[pymethods]
impl PyDispatchPlan {
    /// The plan of a group's dispatches of this shape.
    #[new]
    fn new(group: &PyCudaGroup, shape: DispatchShape) -> Self {
        let DispatchShape { hidden, row_bytes, scales, top_k, num_experts, alignment, .. } = shape;
        let DispatchShape { choice_words, has_weights, zero_foreign_weights, .. } = shape;
        let DispatchShape { zero_gaps, is_col_major, zero_copy, fills_tables, .. } = shape;
        let plan = Plan::new(PlanShape {
            ranks: group.group.ranks(),
            hidden,
            row_bytes,
            scales,
            top_k,
            num_experts,
            alignment,
            choice_words,
            has_weights,
            zero_foreign_weights,
            zero_gaps,
            fills_tables,
            is_col_major,
            zero_copy,
            can_fuse: group.group.can_fuse(),
        });
        Self { plan }
    }

    /// The estimated layout of the next received rows.
    #[getter]
    fn estimate(&self) -> Option<PyRowLayout> {
        self.plan.estimate().map(|layout| PyRowLayout { layout })
    }

    #[setter]
    fn set_estimate(&self, estimate: Option<PyRef<'_, PyRowLayout>>) {
        self.plan.set_estimate(estimate.map(|estimate| estimate.layout));
    }

    /// Enqueues a dispatch, with memory that it asks for. If it waits for counts, it does so at
    /// most `limit` seconds.
    fn dispatch(
        &self,
        py: Python<'_>,
        group: &PyCudaGroup,
        send_args: SendArgs,
        memory: &Bound<'_, PyAny>,
        limit: f64,
    ) -> PyResult<PyDispatchResult> {
        let (stream, limit) = (group.stream(send_args.stream), timeout_of(limit)?);
        let planned = match self.plan.prepare(&group.group, self.request(&send_args)) {
            Ok(planned) => planned,
            Err(e) => {
                if matches!(e, Error::TooManyTokens(_)) {
                    memory.call_method0(intern!(py, "announce_too_many"))?;
                }
                return Err(exception(&e));
            }
        };
        let (num_rows, waits) = (planned.num_rows(), planned.waits());
        let to = self.recv_memory(memory, planned.workspace(), num_rows, waits)?;
        // SAFETY: `uccl.ep` passes tensors of these sizes, and torch gives their memory to later
        // work of the stream only; its layouts and handles are of this group, and their streams are
        // waited for. It keeps the workspace with the handle.
        let outcome =
            engine(py, |interrupted| unsafe { planned.launch(&to, &stream, limit, interrupted) })?;
        let rest = match outcome {
            DispatchOutcome::Done(result) => return PyDispatchResult::of(py, result),
            DispatchOutcome::Rest(rest) => rest,
        };
        let to = self.recv_memory(memory, rest.workspace(), rest.num_rows(), false)?;
        // SAFETY: as above.
        let received = py.detach(|| unsafe { rest.receive(&self.plan, &to, &stream) });
        PyDispatchResult::of(py, received.map_err(|e| exception(&e))?)
    }
}

/// The result of a dispatch.
#[pyclass(name = "EpCudaDispatchResult", module = "uccl._core", frozen, get_all)]
pub(crate) struct PyDispatchResult {
    /// The handle.
    handle: Py<PyNormalHandle>,
    /// The layout of received rows; without counts an upper bound.
    row_layout: Py<PyRowLayout>,
    /// Tokens that chose each local expert; None unless the call waited for counts.
    per_expert: Option<Vec<u32>>,
    /// The rows, if they are a view of the communication buffer.
    view: Option<Py<PyZeroCopyView>>,
    /// The likely layout of the next call's workspace, or None.
    next_workspace: Option<Py<PyWorkspaceLayout>>,
}

impl PyDispatchResult {
    fn of(py: Python<'_>, result: DispatchResult) -> PyResult<Self> {
        let DispatchResult { handle, row_layout, per_expert, view, next_workspace } = result;
        let handle = PyNormalHandle { handle: DetachedDrop::new(Arc::new(handle)) };
        let view = view.map(|view| {
            let of_view = PyZeroCopyView {
                num_rows: view.len,
                offset: view.rows - view.pool,
                stride: view.stride,
                scales_offset: view.scales.map_or(0, |scales| scales.words - view.pool),
            };
            Py::new(py, of_view)
        });
        let next_workspace =
            next_workspace.map(|layout| Py::new(py, PyWorkspaceLayout::of(&layout)));
        Ok(Self {
            handle: Py::new(py, handle)?,
            row_layout: Py::new(py, PyRowLayout { layout: row_layout })?,
            per_expert,
            view: view.transpose()?,
            next_workspace: next_workspace.transpose()?,
        })
    }
}

/// Received rows in the pool.
#[pyclass(name = "EpCudaZeroCopyView", module = "uccl._core", frozen, get_all)]
pub(crate) struct PyZeroCopyView {
    /// The number of rows.
    num_rows: usize,
    /// The offset of the first row in the pool.
    offset: u64,
    /// Bytes from a row to the next.
    stride: usize,
    /// The offset of the first scale in the pool; 0 without scales.
    scales_offset: u64,
}

/// The state of a dispatch that a combine, or a dispatch to the same rows, needs.
#[pyclass(name = "EpCudaNormalHandle", module = "uccl._core", frozen)]
pub(crate) struct PyNormalHandle {
    handle: DetachedDrop<Arc<Handle>>,
}

#[pymethods]
impl PyNormalHandle {
    /// The layout of the received rows; without counts an upper bound.
    #[getter]
    fn row_layout(&self) -> PyRowLayout {
        PyRowLayout { layout: *self.handle.row_layout() }
    }

    /// The most tokens of any rank.
    #[getter]
    fn max_tokens(&self) -> usize {
        self.handle.max_tokens()
    }
}

/// A combine that has begun.
#[pyclass(name = "EpCudaNormalCombine", module = "uccl._core", frozen)]
pub(crate) struct PyNormalCombine {
    combine: DetachedDrop<Mutex<Option<Combine>>>,
    stream: Stream,
}

#[pymethods]
impl PyNormalCombine {
    /// Enqueues the sends of rows back to the ranks of their tokens. `sends` is "row", or, for rows
    /// by expert, "sum" or "each".
    #[new]
    #[pyo3(signature = (
        group, handle, *, len, rows, hidden, weights, sends, blocks, scratch, stream
    ))]
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
            "row" => CombineRows::Row,
            "sum" => CombineRows::SumOfExperts,
            "each" => CombineRows::EachExpert,
            other => return Err(PyValueError::new_err(format!("no {other:?} is sent"))),
        };
        let max_blocks = NonZero::new(blocks);
        let input =
            CombineInput { len, rows, stride: 2 * hidden, hidden, weights, sends, max_blocks };
        // SAFETY: `uccl.ep` passes tensors of these sizes, and torch gives their memory to later
        // work of the stream only.
        let begun = py.detach(|| unsafe {
            Combine::begin(&handle.handle, &input, Launch { stream: &stream, scratch })
        });
        let combine = Mutex::new(Some(begun.map_err(|e| exception(&e))?));
        Ok(Self { combine: DetachedDrop::new(combine), stream })
    }

    /// Enqueues the sums. `sums` is "rank" or "choice". The biases are up to two first addends, or
    /// 0.
    #[pyo3(signature = (*, rows, sums, bias, second_bias, weights))]
    fn finish(
        &self,
        py: Python<'_>,
        rows: u64,
        sums: &str,
        bias: u64,
        second_bias: u64,
        weights: u64,
    ) -> PyResult<()> {
        let order = match sums {
            "rank" => Order::ByRank,
            "choice" => Order::ByChoice,
            other => return Err(PyValueError::new_err(format!("no sums by {other:?}"))),
        };
        let combined = CombineOutput { rows, order, bias: [bias, second_bias], weights };
        let finished = py.detach(|| {
            let combine = self.combine.lock().take().ok_or_else(call_over)?;
            // SAFETY: `uccl.ep` passes tensors with a row, and weights, for each token of the
            // dispatch.
            unsafe { combine.finish(&combined, &self.stream) }
        });
        finished.map_err(|e| exception(&e))
    }
}
