//! Which tokens go where, for callers that ask before they dispatch.

use std::sync::Arc;

use uccl_device::cuda::Stream;

use crate::{
    cuda::{
        group::Group,
        memory::Choices,
        params::{self, Routes},
    },
    error::{Phase, Result},
    header::Header,
};

/// Memory for what choices lead to.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// i32 by rank: how many tokens go there.
    pub per_rank: u64,
    /// i32 by expert: how many tokens chose it.
    pub per_expert: u64,
    /// A byte by token and rank: 1 if it goes there, else 0.
    pub goes: u64,
}

/// Tokens that were laid out: any number of dispatches may take them as they are.
pub struct LaidOut {
    pub(super) routes: Routes,
}

impl Layout {
    /// Enqueues the counting. It is no call: no other rank takes part.
    ///
    /// # Errors
    /// Arguments are wrong, or an earlier call has failed. A choice that is no expert fails the group later, as it does in a dispatch.
    ///
    /// # Safety
    /// The stream is of the group's context. `choices` and the layout describe memory that only this uses until its work
    /// has ended, and so does `scratch`, which has [`scratch_len`](crate::cuda::scratch_len) bytes, aligned to 8. Dispatches with what is
    /// returned read it: nobody else writes to it before the last call with their handles has ended.
    pub unsafe fn count(
        &self,
        group: &Arc<Group>,
        choices: &Choices,
        (scratch, stream): (u64, &Stream),
    ) -> Result<LaidOut> {
        group.check()?;
        choices.check(group.ranks())?;
        let header = Header::<0, 0> { phase: Phase::Dispatch, agreed: [], told: [] };
        let routes = choices.routes(group.ranks(), scratch);
        let call = group.call(0, &header, scratch)?;
        let layout = params::Layout {
            goes_told: self.goes,
            // Not the group's: a call may be laid out at the same time, on another stream.
            ended: scratch,
            ..params::Layout::of(
                group,
                call,
                Routes { counts: self.per_rank, experts: self.per_expert, ..routes },
            )
        };
        // SAFETY: the caller's promise.
        unsafe {
            stream.fill(scratch, 0, size_of::<u32>())?;
            layout.launch(group, stream)?;
        }
        Ok(LaidOut { routes })
    }
}
