//! Two clocks: `shared_ns` is common to all processes, and `active` stands still while this process
//! does.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

/// Period of the ticks that advance the active time.
const TICK: Duration = Duration::from_millis(20);
/// The most time that a tick counts. A longer gap means that this process was stopped or had no
/// processor.
const MOST: Duration = Duration::from_millis(60);

static ACTIVE_MS: AtomicU64 = AtomicU64::new(0);

/// Time during which this process ran. Deadlines use it, so a stopped process misses none.
pub(crate) fn active() -> Duration {
    Duration::from_millis(ACTIVE_MS.load(Relaxed))
}

/// Advances the active time and calls `each` at every tick, forever.
pub(crate) fn run(mut each: impl FnMut()) -> ! {
    let mut last = Instant::now();
    loop {
        thread::sleep(TICK);
        let now = Instant::now();
        ACTIVE_MS.fetch_add((now - last).min(MOST).as_millis() as u64, Relaxed);
        last = now;
        each();
    }
}

/// Nanoseconds on the clock that all processes of this machine share.
pub(crate) fn shared_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes only `time`, a local.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
