//! The routing of tokens, for callers that ask for it before they dispatch.

use std::sync::Arc;

use super::Launch;
use crate::{
    cuda::{
        group::Group,
        memory::{Choices, Offsets, scratch_len},
        params::{self, Routes},
    },
    shared::{
        error::{Phase, Result},
        header::Header,
    },
};

/// Memory for the layout of choices.
#[derive(Clone, Copy, Debug)]
pub struct LayoutOutput {
    /// i32 by rank: tokens that go there.
    pub per_rank: u64,
    /// i32 by expert: tokens that chose it.
    pub per_expert: u64,
    /// A byte by token and rank: 1 if the token goes there, else 0.
    pub token_in_rank: u64,
}

/// The offsets of a layout's counts and scratch in one allocation, and its length, in words of four
/// bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LayoutWorkspace {
    /// `[E]` i32: tokens that chose each expert.
    pub per_expert: usize,
    /// `[R]` i32: tokens for each rank.
    pub per_rank: usize,
    /// Scratch.
    pub scratch: usize,
    /// Words of the memory.
    pub len: usize,
}

impl LayoutWorkspace {
    /// The workspace for a layout of these choices.
    #[must_use]
    pub fn of(choices: &Choices, ranks: usize) -> Self {
        let mut offsets = Offsets::default();
        let per_expert = offsets.next(choices.num_experts);
        let per_rank = offsets.next(ranks);
        let scratch = offsets.next_bytes(scratch_len(choices, ranks));
        Self { per_expert, per_rank, scratch, len: offsets.len }
    }
}

/// A computed layout, for any number of dispatches of these tokens.
pub struct DispatchLayout {
    pub(super) routes: Routes,
}

impl LayoutOutput {
    /// Enqueues the count. It is not a call: no other rank takes part.
    ///
    /// # Errors
    /// Arguments are wrong, or an earlier call has failed. An invalid choice fails the group later,
    /// as in a dispatch.
    ///
    /// # Safety
    /// The stream is of the group's context. `choices` and the layout describe memory that only
    /// this uses until its work has ended, and so does `scratch`, which has
    /// [`scratch_len`](crate::cuda::scratch_len) bytes, aligned to 8. Dispatches with the returned
    /// layout read it: no other code writes to it before the last call with their handles has
    /// ended.
    pub unsafe fn count(
        &self,
        group: &Arc<Group>,
        choices: &Choices,
        Launch { stream, scratch }: Launch<'_>,
    ) -> Result<DispatchLayout> {
        group.check()?;
        choices.check(group.ranks())?;
        let header = Header::<0, 0> { phase: Phase::Dispatch, agreed: [], values: [] };
        let routes = choices.routes(group.ranks(), scratch);
        let call = group.call(0, &header, scratch)?;
        let layout = params::Layout {
            token_in_rank_out: self.token_in_rank,
            // Not the group's word: a call may compute a layout at the same time, on another
            // stream.
            ended: scratch,
            ..params::Layout::of(
                group,
                call,
                Routes { counts: self.per_rank, experts: self.per_expert, ..routes },
            )
        };
        // SAFETY: the caller guarantees it.
        unsafe {
            stream.fill(scratch, 0, size_of::<u32>())?;
            layout.launch(group, stream)?;
        }
        Ok(DispatchLayout { routes })
    }
}
