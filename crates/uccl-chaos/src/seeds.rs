//! Runs a test with many seeds and names the failing one.

use std::time::{Duration, Instant};

/// Runs a test with seed after seed and names the one that fails. The environment sets one seed
/// (`UCCL_CHAOS_SEED`) or the number of seeds (`UCCL_CHAOS_RUNS`). Without them, as many seeds run
/// as fit into two seconds, and at least three.
pub fn each_seed(test: impl Fn(u64)) {
    struct Name(u64);
    impl Drop for Name {
        fn drop(&mut self) {
            if std::thread::panicking() {
                eprintln!("again with UCCL_CHAOS_SEED={}", self.0);
            }
        }
    }
    let number = |name| std::env::var(name).ok().and_then(|v: String| v.parse::<u64>().ok());
    let (one, count) = (number("UCCL_CHAOS_SEED"), number("UCCL_CHAOS_RUNS"));
    let begun = Instant::now();
    for seed in one.map_or(0..count.unwrap_or(1000), |seed| seed..seed + 1) {
        if count.is_none() && seed >= 3 && begun.elapsed() > Duration::from_secs(2) {
            break;
        }
        let name = Name(seed);
        test(seed);
        drop(name);
    }
}
