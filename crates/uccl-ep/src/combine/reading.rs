//! Rows that peers read where experts left them, in a block: a slot has the place of such a row and not the row.

use std::sync::Arc;

use uccl_fabric::shm::Mapping;

use super::{Part, Results, Sends, relay::Levels};
use crate::{
    blocks::Block,
    error::{Error, Phase, Result},
    group::Group,
    protocol::Call,
};

/// The block that peers read rows from: rows are in one, stay, and go back as they are. A relay has no use for the place of a row.
pub(super) fn block_of(
    group: &Group,
    results: &Results,
    levels: Option<&Levels>,
) -> Option<Arc<Block>> {
    let Results { rows, len, stride, sends, weights, is_packed, stays, .. } = *results;
    let is_whole = stays && !is_packed && weights.is_none() && sends != Sends::SumOfExperts;
    let memory = rows.addr()..rows.addr().checked_add(len.checked_mul(stride)?)?;
    let is_read = is_whole && len > 0 && levels.is_none() && group.blocks().are_near();
    is_read.then(|| group.blocks().find(&memory))?
}

/// By rank, the block that its slots tell of; none of those whose slots have rows.
pub(super) struct Sources(Vec<Option<Arc<Mapping>>>);

impl Sources {
    /// Compares what peers say of the call with what this rank does, and maps the blocks that they tell of.
    pub(super) fn of(part: &Part, call: &Call) -> Result<Self> {
        let group = part.group();
        let mut sources = vec![None; group.ranks()];
        for stream in call.arriving() {
            let (peer, word) = (stream.peer, part.told(call, stream)?);
            if word != 0 && peer != group.rank() {
                sources[peer] = Some(group.blocks().of_peer(peer, word)?);
            }
        }
        Ok(Self(sources))
    }

    /// Where the row of a slot is.
    ///
    /// # Errors
    /// The slot tells of a place outside its block.
    ///
    /// # Safety
    /// `slot` is one that rank `from` has written.
    pub(super) unsafe fn row(
        &self,
        part: &Part,
        from: usize,
        slot: *const u8,
    ) -> Result<*const u8> {
        let Some(block) = &self.0[from] else { return Ok(slot) };
        // SAFETY: as the caller has it; slots are aligned.
        let at = unsafe { slot.cast::<u64>().read() };
        let len = 2 * part.results.hidden as u64;
        let is_inside = at.checked_add(len).is_some_and(|end| end <= block.len() as u64);
        if !is_inside || !at.is_multiple_of(2) {
            let why = format!("tells of a row at {at} of a block of {} bytes", block.len());
            let (phase, rank) = (Phase::Combine, part.group().rank());
            return Err(Error::PeerLost { phase, rank, peer: from, why });
        }
        // SAFETY: inside the mapping, as just checked.
        Ok(unsafe { block.as_ptr().add(at as usize) })
    }
}
