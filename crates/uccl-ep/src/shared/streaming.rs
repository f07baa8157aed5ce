//! Copies past the caches, for memory that is larger than they are: such a store does not first
//! read the line. Readers of such memory prefetch it.

/// Bytes of a line of memory.
const LINE: usize = 64;

/// Copies past the caches. Only a [`fence`] orders the copied bytes before other stores.
///
/// # Safety
/// As for [`std::ptr::copy_nonoverlapping`].
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // Lines that are written in part stay in the caches.
    let head = to.align_offset(LINE).min(len);
    let lines = (len - head) / LINE * LINE;
    let tail = head + lines;
    // SAFETY: all of these parts are inside, and lines are aligned.
    unsafe {
        to.copy_from_nonoverlapping(from, head);
        copy_lines(from.add(head), to.add(head), lines);
        to.add(tail).copy_from_nonoverlapping(from.add(tail), len - tail);
    }
}

/// # Safety
/// As for [`copy`]; `to` and `len` are multiples of a line.
#[cfg(target_arch = "x86_64")]
unsafe fn copy_lines(from: *const u8, to: *mut u8, len: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};

    const STEP: usize = size_of::<__m128i>();
    for at in (0..len).step_by(LINE) {
        // SAFETY: the caller guarantees that it is inside; a multiple of a line is aligned for each
        // of its parts.
        unsafe {
            let (from, to) = (from.add(at), to.add(at));
            for part in (0..LINE).step_by(STEP) {
                _mm_stream_si128(to.add(part).cast(), _mm_loadu_si128(from.add(part).cast()));
            }
        }
    }
}

/// # Safety
/// As for [`copy`].
#[cfg(not(target_arch = "x86_64"))]
unsafe fn copy_lines(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller guarantees it.
    unsafe { to.copy_from_nonoverlapping(from, len) };
}

/// Orders the copied bytes before all later stores.
pub(crate) fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 has the instruction.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Prefetches the line at any address.
#[inline(always)]
pub(crate) fn prefetch<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 has the instruction, and it does not fault.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_length_is_copied_to_any_place_and_nothing_beside_it() {
        let from: Vec<u8> = (0..1000).map(|at| at as u8 | 1).collect();
        for (start, len) in [(0, 0), (1, 5), (63, 1), (0, 64), (7, 57), (7, 300), (64, 900)] {
            let mut to = vec![0; 1100];
            // SAFETY: both are long enough.
            unsafe { copy(from.as_ptr(), to.as_mut_ptr().add(start), len) };
            fence();
            assert_eq!(to[start..start + len], from[..len], "{len} bytes at {start}");
            let beside = to[..start].iter().chain(&to[start + len..]);
            assert!(beside.copied().all(|byte| byte == 0), "{len} bytes at {start}");
        }
    }
}
