//! A copy of bytes that is fast even for very few of them.

use std::ptr;

/// The longest copy done in line; longer ones go to the C library, which knows the processor best.
const INLINE: usize = 128;

/// Copies `len` bytes from `from` to `to`.
///
/// # Safety
/// `len` bytes must be readable at `from` and writable at `to`, and not overlap.
#[inline(always)]
pub(crate) unsafe fn copy_bytes(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's promise; each branch stays within `len`.
    unsafe {
        match len {
            0..4 => few(from, to, len),
            4..8 => ends::<u32>(from, to, len),
            8..16 => ends::<u64>(from, to, len),
            16..=32 => ends::<u128>(from, to, len),
            33..=64 => ends::<[u128; 2]>(from, to, len),
            65..=INLINE => ends::<[u128; 4]>(from, to, len),
            _ => ptr::copy_nonoverlapping(from, to, len),
        }
    }
}

/// # Safety
/// As for [`copy_bytes`], with `len` below 4.
#[inline(always)]
unsafe fn few(from: *const u8, to: *mut u8, len: usize) {
    for at in 0..len {
        // SAFETY: within `len`.
        unsafe { to.add(at).write(from.add(at).read()) };
    }
}

/// Copies a `T` from the start and one from the end; they may overlap.
///
/// # Safety
/// As for [`copy_bytes`], with `len` between the size of `T` and twice that.
#[inline(always)]
unsafe fn ends<T>(from: *const u8, to: *mut u8, len: usize) {
    let back = len - size_of::<T>();
    // SAFETY: both pieces lie within `len`, and any bytes make an integer.
    unsafe {
        let head = from.cast::<T>().read_unaligned();
        let tail = from.add(back).cast::<T>().read_unaligned();
        to.cast::<T>().write_unaligned(head);
        to.add(back).cast::<T>().write_unaligned(tail);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_short_length_is_copied_exactly() {
        let from: Vec<u8> = (0..400u32).map(|i| (i * 7 + 1) as u8).collect();
        for len in 0..=3 * INLINE {
            let mut to = vec![0xee; 400];
            // SAFETY: both are longer than what is copied.
            unsafe { copy_bytes(from.as_ptr().add(3), to.as_mut_ptr().add(5), len) };
            assert_eq!(to[5..5 + len], from[3..3 + len]);
            assert!(to[..5].iter().chain(&to[5 + len..]).all(|byte| *byte == 0xee), "length {len}");
        }
    }
}
