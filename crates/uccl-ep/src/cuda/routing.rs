//! The launch that computes the routing of tokens.

use std::mem::offset_of;

use uccl_device::cuda::Stream;

use super::{
    group::Group,
    params::{CallParams, Layout, Own, Routes, segment_of},
};
use crate::shared::error::Result;

impl Layout {
    /// For tokens with choices.
    pub(super) fn of(group: &Group, call: CallParams, routes: Routes) -> Self {
        let group = group.params;
        let ended = group.own + offset_of!(Own, layout_ended) as u64;
        Self { group, call, routes, token_in_rank: 0, token_in_rank_out: 0, per_expert: 0, ended }
    }

    /// Enqueues the launch, with a block for each chunk of the tokens.
    ///
    /// # Safety
    /// The stream is of the group's context, and the memory at the addresses is valid until this
    /// work has ended.
    pub(super) unsafe fn launch(&self, group: &Group, stream: &Stream) -> Result<()> {
        let blocks = self.routes.tokens.div_ceil(segment_of(group.ranks()) as u32).max(1);
        // SAFETY: the kernel takes this struct; the module is never unloaded; the caller guarantees
        // the rest.
        unsafe { group.kernels().layout.launch(stream, blocks, self) }
    }
}
