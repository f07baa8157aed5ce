//! The plan of dispatches of one shape: how many tokens have room, how much arrives, which launches
//! a call makes, and the memory that it needs. A caller allocates the memory, and gets tables and
//! tensors as offsets in it.
//!
//! ```text
//!   Plan::prepare ─▶ PlannedDispatch ─ launch ─▶ Done(DispatchResult)
//!                                          └───▶ Rest(DispatchRest) ─ receive ─▶ DispatchResult
//! ```

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use parking_lot::Mutex;
use uccl_device::cuda::Stream;

use super::{
    dispatch::{Dispatch, Handle},
    memory::{
        DispatchInput, Launch, PlanShape, RecvMemory, ScratchLens, WorkspaceLayout, check_alignment,
    },
    routing::Routing,
    row_layout::{ReceiveCounts, RowLayout},
    shape::CallShape,
    zero_copy::ZeroCopyView,
};
use crate::{
    cuda::{group::Group, memory::COMBINE_SCRATCH_LEN},
    host::group::InterruptCheck,
    shared::error::{Error, Result},
};

/// The plan of dispatches of one shape in one group.
#[derive(Debug)]
pub struct Plan {
    shape: PlanShape,
    /// The most tokens of any rank that the pool has room for, once a call has needed it.
    room: OnceLock<usize>,
    /// The estimated layout of the next received rows.
    estimate: Mutex<Option<RowLayout>>,
}

/// A dispatch that a caller asks for.
pub struct DispatchRequest<'a> {
    /// This rank's tokens.
    pub input: DispatchInput,
    /// Their ranks.
    pub routing: Routing<'a>,
    /// The layout of received rows; `None`: as many as arrive, for which the host waits. With
    /// [`Routing::Cached`] the handle's is used.
    pub row_layout: Option<RowLayout>,
    /// The most tokens of any rank; `None`: as many as the pool has room for. With
    /// [`Routing::Cached`] the handle's is used.
    pub max_tokens: Option<usize>,
    /// Whether a dispatch with [`Routing::Cached`] waits for counts, if the host has none.
    pub needs_counts: bool,
}

/// A dispatch of which nothing is enqueued, with its needs of memory.
pub struct PlannedDispatch<'a> {
    plan: &'a Plan,
    group: &'a Arc<Group>,
    request: DispatchRequest<'a>,
    max_tokens: usize,
    scratch: ScratchLens,
    /// The layout that the caller has given, or that of a handle.
    given: Option<RowLayout>,
    /// The layout of rows that have memory before the launch.
    row_layout: Option<RowLayout>,
    workspace: WorkspaceLayout,
}

/// The outcome of the first launches.
#[expect(clippy::large_enum_variant, reason = "a box takes an allocation in each call with a view")]
pub enum DispatchOutcome {
    /// Rows have been received, or will be when the stream's work has ended.
    Done(DispatchResult),
    /// Rows need memory first: only now their number is known, or whether they are a view.
    Rest(DispatchRest),
}

/// The rest of a dispatch: the receive of its rows.
pub struct DispatchRest {
    dispatch: Dispatch,
    row_layout: RowLayout,
    counts: Option<ReceiveCounts>,
    view: Option<ZeroCopyView>,
    workspace: WorkspaceLayout,
    scratch: ScratchLens,
}

/// The result of a dispatch.
pub struct DispatchResult {
    /// The handle, for combines and for dispatches to the same places.
    pub handle: Handle,
    /// The layout of received rows; without counts an upper bound.
    pub row_layout: RowLayout,
    /// Tokens that chose each local expert, if the host has waited for counts.
    pub per_expert: Option<Vec<u32>>,
    /// The rows, if they are a view of the pool.
    pub view: Option<ZeroCopyView>,
    /// The likely layout of the next call's workspace, which may be allocated ahead.
    pub next_workspace: Option<WorkspaceLayout>,
}

impl Plan {
    /// A plan without an estimate.
    #[must_use]
    pub fn new(shape: PlanShape) -> Self {
        Self { shape, room: OnceLock::new(), estimate: Mutex::new(None) }
    }

    /// The shape of the plan's calls.
    pub fn shape(&self) -> &PlanShape {
        &self.shape
    }

    /// The estimated layout of the next received rows.
    pub fn estimate(&self) -> Option<RowLayout> {
        *self.estimate.lock()
    }

    /// Replaces the estimate.
    pub fn set_estimate(&self, estimate: Option<RowLayout>) {
        *self.estimate.lock() = estimate;
    }

    /// Remembers the received layout as the estimate for the next call, where each rank has up to
    /// `max_tokens` tokens. There is none for scales by channel, whose offsets depend on the number
    /// of rows, and where calls need several launches.
    pub fn learn(&self, received: &RowLayout, max_tokens: usize) {
        let PlanShape { ranks, top_k, num_experts, alignment, .. } = self.shape;
        let PlanShape { can_fuse, fills_tables, is_col_major, .. } = self.shape;
        if can_fuse && fills_tables && !is_col_major {
            let tokens = ranks.saturating_mul(max_tokens);
            let local_experts = num_experts / ranks.max(1);
            let limit = RowLayout::upper_bound(tokens, alignment, top_k, local_experts);
            self.set_estimate(Some(received.with_headroom(&limit)));
        }
    }

    /// Decides on the launches and the memory of a dispatch. Enqueues nothing.
    ///
    /// # Errors
    /// Arguments are wrong; or this rank has [too many tokens](Error::TooManyTokens).
    pub fn prepare<'a>(
        &'a self,
        group: &'a Arc<Group>,
        request: DispatchRequest<'a>,
    ) -> Result<PlannedDispatch<'a>> {
        if let Some(alignment) = self.shape.alignment {
            check_alignment(alignment)?;
        }
        let (given, max_tokens, combine) = match request.routing {
            Routing::Cached(handle) => {
                (handle.layout_of_next(request.needs_counts), handle.max_tokens(), 0)
            }
            Routing::Choices(_) | Routing::Layout(_) | Routing::Ranks(_) => {
                let tokens = request.routing.tokens();
                let max_tokens = self.max_tokens(group, tokens, request.max_tokens)?;
                (request.row_layout, max_tokens, COMBINE_SCRATCH_LEN)
            }
        };
        let dispatch = request.routing.scratch_len(group.ranks());
        let scratch = ScratchLens { combine, dispatch };
        // Whether rows are a view is known only after the call has begun.
        let row_layout = if self.may_view() { None } else { given.or_else(|| self.estimate()) };
        let workspace = WorkspaceLayout::of(&self.shape, scratch, row_layout.as_ref());
        let plan = self;
        Ok(PlannedDispatch {
            plan,
            group,
            request,
            max_tokens,
            scratch,
            given,
            row_layout,
            workspace,
        })
    }

    /// Whether rows may be a view. Without choices, nothing marks the rows of a view that have no
    /// token.
    fn may_view(&self) -> bool {
        self.shape.zero_copy && self.shape.top_k > 0
    }

    /// The most tokens of any rank: the number that is asked for, or else the room.
    fn max_tokens(&self, group: &Group, tokens: usize, asked: Option<usize>) -> Result<usize> {
        if let Some(most) = asked {
            return if tokens <= most { Ok(most) } else { Err(more_than(most, tokens)) };
        }
        let PlanShape { ranks, hidden, row_bytes, scales, top_k, num_experts, .. } = self.shape;
        let shape = CallShape {
            payload: row_bytes,
            scales,
            hidden,
            top_k,
            local_experts: num_experts / ranks.max(1),
            zero_copy: self.may_view(),
        };
        let most = *self.room.get_or_init(|| shape.max_tokens(group));
        if tokens <= most { Ok(most) } else { Err(shape.too_many(tokens, most, group)) }
    }

    fn result(
        &self,
        mut handle: Handle,
        row_layout: RowLayout,
        counts: Option<ReceiveCounts>,
        scratch: ScratchLens,
    ) -> DispatchResult {
        handle.row_layout = row_layout;
        handle.is_counted = counts.is_some();
        let next_workspace = counts.as_ref().and_then(|_| {
            self.learn(&row_layout, handle.max_tokens());
            let estimate = self.estimate();
            estimate.map(|rows| WorkspaceLayout::of(&self.shape, scratch, Some(&rows)))
        });
        let per_expert = counts.map(|counts| counts.per_expert);
        DispatchResult { handle, row_layout, per_expert, view: None, next_workspace }
    }
}

fn more_than(most: usize, tokens: usize) -> Error {
    Error::TooManyTokens(format!(
        "this rank has {tokens} tokens, and room for {most} of each rank: num_max_tokens_per_rank is the most of any rank"
    ))
}

impl PlannedDispatch<'_> {
    /// The layout of the workspace, which the caller allocates.
    #[must_use]
    pub fn workspace(&self) -> &WorkspaceLayout {
        &self.workspace
    }

    /// The number of rows that the caller allocates before the launch; `None`: none yet.
    #[must_use]
    pub fn num_rows(&self) -> Option<usize> {
        self.row_layout.map(|layout| layout.num_rows())
    }

    /// Whether the host waits for counts.
    #[must_use]
    pub fn waits(&self) -> bool {
        self.given.is_none()
    }

    /// Enqueues the call, or as much of it as is possible before rows have memory. If the host has
    /// to wait for counts, it waits no longer than `limit`; with an estimate, rows are in flight
    /// meanwhile.
    ///
    /// # Errors
    /// Arguments are wrong, an earlier call has failed, a peer is late or makes another call, or
    /// the caller was interrupted.
    ///
    /// # Safety
    /// The stream is of the group's context. The request describes memory that the GPU may read
    /// until the dispatch's work has ended. `memory` is as large as [`workspace`](Self::workspace)
    /// and [`num_rows`](Self::num_rows) say, and only this call uses it until its work has ended;
    /// the workspace is kept for the handle. A layout or handle in the request is of this group,
    /// and the stream comes after its work.
    pub unsafe fn launch(
        self,
        memory: &RecvMemory,
        stream: &Stream,
        limit: Duration,
        is_interrupted: &mut InterruptCheck<'_>,
    ) -> Result<DispatchOutcome> {
        let waits = self.waits();
        let Self { plan, group, request, max_tokens, scratch, given, row_layout, workspace } = self;
        let shape = &plan.shape;
        let launch =
            Launch { stream, scratch: memory.workspace + 4 * workspace.dispatch_scratch as u64 };
        let DispatchRequest { input, routing, .. } = request;
        // SAFETY: the caller guarantees it.
        let mut dispatch = unsafe { Dispatch::begin(group, &input, routing, max_tokens, launch) }?;
        let (row_layout, counts, view) = match row_layout {
            Some(layout) if !waits => {
                let outputs = workspace.outputs(shape, &layout, memory);
                // SAFETY: the caller guarantees it.
                let handle = unsafe { dispatch.receive(&outputs, stream) }?;
                return Ok(DispatchOutcome::Done(plan.result(handle, layout, None, scratch)));
            }
            Some(estimate) => {
                let outputs = workspace.outputs(shape, &estimate, memory);
                // SAFETY: the caller guarantees it.
                let attempt =
                    unsafe { dispatch.try_receive(&outputs, stream, limit, is_interrupted) }?;
                let layout = RowLayout::of_counts(&attempt.counts, shape.alignment);
                let counts = Some(attempt.counts);
                if let Some(handle) = attempt.handle {
                    return Ok(DispatchOutcome::Done(plan.result(handle, layout, counts, scratch)));
                }
                (layout, counts, None)
            }
            None => {
                let counts = match given {
                    Some(_) => None,
                    // SAFETY: the caller guarantees it.
                    None => Some(unsafe { dispatch.counts(stream, limit, is_interrupted) }?),
                };
                let layout = match (given, &counts) {
                    (Some(given), _) => given,
                    (None, Some(counts)) => RowLayout::of_counts(counts, shape.alignment),
                    (None, None) => RowLayout::by_token(0),
                };
                let view = if plan.may_view() { dispatch.zero_copy_view() } else { None };
                (layout, counts, view)
            }
        };
        let row_layout = match &view {
            Some(view) => RowLayout { is_view: true, ..RowLayout::by_token(view.len) },
            None => row_layout,
        };
        let workspace = WorkspaceLayout::of(shape, ScratchLens::default(), Some(&row_layout));
        let rest = DispatchRest { dispatch, row_layout, counts, view, workspace, scratch };
        Ok(DispatchOutcome::Rest(rest))
    }
}

impl DispatchRest {
    /// The layout of a second workspace, which the caller allocates.
    #[must_use]
    pub fn workspace(&self) -> &WorkspaceLayout {
        &self.workspace
    }

    /// The number of rows that the caller allocates; `None` if they are a view of the pool.
    #[must_use]
    pub fn num_rows(&self) -> Option<usize> {
        self.view.is_none().then(|| self.row_layout.num_rows())
    }

    /// Enqueues the receive, which ends the call.
    ///
    /// # Errors
    /// Arguments are wrong, or an earlier call has failed.
    ///
    /// # Safety
    /// As for [`PlannedDispatch::launch`], with this memory; `plan` and stream are those of the
    /// launch.
    pub unsafe fn receive(
        self,
        plan: &Plan,
        memory: &RecvMemory,
        stream: &Stream,
    ) -> Result<DispatchResult> {
        let Self { dispatch, row_layout, counts, view, workspace, scratch } = self;
        let outputs = workspace.outputs(&plan.shape, &row_layout, memory);
        // SAFETY: the caller guarantees it.
        let handle = unsafe {
            match view {
                Some(_) => dispatch.receive_zero_copy(&outputs, stream),
                None => dispatch.receive(&outputs, stream),
            }
        }?;
        Ok(DispatchResult { view, ..plan.result(handle, row_layout, counts, scratch) })
    }
}

#[cfg(test)]
mod tests {
    use super::{super::memory::tests::SHAPE, *};

    #[test]
    fn an_estimate_has_headroom_up_to_the_limit() {
        let plan = Plan::new(SHAPE);
        let received =
            RowLayout { alignment: Some(8), rows: Some(1600), ..RowLayout::by_token(800) };
        plan.learn(&received, 1000);
        let estimate = plan.estimate().expect("the shape has an estimate");
        assert_eq!((estimate.tokens, estimate.rows), (864, Some(1704)));
        plan.learn(&received, 205);
        let estimate = plan.estimate().expect("the shape has an estimate");
        assert_eq!((estimate.tokens, estimate.rows), (820, Some(1656)), "no rank has more");
    }

    #[test]
    fn shapes_with_memory_of_counted_rows_have_no_estimate() {
        let in_two_launches = PlanShape { can_fuse: false, ..SHAPE };
        let to_earlier_rows = PlanShape { fills_tables: false, ..SHAPE };
        let scales_by_channel = PlanShape { is_col_major: true, ..SHAPE };
        for shape in [in_two_launches, to_earlier_rows, scales_by_channel] {
            let plan = Plan::new(shape);
            plan.learn(&RowLayout::by_token(800), 1000);
            assert_eq!(plan.estimate(), None, "{shape:?}");
        }
    }
}
