//! A clock that costs nothing to read: for liveness, not for measuring.

use rustix::time::{ClockId, clock_gettime};

/// Milliseconds of the coarse monotonic clock (a few milliseconds of resolution).
pub fn coarse_ms() -> u64 {
    let now = clock_gettime(ClockId::MonotonicCoarse);
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}
