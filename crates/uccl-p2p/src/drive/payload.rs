//! Memory for long notifications: not zeroed before use, and in large pages where it comes from the
//! kernel.

use bytes::Bytes;
use rustix::mm::{Advice, madvise};
use uccl_fabric::mem::Span;

use crate::types::NotifPayload;

/// From this size on, the allocator gets memory from the kernel each time, with a page fault for
/// each page of it.
const NEW: usize = 32 << 20;
const LARGE_PAGE: usize = 2 << 20;

/// Bytes of one notification, or room for them.
pub(crate) struct Payload {
    bytes: Vec<u8>,
    len: usize,
}

impl Payload {
    /// Room for `len` bytes.
    pub(crate) fn with_room_for(len: usize) -> Self {
        let mut bytes = Vec::with_capacity(len);
        if len >= NEW {
            ask_for_large_pages(&mut bytes);
        }
        Self { bytes, len }
    }

    /// Its address and length. It does not move.
    pub(crate) fn span(&mut self) -> Span {
        Span { addr: self.bytes.as_mut_ptr() as usize, len: self.len }
    }

    /// The bytes that have been put there.
    ///
    /// # Safety
    /// All of [`Self::span`] must have been written.
    pub(crate) unsafe fn filled(mut self) -> Vec<u8> {
        // SAFETY: there is room for them, and the caller promises that they have been written.
        unsafe { self.bytes.set_len(self.len) };
        self.bytes
    }
}

/// Keeps a payload for as long as the peer needs it: a borrowed one is copied.
pub(crate) fn kept(payload: NotifPayload<'_>) -> Bytes {
    match payload {
        NotifPayload::Shared(bytes) => bytes,
        NotifPayload::Borrowed(bytes) => {
            let mut copy = Payload::with_room_for(bytes.len()).bytes;
            copy.extend_from_slice(bytes);
            copy.into()
        }
    }
}

/// Asks the kernel for large pages where it has them: faults on small ones take as long as the copy
/// itself.
fn ask_for_large_pages(bytes: &mut Vec<u8>) {
    let spare = bytes.spare_capacity_mut().as_mut_ptr_range();
    let start = (spare.start as usize).next_multiple_of(LARGE_PAGE);
    let end = spare.end as usize / LARGE_PAGE * LARGE_PAGE;
    if start < end {
        // SAFETY: our own memory; the call leaves its contents as they are. A refusal by the kernel
        // costs time only.
        let _ = unsafe { madvise(start as *mut _, end - start, Advice::LinuxHugepage) };
    }
}
