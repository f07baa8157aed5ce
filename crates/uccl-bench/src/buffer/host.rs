//! The host's memory of a point, which the CPU fills and looks at.

use std::alloc::{Layout, alloc_zeroed, dealloc};

use anyhow::{Context, Result, bail};
use uccl_device::cuda::PinnedBuffer;
use uccl_p2p::{Endpoint, SharedBuf};

use crate::{
    pattern::{fill, mismatch},
    pieces::Pieces,
    place,
};

/// The byte that fills destination memory before data arrives, and stays between iovs.
pub(crate) const POISON: u8 = 0xa5;

const PAGE: usize = 4096;

/// Page-aligned memory that peers read and write behind the compiler's back, so that it is only
/// ever touched through raw pointers, and only while no transfer is under way.
pub(crate) struct HostBuffer {
    ptr: *mut u8,
    len: usize,
    owner: Owner,
}

enum Owner {
    Heap(Layout),
    Pinned(#[expect(dead_code, reason = "keeps the memory locked")] PinnedBuffer),
    Shared(#[expect(dead_code, reason = "keeps the memory mapped")] SharedBuf),
}

// SAFETY: through a shared reference the memory is only read (`check`), and nobody writes to it
// then.
unsafe impl Sync for HostBuffer {}

impl HostBuffer {
    pub(super) fn shared(endpoint: &Endpoint, len: usize) -> Result<Self> {
        let shared = endpoint.alloc(len).with_context(|| too_much(len))?;
        Ok(Self { ptr: shared.as_ptr(), len: shared.len(), owner: Owner::Shared(shared) })
    }

    pub(crate) fn pinned(gpu: u32, len: usize) -> Result<Self> {
        let context = place::context(gpu)?;
        let pinned = PinnedBuffer::new(context, len).with_context(|| too_much(len))?;
        Ok(Self { ptr: pinned.as_ptr(), len, owner: Owner::Pinned(pinned) })
    }

    pub(crate) fn heap(len: usize) -> Result<Self> {
        if len == 0 {
            bail!("a buffer must be at least one byte long");
        }
        let layout = Layout::from_size_align(len, PAGE).with_context(|| too_much(len))?;
        // SAFETY: the layout's size is not zero.
        let ptr = unsafe { alloc_zeroed(layout) };
        if ptr.is_null() {
            bail!(too_much(len));
        }
        Ok(Self { ptr, len, owner: Owner::Heap(layout) })
    }

    pub(crate) fn address(&self) -> usize {
        self.ptr as usize
    }

    pub(crate) fn as_mut_ptr(&self) -> *mut u8 {
        self.ptr
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Its bytes, of a buffer that nobody else touches any more.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: ptr and len are one initialised allocation (it began zeroed), and the caller has
        // waited for all transfers.
        unsafe { std::slice::from_raw_parts(self.ptr, self.len) }
    }

    pub(crate) fn poison(&mut self) {
        // SAFETY: ptr and len are one allocation, and the two sides agree on when transfers run,
        // which is not now.
        unsafe { self.ptr.write_bytes(POISON, self.len) }
    }

    /// Fills pieces that lie at `pieces` with the pattern of a seed.
    pub(crate) fn fill(&mut self, pieces: &Pieces, seed: u64) {
        // SAFETY: ptr and len are one initialised allocation (it began zeroed), and no transfer
        // runs now, so nobody else touches it while the slice lives.
        let bytes = unsafe { std::slice::from_raw_parts_mut(self.ptr, self.len) };
        for (index, piece) in pieces.iter().enumerate() {
            fill(&mut bytes[piece], piece_seed(seed, index));
        }
    }

    /// Checks memory that was poisoned and then written to; returns a description of the first
    /// fault.
    pub(crate) fn check(&self, pieces: &Pieces, seed: u64) -> Option<String> {
        // SAFETY: as in fill; only read here.
        let bytes = unsafe { std::slice::from_raw_parts(self.ptr, self.len) };
        let mut end = 0;
        for (index, piece) in pieces.iter().enumerate() {
            let gap = &bytes[end..piece.start];
            if let Some(at) = gap.iter().position(|byte| *byte != POISON) {
                return Some(format!("a byte {} before iov {index} was written", gap.len() - at));
            }
            if let Some(at) = mismatch(&bytes[piece.clone()], piece_seed(seed, index)) {
                return Some(format!("iov {index} is wrong from its byte {at} on"));
            }
            end = piece.end;
        }
        let rest = &bytes[end..];
        let at = rest.iter().position(|byte| *byte != POISON)?;
        Some(format!("a byte {at} after the last iov was written"))
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        if let Owner::Heap(layout) = self.owner {
            // SAFETY: allocated in `heap` with this layout, and given back once.
            unsafe { dealloc(self.ptr, layout) }
        }
    }
}

pub(crate) fn too_much(len: usize) -> String {
    format!("cannot get {len} bytes of memory: take a smaller --size, --iovs or --inflight")
}

fn piece_seed(seed: u64, index: usize) -> u64 {
    seed.wrapping_add((index as u64).wrapping_mul(0xd6e8_feb8_6659_fd93))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn poisoned() -> (HostBuffer, Pieces) {
        let pieces = Pieces::new(3, 100).expect("small");
        let mut buffer = HostBuffer::heap(pieces.buffer_len()).expect("memory");
        buffer.poison();
        (buffer, pieces)
    }

    fn flip(buffer: &mut HostBuffer, at: usize) {
        // SAFETY: inside the buffer, and this test alone holds it.
        unsafe { *buffer.ptr.add(at) ^= 1 }
    }

    #[test]
    fn a_fill_is_found_and_another_pattern_is_not() {
        let (mut buffer, pieces) = poisoned();
        assert!(buffer.check(&pieces, 7).is_some_and(|wrong| wrong.contains("iov 0 is wrong")));
        buffer.fill(&pieces, 7);
        assert_eq!(buffer.check(&pieces, 7), None);
        assert!(buffer.check(&pieces, 8).is_some());
    }

    #[test]
    fn any_flipped_byte_is_found() {
        let (mut buffer, pieces) = poisoned();
        buffer.fill(&pieces, 7);
        for at in 0..buffer.len() {
            flip(&mut buffer, at);
            assert!(buffer.check(&pieces, 7).is_some(), "byte {at}");
            flip(&mut buffer, at);
        }
    }

    #[test]
    fn swapped_iovs_and_shifted_bytes_are_found() {
        let mut bytes = [0; 64];
        fill(&mut bytes, piece_seed(7, 0));
        assert_eq!(mismatch(&bytes, piece_seed(7, 0)), None);
        assert!(mismatch(&bytes, piece_seed(7, 1)).is_some());
        assert!(mismatch(&bytes[8..], piece_seed(7, 0)).is_some());
    }
}
