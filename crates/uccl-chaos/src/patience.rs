//! Waits for something that happens soon.

use std::{
    thread,
    time::{Duration, Instant},
};

/// Longer than any awaited event takes.
const FAR: Duration = Duration::from_secs(60);
/// For so long it only yields between two calls.
const BRISK: Duration = Duration::from_millis(1);
const NAP: Duration = Duration::from_micros(100);

/// Calls until there is an answer. Panics if there is none for a minute.
pub fn patiently<T>(mut attempt: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(answer) = attempt() {
            return answer;
        }
        let waited = begun.elapsed();
        assert!(waited < FAR, "it never happens");
        match waited < BRISK {
            true => thread::yield_now(),
            false => thread::sleep(NAP),
        }
    }
}
