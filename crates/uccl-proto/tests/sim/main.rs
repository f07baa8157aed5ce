//! Both ends of a connection in one thread and in virtual time, under random schedules.
//!
//! A seed fixes a whole schedule: `UCCL_SIM_SEED=7 cargo test -p uccl-proto --test sim` repeats
//! one, `UCCL_SIM_SEEDS=1000000` sets the number of seeds. `--nocapture` shows the steps a second.

mod end;
mod hostile;
mod world;

use std::time::Instant;

use crate::world::World;

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().and_then(|text| text.parse().ok())
}

/// Runs seeds, each of which returns its number of steps.
fn run(what: &str, seeds: u64, one: impl Fn(u64) -> u64) {
    if let Some(seed) = number("UCCL_SIM_SEED") {
        println!("{what}: {} steps", one(seed));
        return;
    }
    let (begun, mut steps) = (Instant::now(), 0);
    let seeds = number("UCCL_SIM_SEEDS").unwrap_or(seeds);
    for seed in 0..seeds {
        let _report = SeedReport(seed);
        steps += one(seed);
    }
    let rate = steps as f64 / begun.elapsed().as_secs_f64();
    println!("{what}: {seeds} seeds, {steps} steps, {rate:.0} a second");
}

/// Prints the seed that failed.
struct SeedReport(u64);

impl Drop for SeedReport {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("UCCL_SIM_SEED={}", self.0);
        }
    }
}

#[test]
fn honest_ends_keep_every_promise() {
    run("honest", 3000, |seed| World::new(seed).run());
}

#[test]
fn a_peer_that_says_anything_costs_itself_the_connection_and_nothing_more() {
    run("hostile", 3000, hostile::run);
}
