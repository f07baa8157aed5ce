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
    rounds::RoundCut,
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
    /// The most tokens of any rank; `None`: any number, but with a row layout its part of the rows.
    /// With [`Routing::Cached`] the handle's is used.
    pub max_tokens: Option<usize>,
    /// Whether a dispatch with [`Routing::Cached`] waits for counts, if the host has none.
    pub needs_counts: bool,
}

/// A dispatch of which nothing is enqueued, with its needs of memory.
pub struct PlannedDispatch<'a> {
    plan: &'a Plan,
    group: &'a Arc<Group>,
    request: DispatchRequest<'a>,
    cut: Cut,
    scratch: ScratchLens,
    /// The layout that the caller has given, or that of a handle.
    given: Option<RowLayout>,
    /// The layout of rows that have memory before the launch.
    row_layout: Option<RowLayout>,
    workspace: WorkspaceLayout,
}

/// How a dispatch goes.
#[derive(Clone, Copy)]
enum Cut {
    /// In one round, of so many slots for each rank; unless another rank has more tokens.
    One(usize),
    /// In rounds of so many slots. The host learns the most tokens of any rank.
    Counted(usize),
    /// In rounds that all ranks know.
    Known(RoundCut),
}

impl Cut {
    fn slots(self) -> usize {
        match self {
            Self::One(slots) | Self::Counted(slots) => slots,
            Self::Known(cut) => cut.slots,
        }
    }

    /// The rounds, once the counts are known if any are; `None`: one round.
    fn rounds(self, counts: Option<&ReceiveCounts>) -> Option<RoundCut> {
        let most = counts.map_or(0, |counts| counts.most_tokens);
        match self {
            Self::Known(cut) => Some(cut),
            Self::Counted(slots) => Some(RoundCut::new(slots, most)),
            Self::One(slots) => (most > slots).then(|| RoundCut::new(slots, most)),
        }
    }
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
    rounds: Option<RoundCut>,
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
        mut request: DispatchRequest<'a>,
    ) -> Result<PlannedDispatch<'a>> {
        if let Some(alignment) = self.shape.alignment {
            check_alignment(alignment)?;
        }
        let (given, cut, combine) = match request.routing {
            Routing::Cached(handle) => (
                handle.layout_of_next(request.needs_counts),
                handle.rounds.as_ref().map_or(Cut::One(handle.slots), |of| Cut::Known(of.cut)),
                0,
            ),
            Routing::Choices(_) | Routing::Layout(_) | Routing::Ranks(_) => {
                (request.row_layout, self.cut(group, &request)?, COMBINE_SCRATCH_LEN)
            }
        };
        if request.routing.tokens() > cut.slots() {
            request.routing = request.routing.without_layout(group.ranks());
        }
        let dispatch = request.routing.scratch_len(group.ranks());
        let scratch = ScratchLens { combine, dispatch };
        let row_layout = match cut {
            // Whether rows are a view is known only after the call has begun.
            Cut::One(_) if self.may_view() => None,
            Cut::One(_) => given.or_else(|| self.estimate()),
            // The memory of the rounds comes with that of the rows.
            Cut::Counted(_) | Cut::Known(_) => None,
        };
        let workspace = WorkspaceLayout::of(&self.shape, scratch, row_layout.as_ref());
        let plan = self;
        Ok(PlannedDispatch { plan, group, request, cut, scratch, given, row_layout, workspace })
    }

    /// Whether rows may be a view. Without choices, nothing marks the rows of a view that have no
    /// token.
    fn may_view(&self) -> bool {
        self.shape.zero_copy && self.shape.top_k > 0
    }

    /// How the tokens go: in as few rounds as all ranks know to be enough.
    fn cut(&self, group: &Group, request: &DispatchRequest<'_>) -> Result<Cut> {
        let (shape, tokens) = (self.call_shape(), request.routing.tokens());
        if let Some(most) = request.max_tokens {
            if tokens > most {
                return Err(more_than(most, tokens));
            }
            if shape.is_one_round(most, group) {
                return Ok(Cut::One(most));
            }
            let slots = shape.tokens_in_round(self.shape.alignment.is_some(), group);
            let cut = Cut::Known(RoundCut::new(slots, most));
            return if slots > 0 { Ok(cut) } else { Err(shape.no_room(group)) };
        }
        let room = *self.room.get_or_init(|| shape.max_tokens(group));
        if room == 0 && tokens > 0 {
            return Err(shape.no_room(group));
        }
        let Some(rows) = request.row_layout else {
            return Ok(if tokens <= room { Cut::One(room) } else { Cut::Counted(room) });
        };
        // All ranks have as many rows, for the worst case: any rank may send a part of them.
        let most = rows.tokens.div_ceil(self.shape.ranks.max(1));
        let cut = if most <= room { Cut::One(room) } else { Cut::Known(RoundCut::new(room, most)) };
        match tokens <= most.max(room) {
            true => Ok(cut),
            false => Err(more_than_rows(&rows, tokens)),
        }
    }

    fn call_shape(&self) -> CallShape {
        let PlanShape { ranks, hidden, row_bytes, scales, top_k, num_experts, .. } = self.shape;
        CallShape {
            payload: row_bytes,
            scales,
            hidden,
            top_k,
            local_experts: num_experts / ranks.max(1),
            zero_copy: self.may_view(),
        }
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
            if handle.rounds.is_some() {
                // The next call is likely to be as large: it sends no rows before its counts.
                self.set_estimate(None);
                return None;
            }
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

fn more_than_rows(rows: &RowLayout, tokens: usize) -> Error {
    let rows = rows.tokens;
    Error::TooManyTokens(format!(
        "this rank has {tokens} tokens, and rows for {rows} of all ranks: num_worst_tokens is as \
         many as all ranks have together, if each has as many as the rank with the most"
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
        if !matches!(self.cut, Cut::One(_)) {
            // SAFETY: the caller guarantees it.
            return unsafe { self.launch_counts(memory, stream, limit, is_interrupted) };
        }
        let Self { plan, group, request, cut, scratch, given, row_layout, workspace } = self;
        let shape = &plan.shape;
        let launch =
            Launch { stream, scratch: memory.workspace + 4 * workspace.dispatch_scratch as u64 };
        let DispatchRequest { input, routing, .. } = request;
        // SAFETY: the caller guarantees it.
        let mut dispatch = unsafe { Dispatch::begin(group, &input, routing, cut.slots(), launch) }?;
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
        let rest = RecvRows { row_layout, counts, view, scratch };
        Ok(DispatchOutcome::Rest(rest.of(plan, dispatch, cut)))
    }

    /// Enqueues the counts of a call in rounds, if the host waits for them.
    ///
    /// # Safety
    /// As for [`launch`](Self::launch).
    unsafe fn launch_counts(
        self,
        memory: &RecvMemory,
        stream: &Stream,
        limit: Duration,
        is_interrupted: &mut InterruptCheck<'_>,
    ) -> Result<DispatchOutcome> {
        let Self { plan, group, request, cut, scratch, given, workspace, .. } = self;
        let launch =
            Launch { stream, scratch: memory.workspace + 4 * workspace.dispatch_scratch as u64 };
        let DispatchRequest { input, routing, .. } = request;
        // SAFETY: the caller guarantees it.
        let mut dispatch =
            unsafe { Dispatch::lay_out(group, &input, routing, cut.slots(), launch) }?;
        let counts = match given {
            Some(_) => None,
            // SAFETY: the caller guarantees it.
            None => Some(unsafe {
                match dispatch.cached {
                    Some(_) => dispatch.recount(stream, limit, is_interrupted),
                    None => dispatch.counts(stream, limit, is_interrupted),
                }
            }?),
        };
        let counted = counts.as_ref().map(|of| RowLayout::of_counts(of, plan.shape.alignment));
        let row_layout = given.or(counted).unwrap_or_else(|| RowLayout::by_token(0));
        let rest = RecvRows { row_layout, counts, view: None, scratch };
        Ok(DispatchOutcome::Rest(rest.of(plan, dispatch, cut)))
    }
}

/// The rows of a dispatch that need memory.
struct RecvRows {
    row_layout: RowLayout,
    counts: Option<ReceiveCounts>,
    view: Option<ZeroCopyView>,
    scratch: ScratchLens,
}

impl RecvRows {
    /// The rest of their dispatch.
    fn of(self, plan: &Plan, dispatch: Dispatch, cut: Cut) -> DispatchRest {
        let Self { row_layout, counts, view, scratch } = self;
        let rounds = cut.rounds(counts.as_ref());
        let by_expert = row_layout.alignment.is_some();
        let of_rounds = rounds.map_or(0, |cut| dispatch.rounds_len(&cut, by_expert));
        let second = ScratchLens { combine: 0, dispatch: of_rounds };
        let workspace = WorkspaceLayout::of(&plan.shape, second, Some(&row_layout));
        DispatchRest { dispatch, row_layout, counts, view, rounds, workspace, scratch }
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
        let Self { dispatch, row_layout, counts, view, rounds, workspace, scratch } = self;
        let outputs = workspace.outputs(&plan.shape, &row_layout, memory);
        let of_rounds = memory.workspace + 4 * workspace.dispatch_scratch as u64;
        // SAFETY: the caller guarantees it.
        let handle = unsafe {
            match (view, rounds) {
                (Some(_), _) => dispatch.receive_zero_copy(&outputs, stream),
                (None, None) => dispatch.receive(&outputs, stream),
                (None, Some(cut)) => dispatch.receive_in_rounds(cut, (&outputs, of_rounds), stream),
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
