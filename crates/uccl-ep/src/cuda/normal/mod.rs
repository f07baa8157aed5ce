//! Normal mode: each token goes once to each rank that has one of its experts, and one row of each
//! comes back.
//!
//! It has the protocol of low latency mode, and other kernels (`kernels/ep/layout.cuh`,
//! `kernels/ep/chunks.cuh`, `kernels/ep/normal`). Tokens that the pool has no room for at once go
//! in rounds, each of which is a call. Received rows are
//! in order of rank and token, as on the CPU: one for each token; or, where rows are by expert, one
//! for each token and expert. The host waits only when it asks for counts.
//!
//! Counts are sent at once, and rows in chunks, each with a ready flag, so that one launch sends
//! some rows while it takes out, or sums, others. It is enqueued once the whole call is known, by
//! [`Dispatch::receive`] and [`Combine::finish`]. Where late ranks are left out, or the ranks' path
//! is through the host, there are no chunks: one launch sends all rows, by [`Dispatch::begin`] and
//! [`Combine::begin`], and another takes out or sums them.

mod combine;
mod dispatch;
mod dispatch_rounds;
mod layout;
mod memory;
mod plan;
mod rounds;
mod routing;
mod row_layout;
mod shape;
mod zero_copy;

pub use self::{
    combine::{Combine, CombineInput, CombineOutput},
    dispatch::{Dispatch, Handle, ReceiveAttempt},
    layout::{DispatchLayout, LayoutOutput, LayoutWorkspace},
    memory::{
        DispatchInput, DispatchOutput, ExpertLayout, Launch, PlanShape, RecvMemory, RowTables,
        ScalesIn, ScalesOut, ScratchLens, WorkspaceLayout,
    },
    plan::{DispatchOutcome, DispatchRequest, DispatchRest, DispatchResult, Plan, PlannedDispatch},
    routing::{Routing, TokenRanks},
    row_layout::{ReceiveCounts, RowLayout},
    zero_copy::ZeroCopyView,
};
