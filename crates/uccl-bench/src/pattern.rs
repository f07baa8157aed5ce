//! The pattern that fills memory, so that a misplaced byte is noticed.

/// The pattern's eight bytes number `index`: different at each place and for each seed.
fn word(seed: u64, index: u64) -> [u8; 8] {
    let mixed = (seed ^ index).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ (mixed >> 29)).to_le_bytes()
}

/// Fills with the pattern of a seed.
pub(crate) fn fill(bytes: &mut [u8], seed: u64) {
    for (chunk, index) in bytes.chunks_mut(8).zip(0..) {
        chunk.copy_from_slice(&word(seed, index)[..chunk.len()]);
    }
}

/// The first byte that is not the pattern's.
pub(crate) fn mismatch(bytes: &[u8], seed: u64) -> Option<usize> {
    for (chunk, index) in bytes.chunks(8).zip(0..) {
        let expected = word(seed, index);
        if let Some(at) = (chunk.iter()).zip(expected).position(|(got, want)| *got != want) {
            return Some(index as usize * 8 + at);
        }
    }
    None
}
