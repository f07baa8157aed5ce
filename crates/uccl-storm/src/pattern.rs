//! Patterns that fill memory. Their bytes show their origin, so that a stray one can be identified.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Bytes are made and compared in blocks of this many.
const BLOCK: usize = 4096;
/// The top bit of each byte is set in guards and clear in data.
const TOP_BITS: u64 = 0x8080_8080_8080_8080;

/// An endless sequence of bytes, a different one for every stamp.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Pattern {
    /// The pattern fills memory that only its owner may write.
    guard: bool,
    stamp: u32,
    /// Index in the sequence of the memory's first byte.
    origin: u64,
}

impl Pattern {
    /// The pattern of bytes that a transfer moves.
    pub(crate) fn data(stamp: u32) -> Self {
        Self { guard: false, stamp, origin: 0 }
    }

    /// The pattern of memory that nobody may write.
    pub(crate) fn guard(stamp: u32) -> Self {
        Self { guard: true, stamp, origin: 0 }
    }

    /// The same sequence at another place: the byte that belongs at `there` comes to `here`.
    pub(crate) fn moved(self, here: usize, there: usize) -> Self {
        let origin = self.origin.wrapping_add(there as u64).wrapping_sub(here as u64);
        Self { origin, ..self }
    }

    fn message(self, index: u64) -> u64 {
        let mut x = (u64::from(self.stamp) << 32 | 0x9e37)
            .wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^= x >> 31;
        if self.guard { x | TOP_BITS } else { x & !TOP_BITS }
    }

    /// Writes the bytes that belong at `at` and after to `out`.
    fn block(self, at: usize, out: &mut [u8]) {
        let first = self.origin.wrapping_add(at as u64);
        let (mut index, skip) = (first / 8, (first % 8) as usize);
        let (head, rest) = out.split_at_mut(out.len().min((8 - skip) % 8));
        if !head.is_empty() {
            head.copy_from_slice(&self.message(index).to_le_bytes()[skip..skip + head.len()]);
            index += 1;
        }
        for chunk in rest.chunks_mut(8) {
            chunk.copy_from_slice(&self.message(index).to_le_bytes()[..chunk.len()]);
            index += 1;
        }
    }

    /// Fills `len` bytes at `at` of the memory that begins at `base`.
    ///
    /// # Safety
    /// The bytes are this process's to write.
    pub(crate) unsafe fn fill(self, base: usize, at: usize, len: usize) {
        let mut block = [0; BLOCK];
        for from in (at..at + len).step_by(BLOCK) {
            let part = &mut block[..BLOCK.min(at + len - from)];
            self.block(from, part);
            // SAFETY: the caller guarantees that the bytes are writable.
            unsafe { std::ptr::copy(part.as_ptr(), (base + from) as *mut u8, part.len()) };
        }
    }

    /// The bytes that differ from the pattern, of the `len` at `at`.
    ///
    /// # Safety
    /// The memory is this process's to read.
    pub(crate) unsafe fn compare(self, base: usize, at: usize, len: usize) -> Option<Mismatch> {
        let (mut block, mut should) = ([0; BLOCK], [0; BLOCK]);
        let mut mismatch: Option<Mismatch> = None;
        for from in (at..at + len).step_by(BLOCK) {
            let n = BLOCK.min(at + len - from);
            // SAFETY: the caller guarantees that the memory is readable. A concurrent writer is the
            // bug being hunted.
            unsafe { std::ptr::copy((base + from) as *const u8, block.as_mut_ptr(), n) };
            self.block(from, &mut should[..n]);
            if block[..n] == should[..n] {
                continue;
            }
            for i in (0..n).filter(|i| block[*i] != should[*i]) {
                let new = || Mismatch {
                    pattern: self,
                    first: from + i,
                    last: 0,
                    count: 0,
                    found: vec![],
                    of: (at, len),
                };
                let mismatch = mismatch.get_or_insert_with(new);
                (mismatch.last, mismatch.count) = (from + i, mismatch.count + 1);
                if mismatch.found.len() < 16 {
                    mismatch.found.push(block[i]);
                }
            }
        }
        mismatch
    }
}

/// Looks for guard bytes where only data may lie: the offset of the first, and their number.
///
/// # Safety
/// The memory is this process's to read.
pub(crate) unsafe fn guards_among(base: usize, len: usize) -> Option<(usize, usize)> {
    let (mut first, mut count) = (None, 0);
    let mut block = [0; BLOCK];
    for from in (0..len).step_by(BLOCK) {
        let part = &mut block[..BLOCK.min(len - from)];
        // SAFETY: the caller guarantees that the memory is readable.
        unsafe { std::ptr::copy((base + from) as *const u8, part.as_mut_ptr(), part.len()) };
        for i in (0..part.len()).filter(|i| part[*i] & 0x80 != 0) {
            first.get_or_insert(from + i);
            count += 1;
        }
    }
    Some((first?, count))
}

/// Bytes that differ from their pattern.
pub(crate) struct Mismatch {
    pattern: Pattern,
    first: usize,
    last: usize,
    count: usize,
    found: Vec<u8>,
    of: (usize, usize),
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pattern, first, last, count, found, of: (at, len) } = self;
        let data = found.iter().filter(|byte| **byte & 0x80 == 0).count();
        write!(
            f,
            "{count} of the {len} bytes at {at:#x} are not {pattern:?}: the first at {first:#x}, the last at {last:#x}; \
             they begin with {found:02x?} ({data} of these {} look like data, the others like guards)",
            found.len()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(memory: &[u8]) -> usize {
        memory.as_ptr() as usize
    }

    #[test]
    fn a_fill_compares_equal_and_a_changed_byte_is_found() {
        let mut memory = vec![0_u8; 3 * BLOCK];
        for (from, len) in [(0, 1), (3, 5), (7, 9), (13, 2 * BLOCK), (5, 0)] {
            let pattern = Pattern::data(7).moved(from, 11);
            // SAFETY: the memory is ours and long enough.
            unsafe {
                pattern.fill(at(&memory), from, len);
                assert!(pattern.compare(at(&memory), from, len).is_none());
            }
            if len > 0 {
                memory[from + len / 2] ^= 1;
                // SAFETY: as above.
                let mismatch =
                    unsafe { pattern.compare(at(&memory), from, len) }.expect("a stray byte");
                assert_eq!((mismatch.first, mismatch.count), (from + len / 2, 1));
            }
        }
    }

    #[test]
    fn data_and_guards_are_told_apart() {
        let mut memory = vec![0_u8; 100];
        // SAFETY: the memory is ours and long enough.
        unsafe {
            Pattern::data(1).fill(at(&memory), 0, 100);
            assert_eq!(guards_among(at(&memory), 100), None);
            Pattern::guard(1).fill(at(&memory), 40, 3);
            assert_eq!(guards_among(at(&memory), 100), Some((40, 3)));
        }
        memory.fill(0);
    }

    #[test]
    fn a_row_is_the_same_wherever_it_lies() {
        let (mut here, mut there) = (vec![0_u8; 64], vec![0_u8; 64]);
        // SAFETY: the memory is ours and long enough.
        unsafe {
            Pattern::data(9).fill(at(&there), 20, 30);
            Pattern::data(9).moved(3, 20).fill(at(&here), 3, 30);
        }
        assert_eq!(here[3..33], there[20..50]);
        (here[0], there[0]) = (1, 1);
    }
}
