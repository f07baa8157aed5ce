//! Checksums over memory that callers may be writing to.

use uccl_fabric::mem::Span;
use uccl_wire::checked::Crc;

/// Adds memory that belongs to a caller.
///
/// # Safety
/// The span must be readable.
pub(super) unsafe fn add_span(crc: &mut Crc, span: Span) {
    if span.len > 0 {
        // SAFETY: readable, as the caller promises. Callers of the engine may write to it at the
        // same time against their own interest; then the checksum is wrong, which it should be.
        crc.add(unsafe { std::slice::from_raw_parts(span.addr as *const u8, span.len) });
    }
}
