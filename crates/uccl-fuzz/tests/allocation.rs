//! No number in hostile bytes makes a parser take memory that the bytes' length does not justify.

use peak_alloc::PeakAlloc;
use uccl_fuzz::{PARSERS, samples};

#[global_allocator]
static ALLOCATED: PeakAlloc = PeakAlloc;

/// Announced lengths of 2^20 descriptors or 64 KiB bodies stand out against this.
const ALLOWED_BYTES: usize = 16 << 10;

/// One test alone in its process: another's allocations would count as its own.
#[test]
fn memory_follows_the_input() {
    for mut bytes in samples() {
        let _ = uccl_fuzz::all_parsers(&bytes);
        for at in 0..bytes.len() {
            for width in [1, 2, 4, 8] {
                let end = (at + width).min(bytes.len());
                for edge in [0xff, 0x10, 0x00] {
                    let was = bytes[at..end].to_vec();
                    bytes[at..end].fill(edge);
                    check(&bytes);
                    bytes[at..end].copy_from_slice(&was);
                }
            }
        }
    }
    for count in [1u64, 1 << 16, 1 << 20, 1 << 40, u64::MAX] {
        check(&[&count.to_le_bytes()[..], &[0; 64]].concat());
    }
}

fn check(bytes: &[u8]) {
    for parser in PARSERS {
        let before = ALLOCATED.current_usage();
        ALLOCATED.reset_peak_usage();
        let _ = (parser.takes)(bytes);
        let growth = ALLOCATED.peak_usage().saturating_sub(before);
        assert!(growth <= ALLOWED_BYTES, "{} took {growth} bytes for {bytes:02x?}", parser.name);
    }
}
