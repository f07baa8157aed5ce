//! Rows that peers read in place, in a block of the experts' rank: a slot then has the offset of a
//! row, not the row.

use std::sync::Arc;

use uccl_fabric::shm::Mapping;

use super::{CombineContext, CombineInput, CombineRows, relay::RelayLayout};
use crate::{
    host::{blocks::Block, group::Group},
    shared::{
        error::{Error, Phase, Result},
        protocol::Call,
    },
};

/// The block with the rows, if they do not change until the combine has ended.
pub(super) fn block_with(group: &Group, input: &CombineInput) -> Option<Arc<Block>> {
    let CombineInput { rows, len, stride, is_stable, .. } = *input;
    let memory = rows.addr()..rows.addr().checked_add(len.checked_mul(stride)?)?;
    (is_stable && len > 0).then(|| group.blocks().find(&memory))?
}

/// Whether peers read rows from their block, unchanged. A relay cannot use the offset of a row.
pub(super) fn is_read(
    group: &Group,
    input: &CombineInput,
    relay_layout: Option<&RelayLayout>,
) -> bool {
    let CombineInput { sends, weights, is_packed, .. } = *input;
    let is_whole = !is_packed && weights.is_none() && sends != CombineRows::SumOfExperts;
    is_whole && relay_layout.is_none() && group.blocks().are_near()
}

/// By rank, the block that its slots refer to; `None` if its slots have rows.
pub(super) struct PeerBlocks(Vec<Option<Arc<Mapping>>>);

impl PeerBlocks {
    /// Compares the headers of the peers with this rank's, and maps the blocks that they name.
    pub(super) fn of(context: &CombineContext, call: &Call) -> Result<Self> {
        let group = context.group();
        let mut peer_blocks = vec![None; group.ranks()];
        for stream in call.arriving() {
            let (peer, word) = (stream.peer, context.peer_block(call, stream)?);
            if word != 0 && peer != group.rank() {
                peer_blocks[peer] = Some(group.blocks().of_peer(peer, word)?);
            }
        }
        Ok(Self(peer_blocks))
    }

    /// The address of a slot's row.
    ///
    /// # Errors
    /// The slot names a row outside its block.
    ///
    /// # Safety
    /// `slot` is one that rank `from` has written.
    pub(super) unsafe fn row(
        &self,
        context: &CombineContext,
        from: usize,
        slot: *const u8,
    ) -> Result<*const u8> {
        let Some(block) = &self.0[from] else { return Ok(slot) };
        // SAFETY: the caller guarantees it; slots are aligned.
        let at = unsafe { slot.cast::<u64>().read() };
        let len = 2 * context.input.hidden as u64;
        let is_inside = at.checked_add(len).is_some_and(|end| end <= block.len() as u64);
        if !is_inside || !at.is_multiple_of(2) {
            let why = format!("tells of a row at {at} of a block of {} bytes", block.len());
            let (phase, rank) = (Phase::Combine, context.group().rank());
            return Err(Error::PeerLost { phase, rank, peer: from, why });
        }
        // SAFETY: inside the mapping, as just checked.
        Ok(unsafe { block.as_ptr().add(at as usize) })
    }
}
