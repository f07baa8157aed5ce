//! The checksum of a frame: CRC-32C over its header, descriptors and payload.

use crc_fast::{CrcAlgorithm, Digest};

use crate::mem::Span;

/// A checksum being computed.
pub(super) struct Crc(Digest);

impl Crc {
    pub(super) fn new() -> Self {
        Self(Digest::new(CrcAlgorithm::Crc32Iscsi))
    }

    pub(super) fn add(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Adds memory that belongs to a caller.
    ///
    /// # Safety
    /// The span must be readable.
    pub(super) unsafe fn add_span(&mut self, span: Span) {
        if span.len > 0 {
            // SAFETY: readable, as the caller promises. Callers of the engine may write to it at the
            // same time against their own interest; then the checksum is wrong, which it should be.
            self.add(unsafe { std::slice::from_raw_parts(span.addr as *const u8, span.len) });
        }
    }

    pub(super) fn value(&self) -> u32 {
        self.0.finalize() as u32
    }
}
