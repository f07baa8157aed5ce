//! Quantises a rank's rows before they are sent.

use std::{slice, sync::Arc};

use super::{DispatchInput, Payload};
use crate::{
    host::{group::Group, scratch::ScratchMemory},
    numerics::{nvfp4, quantise},
    shared::record::Record,
};

/// Payloads and scales of quantised tokens.
pub(super) struct QuantisedRows {
    group: Arc<Group>,
    record: Record,
    memory: ScratchMemory,
}

impl QuantisedRows {
    /// Quantises so many tokens; `None` if rows are sent unchanged.
    ///
    /// # Safety
    /// There are so many tokens, and they may be read.
    pub(super) unsafe fn of(
        group: &Arc<Group>,
        tokens: &DispatchInput,
        record: Record,
        count: usize,
    ) -> Option<Self> {
        let (Payload::Quantised(hidden, _) | Payload::Nvfp4(hidden, _)) = tokens.payload else {
            return None;
        };
        let mut memory = group.scratch().take(count * record.payload, count * record.scales);
        let payloads = memory.bytes.chunks_exact_mut(record.payload);
        let rows = payloads.zip(memory.words.chunks_exact_mut(record.scales));
        for (token, (payload, scales)) in rows.enumerate() {
            // SAFETY: the row of this token, of `hidden` bf16; `record_of` has seen that it is
            // aligned.
            let row = unsafe {
                slice::from_raw_parts(tokens.rows.add(token * tokens.stride).cast::<u16>(), hidden)
            };
            match tokens.payload {
                Payload::Bytes(_) => {}
                Payload::Quantised(_, how) => quantise::row(row, how, payload, scales),
                Payload::Nvfp4(_, global_scale) => nvfp4::row(row, global_scale, payload, scales),
            }
        }
        Some(Self { group: Arc::clone(group), record, memory })
    }

    pub(super) fn payload(&self, token: usize) -> &[u8] {
        let len = self.record.payload;
        &self.memory.bytes[token * len..][..len]
    }

    pub(super) fn scales(&self, token: usize) -> &[u32] {
        let count = self.record.scales;
        &self.memory.words[token * count..][..count]
    }
}

impl Drop for QuantisedRows {
    fn drop(&mut self) {
        self.group.scratch().recycle(std::mem::take(&mut self.memory));
    }
}
