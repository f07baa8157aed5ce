//! Calls of normal mode. A call waits on the host only if it returns received counts.

use std::{num::NonZero, sync::Arc};

use parking_lot::Mutex;
use pyo3::{exceptions::PyValueError, prelude::*};
use uccl_device::cuda::Stream;
use uccl_ep::{
    combine::{CombineRows, Order},
    cuda::{
        Choices, Group,
        normal::{
            CallShape, Combine, CombineInput, CombineOutput, Dispatch, DispatchInput,
            DispatchLayout, DispatchOutput, ExpertLayout, Handle, Launch, LayoutOutput, Plan,
            PlanShape, ReceiveCounts, Routing, RowLayout, RowTables, ScalesIn, ScalesOut,
            TokenRanks, WorkspaceLayout,
        },
    },
};

use super::PyCudaGroup;
use crate::ep::{call_over, calls::engine, detached_drop::DetachedDrop, exception, timeout_of};

/// The most tokens of each rank that a call has room for, if the caller sets no limit: rows of
/// `payload` bytes with `scales` words of scales, and rows of `hidden` bf16 that are sent back.
/// Raises if this rank has more.
#[pyfunction(name = "ep_cuda_max_tokens")]
#[pyo3(signature = (group, tokens, *, payload, scales, hidden, top_k, local_experts, zero_copy))]
#[expect(clippy::too_many_arguments, reason = "Python names them")]
pub(crate) fn cuda_max_tokens(
    group: &PyCudaGroup,
    tokens: usize,
    payload: usize,
    scales: usize,
    hidden: usize,
    top_k: usize,
    local_experts: usize,
    zero_copy: bool,
) -> PyResult<usize> {
    let shape = CallShape { payload, scales, hidden, top_k, local_experts, zero_copy };
    shape.max_tokens(tokens, &group.group).map_err(|e| exception(&e))
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

/// `(address, words of a token, token stride, word stride)`.
type ScalesTuple = (u64, usize, usize, usize);

/// The layout of received rows, and tokens that chose each local expert.
type ReceivedCounts = (PyRowLayout, Vec<u32>);

/// Properties that dispatches of one shape share: attributes of a Python object.
#[derive(FromPyObject)]
struct DispatchShape {
    row_bytes: usize,
    /// Words of a row's scales.
    scales: usize,
    top_k: usize,
    num_experts: usize,
    /// Words of a choice; 0 if choices are not returned.
    choice_words: usize,
    has_weights: bool,
    zero_foreign_weights: bool,
    zero_gaps: bool,
    /// Whether tables of rows are written: not for a dispatch to earlier rows.
    fills_tables: bool,
    /// The alignment of an expert's rows, for rows by expert.
    alignment: Option<usize>,
    /// Whether the scales of one channel are contiguous.
    is_col_major: bool,
    /// Whether memory for received rows may be allocated from an estimate.
    has_estimate: bool,
}

/// The shape of dispatches, and their plan.
#[pyclass(name = "EpCudaDispatchShape", module = "uccl._core", frozen)]
pub(crate) struct PyDispatchShape {
    shape: DispatchShape,
    plan: Plan,
}

/// The input of a dispatch: attributes of a Python object. Tokens are sent to the ranks of
/// `experts`; or to those of `layout`; or to `ranks`, a byte by token and rank, and i32 by expert,
/// the number of its tokens; or to the rows of an earlier dispatch, with the handle `cached`.
#[derive(FromPyObject)]
pub(crate) struct SendArgs {
    rows: u64,
    scales: Option<ScalesTuple>,
    weights: u64,
    experts: u64,
    is_64: bool,
    ranks: Option<(u64, u64)>,
    tokens: usize,
    layout: Option<Py<PyDispatchLayout>>,
    cached: Option<Py<PyNormalHandle>>,
    max_tokens: usize,
    /// The most blocks of a launch; 0: as many as the group has.
    max_blocks: usize,
    scratch: u64,
    stream: u64,
}

/// Memory for received rows: attributes of a Python object.
#[derive(FromPyObject)]
pub(crate) struct RecvArgs {
    len: usize,
    rows: u64,
    /// An address, and strides in words by row and by word; `None`: the workspace has the scales.
    scales: Option<(u64, usize, usize)>,
    zero_copy: bool,
    tokens: usize,
    workspace: u64,
    layout: Py<PyWorkspaceLayout>,
}

/// The offsets of a workspace's sub-buffers, and its length, in words of four bytes.
#[pyclass(name = "EpCudaWorkspaceLayout", module = "uccl._core", frozen)]
pub(crate) struct PyWorkspaceLayout {
    layout: WorkspaceLayout,
}

#[pymethods]
impl PyWorkspaceLayout {
    /// Scratch of the handle's first combine.
    #[getter]
    fn combine_scratch(&self) -> usize {
        self.layout.combine_scratch
    }

    /// Scratch of the dispatch.
    #[getter]
    fn dispatch_scratch(&self) -> usize {
        self.layout.dispatch_scratch
    }

    /// `[R + 1]`: the first token of each rank.
    #[getter]
    fn starts(&self) -> usize {
        self.layout.starts
    }

    /// `[E/R]`: tokens of each local expert.
    #[getter]
    fn per_expert(&self) -> usize {
        self.layout.per_expert
    }

    /// `[m]`: token numbers at their ranks.
    #[getter]
    fn src_info(&self) -> usize {
        self.layout.src_info
    }

    /// `[m]`: ranks of tokens, and this rank's index among the token's ranks.
    #[getter]
    fn origin(&self) -> usize {
        self.layout.origin
    }

    /// `[E/R]`: the end of each expert's rows, for rows by expert.
    #[getter]
    fn ends(&self) -> usize {
        self.layout.ends
    }

    /// `[m, K + 2]`: sources and rows of tokens, for rows by expert.
    #[getter]
    fn metadata(&self) -> usize {
        self.layout.metadata
    }

    /// Received choices.
    #[getter]
    fn choices(&self) -> usize {
        self.layout.choices
    }

    /// Received weights.
    #[getter]
    fn weights(&self) -> usize {
        self.layout.weights
    }

    /// Received scales.
    #[getter]
    fn scales(&self) -> usize {
        self.layout.scales
    }

    /// Words of the workspace.
    #[getter]
    fn len(&self) -> usize {
        self.layout.len
    }

    /// Whether sub-buffers have the same offsets and lengths.
    fn is_same(&self, other: &Self) -> bool {
        self.layout == other.layout
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
    #[pyo3(signature = (tokens, alignment=None, rows=None, *, is_view=false))]
    fn new(tokens: usize, alignment: Option<usize>, rows: Option<usize>, is_view: bool) -> Self {
        let layout = RowLayout { tokens, alignment, rows, min_combine_rows: 0, is_view };
        Self { layout }
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

    /// The least rows of a combine's input, as far as the host has counts.
    #[getter]
    fn min_combine_rows(&self) -> usize {
        self.layout.min_combine_rows
    }

    /// Whether the rows are a view of the communication buffer.
    #[getter]
    fn is_view(&self) -> bool {
        self.layout.is_view
    }

    /// Rows of the output tensor.
    fn num_rows(&self) -> usize {
        self.layout.num_rows()
    }
}

impl PyDispatchShape {
    /// Begins a dispatch.
    fn begin(
        &self,
        group: &Arc<Group>,
        send_args: &SendArgs,
        stream: &Stream,
    ) -> uccl_ep::Result<Dispatch> {
        let DispatchShape { row_bytes, top_k, num_experts, .. } = self.shape;
        let &SendArgs { rows, weights, experts, is_64, ranks, tokens, max_tokens, scratch, .. } =
            send_args;
        let scales = send_args.scales.map(|(words, count, token_stride, word_stride)| ScalesIn {
            words,
            count,
            token_stride,
            word_stride,
        });
        let max_blocks = NonZero::new(send_args.max_blocks);
        let sent = DispatchInput {
            rows,
            stride: row_bytes,
            payload: row_bytes,
            scales,
            weights,
            max_blocks,
        };
        let routing = match (&send_args.cached, &send_args.layout, ranks) {
            (Some(cached), ..) => Routing::Cached(&cached.get().handle),
            (None, Some(before), _) => Routing::Layout(&before.get().layout),
            (None, None, Some((token_in_rank, per_expert))) => {
                Routing::Ranks(TokenRanks { token_in_rank, per_expert, tokens, num_experts })
            }
            (None, None, None) => {
                Routing::Choices(Choices { experts, is_64, tokens, top_k, num_experts })
            }
        };
        // SAFETY: `uccl.ep` passes tensors of these sizes, and torch gives their memory to later
        // work of the stream only; its layouts and handles are of this group, and their streams are
        // waited for.
        unsafe { Dispatch::begin(group, &sent, routing, max_tokens, Launch { stream, scratch }) }
    }

    fn received(&self, counts: ReceiveCounts) -> ReceivedCounts {
        let layout = RowLayout::of_counts(&counts, self.shape.alignment);
        (PyRowLayout { layout }, counts.per_expert)
    }

    fn outputs(&self, recv_args: &RecvArgs) -> DispatchOutput {
        let RecvArgs { len, rows, scales, tokens, workspace, layout, .. } = recv_args;
        let (at, shape) = (&layout.get().layout, &self.shape);
        let address = |words: usize| workspace + 4 * words as u64;
        let address_if = |is_there: bool, words: usize| if is_there { address(words) } else { 0 };
        let scales = scales.map(|(words, row_stride, word_stride)| ScalesOut {
            words,
            row_stride,
            word_stride,
        });
        let in_workspace = (shape.scales > 0 && !recv_args.zero_copy).then(|| ScalesOut {
            words: address(at.scales),
            row_stride: shape.scales,
            word_stride: 1,
        });
        let by_expert =
            shape.alignment.filter(|_| shape.fills_tables).map(|alignment| ExpertLayout {
                alignment,
                tokens: *tokens,
                ends: address(at.ends),
                metadata: address(at.metadata),
            });
        DispatchOutput {
            len: *len,
            rows: *rows,
            stride: shape.row_bytes,
            scales: scales.or(in_workspace),
            choices: address_if(shape.choice_words > 0, at.choices),
            is_64: shape.choice_words == 2,
            weights: address_if(shape.has_weights, at.weights),
            zero_foreign_weights: shape.zero_foreign_weights,
            zero_gaps: shape.zero_gaps,
            tables: shape.fills_tables.then(|| RowTables {
                src_info: address(at.src_info),
                origin: address(at.origin),
                starts: address(at.starts),
                per_expert: address(at.per_expert),
            }),
            by_expert,
        }
    }

    /// Ends a dispatch.
    fn end(
        &self,
        dispatch: Dispatch,
        recv_args: &RecvArgs,
        stream: &Stream,
    ) -> uccl_ep::Result<Handle> {
        let (outputs, zero_copy) = (self.outputs(recv_args), recv_args.zero_copy);
        // SAFETY: `uccl.ep` passes tensors with as many rows, which no other code uses yet; it
        // keeps the tables with the handle.
        unsafe {
            match zero_copy {
                true => dispatch.receive_zero_copy(&outputs, stream),
                false => dispatch.receive(&outputs, stream),
            }
        }
    }
}

/// The result of a whole dispatch: a handle, or a dispatch that has to be received; and counts, if
/// the call waited for them.
type DispatchResult = (Option<PyNormalHandle>, Option<PyNormalDispatch>, Option<ReceivedCounts>);

#[pymethods]
impl PyDispatchShape {
    #[new]
    fn new(shape: DispatchShape, ranks: usize) -> Self {
        let DispatchShape { scales, top_k, num_experts, alignment, choice_words, .. } = shape;
        let DispatchShape { has_weights, fills_tables, is_col_major, has_estimate, .. } = shape;
        let plan = Plan::new(PlanShape {
            ranks,
            scales,
            top_k,
            num_experts,
            alignment,
            choice_words,
            has_weights,
            fills_tables,
            is_col_major,
            has_estimate,
        });
        Self { shape, plan }
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

    /// Remembers the received layout as the estimate for the next call, where each rank has up to
    /// `max_tokens` tokens.
    fn learn(&self, received: &PyRowLayout, max_tokens: usize) {
        self.plan.learn(&received.layout, max_tokens);
    }

    /// The layout of a workspace with so many words of scratch, for a combine and for the dispatch,
    /// and, for received `rows`, with tables and small tensors.
    #[pyo3(signature = (combine_scratch, dispatch_scratch, rows))]
    fn workspace(
        &self,
        combine_scratch: usize,
        dispatch_scratch: usize,
        rows: Option<PyRef<'_, PyRowLayout>>,
    ) -> PyWorkspaceLayout {
        let rows = rows.as_ref().map(|rows| &rows.layout);
        PyWorkspaceLayout { layout: self.plan.workspace(combine_scratch, dispatch_scratch, rows) }
    }

    /// Enqueues the sends of tokens.
    #[pyo3(name = "begin")]
    fn py_begin(
        &self,
        py: Python<'_>,
        group: &PyCudaGroup,
        send_args: SendArgs,
    ) -> PyResult<PyNormalDispatch> {
        let stream = group.stream(send_args.stream);
        let begun = py.detach(|| self.begin(&group.group, &send_args, &stream));
        Ok(PyNormalDispatch::of(begun.map_err(|e| exception(&e))?, stream))
    }

    /// The layout of received rows, and tokens that chose each local expert, once every rank has
    /// sent its counts. Waits at most `limit` seconds.
    fn counts(
        &self,
        py: Python<'_>,
        dispatch: &PyNormalDispatch,
        limit: f64,
    ) -> PyResult<ReceivedCounts> {
        let limit = timeout_of(limit)?;
        let counts = engine(py, |interrupted| {
            let mut begun = dispatch.dispatch.lock();
            let begun = begun.as_mut().ok_or_else(call_over)?;
            // SAFETY: the stream is the one that the dispatch was begun on.
            unsafe { begun.counts(&dispatch.stream, limit, interrupted) }
        })?;
        Ok(self.received(counts))
    }

    /// Enqueues the receipt, behind the sends.
    fn receive(
        &self,
        py: Python<'_>,
        dispatch: &PyNormalDispatch,
        recv_args: RecvArgs,
    ) -> PyResult<PyNormalHandle> {
        let received = py.detach(|| {
            let begun = dispatch.dispatch.lock().take().ok_or_else(call_over)?;
            self.end(begun, &recv_args, &dispatch.stream)
        });
        Ok(PyNormalHandle::new(received.map_err(|e| exception(&e))?))
    }

    /// Enqueues a whole dispatch. With a `limit` in seconds the room for received rows is a guess:
    /// the call waits for counts while rows are in flight. If the rows do not fit, a later
    /// `receive` takes them.
    fn dispatch(
        &self,
        py: Python<'_>,
        group: &PyCudaGroup,
        send_args: SendArgs,
        recv_args: RecvArgs,
        limit: Option<f64>,
    ) -> PyResult<DispatchResult> {
        let (stream, limit) = (group.stream(send_args.stream), limit.map(timeout_of).transpose()?);
        let (handle, left, counts) = engine(py, |interrupted| {
            let mut dispatch = self.begin(&group.group, &send_args, &stream)?;
            let Some(limit) = limit else {
                return Ok((Some(self.end(dispatch, &recv_args, &stream)?), None, None));
            };
            let outputs = self.outputs(&recv_args);
            // SAFETY: as for `end`; the stream is the one that the dispatch was begun on.
            let attempt = unsafe { dispatch.try_receive(&outputs, &stream, limit, interrupted) }?;
            let left = attempt.handle.is_none().then_some(dispatch);
            Ok((attempt.handle, left, Some(self.received(attempt.counts))))
        })?;
        let left = left.map(|dispatch| PyNormalDispatch::of(dispatch, stream));
        Ok((handle.map(PyNormalHandle::new), left, counts))
    }
}

/// A dispatch that has begun.
#[pyclass(name = "EpCudaNormalDispatch", module = "uccl._core", frozen)]
pub(crate) struct PyNormalDispatch {
    dispatch: DetachedDrop<Mutex<Option<Dispatch>>>,
    stream: Stream,
}

#[pymethods]
impl PyNormalDispatch {
    /// The rows as a view of the pool, or None if they have to be copied out.
    fn zero_copy_view(&self) -> PyResult<Option<PyZeroCopyView>> {
        let dispatch = self.dispatch.lock();
        let view = dispatch.as_ref().ok_or_else(|| exception(&call_over()))?.zero_copy_view();
        Ok(view.map(|view| PyZeroCopyView {
            num_rows: view.len,
            offset: view.rows - view.pool,
            stride: view.stride,
            scales_offset: view.scales.map_or(0, |scales| scales.words - view.pool),
        }))
    }
}

impl PyNormalDispatch {
    fn of(dispatch: Dispatch, stream: Stream) -> Self {
        Self { dispatch: DetachedDrop::new(Mutex::new(Some(dispatch))), stream }
    }
}

/// Received rows in the pool.
#[pyclass(name = "EpCudaZeroCopyView", module = "uccl._core", frozen)]
pub(crate) struct PyZeroCopyView {
    num_rows: usize,
    offset: u64,
    stride: usize,
    scales_offset: u64,
}

#[pymethods]
impl PyZeroCopyView {
    /// The number of rows.
    #[getter]
    fn num_rows(&self) -> usize {
        self.num_rows
    }

    /// The offset of the first row in the pool.
    #[getter]
    fn offset(&self) -> u64 {
        self.offset
    }

    /// Bytes from a row to the next.
    #[getter]
    fn stride(&self) -> usize {
        self.stride
    }

    /// The offset of the first scale in the pool; 0 without scales.
    #[getter]
    fn scales_offset(&self) -> u64 {
        self.scales_offset
    }
}

/// The state of a dispatch that a combine, or a dispatch to the same rows, needs.
#[pyclass(name = "EpCudaNormalHandle", module = "uccl._core", frozen)]
pub(crate) struct PyNormalHandle {
    handle: DetachedDrop<Arc<Handle>>,
}

impl PyNormalHandle {
    fn new(handle: Handle) -> Self {
        Self { handle: DetachedDrop::new(Arc::new(handle)) }
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
        let combined = CombineOutput { rows, order, bias: [bias.0, bias.1], weights };
        let finished = py.detach(|| {
            let combine = self.combine.lock().take().ok_or_else(call_over)?;
            // SAFETY: `uccl.ep` passes tensors with a row, and weights, for each token of the
            // dispatch.
            unsafe { combine.finish(&combined, &self.stream) }
        });
        finished.map_err(|e| exception(&e))
    }
}
