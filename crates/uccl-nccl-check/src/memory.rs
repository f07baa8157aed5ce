//! Memory between guard pages, which can be given back so that a late byte is noticed.

use std::ptr::NonNull;

use anyhow::{Context as _, Result};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

const PAGE: usize = 4096;

/// Memory that ends at a page nobody may touch.
pub(crate) struct GuardedMemory {
    base: NonNull<u8>,
    /// All pages, guards too.
    mapped_bytes: usize,
    at: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it is plain memory that the value owns.
unsafe impl Send for GuardedMemory {}

impl GuardedMemory {
    /// `bytes` of zeros, the last of which lies right before the guard page.
    pub(crate) fn new(bytes: usize) -> Result<Self> {
        let inner = bytes.max(1).next_multiple_of(PAGE);
        let mapped_bytes = inner + 2 * PAGE;
        let none = ProtFlags::empty();
        // SAFETY: a mapping of its own, at an address that the kernel chooses.
        let base =
            unsafe { mmap_anonymous(std::ptr::null_mut(), mapped_bytes, none, MapFlags::PRIVATE) };
        let base = NonNull::new(base.context("memory for a check")?.cast::<u8>());
        let base = base.context("memory at address 0")?;
        // SAFETY: both are within the mapping.
        let (first, at) = unsafe { (base.add(PAGE), base.add(PAGE + inner - bytes)) };
        let open = MprotectFlags::READ | MprotectFlags::WRITE;
        // SAFETY: the pages between the guards, which nobody uses yet.
        unsafe { mprotect(first.as_ptr().cast(), inner, open) }.context("memory for a check")?;
        Ok(Self { base, mapped_bytes, at, bytes })
    }

    pub(crate) fn at(&self) -> *mut u8 {
        self.at.as_ptr()
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes
    }

    /// The bytes, which no request of a plugin may be about.
    pub(crate) fn slice(&mut self) -> &mut [u8] {
        // SAFETY: the value owns the pages; the caller has seen the end of every request.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.bytes) }
    }

    /// A part of the bytes, which no request may be about; others may be in use.
    pub(crate) fn part(&mut self, from: usize, bytes: usize) -> &mut [u8] {
        assert!(from + bytes <= self.bytes, "a part beyond the memory");
        // SAFETY: within the memory; the caller has seen the end of every request about it.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr().add(from), bytes) }
    }

    /// Fills the bytes with the pattern of a seed.
    pub(crate) fn fill(&mut self, seed: u64) {
        fill(self.slice(), seed);
    }

    /// Gives the memory back: a touch from now on is a crash, or an error of the kernel.
    pub(crate) fn seal(&self) -> Result<()> {
        // SAFETY: no reference to the bytes is left; `slice` gives none that outlives a call.
        unsafe { mprotect(self.base.as_ptr().cast(), self.mapped_bytes, MprotectFlags::empty()) }
            .context("memory that is given back")
    }
}

impl Drop for GuardedMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.mapped_bytes) };
        debug_assert!(unmapped.is_ok());
    }
}

/// Writes the pattern of a seed.
pub(crate) fn fill(bytes: &mut [u8], seed: u64) {
    for (at, word) in bytes.chunks_mut(8).enumerate() {
        word.copy_from_slice(&word_of(seed, at)[..word.len()]);
    }
}

/// The first byte that is not the pattern's.
pub(crate) fn difference(bytes: &[u8], seed: u64) -> Option<usize> {
    let mut words = bytes.chunks(8).enumerate();
    let (at, word) = words.find(|(at, word)| **word != word_of(seed, *at)[..word.len()])?;
    let same = word.iter().zip(word_of(seed, at)).take_while(|(a, b)| **a == *b).count();
    Some(at * 8 + same)
}

/// Eight bytes of the pattern: neighbours, and the same place of other seeds, differ.
fn word_of(seed: u64, at: usize) -> [u8; 8] {
    let mixed = (seed ^ (at as u64) << 20).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (mixed ^ mixed >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9).to_ne_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_byte_is_found() {
        let mut bytes = [0; 1003];
        fill(&mut bytes, 5);
        assert_eq!(difference(&bytes, 5), None);
        assert_eq!(difference(&bytes[8..], 5), Some(0), "a shift is seen");
        assert!(difference(&bytes, 6).is_some());
        for at in [0, 500, 1002] {
            bytes[at] ^= 1;
            assert_eq!(difference(&bytes, 5), Some(at));
            bytes[at] ^= 1;
        }
    }
}
