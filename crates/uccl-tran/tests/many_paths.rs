//! Random schedules of messages over many paths: loss, reordering, repeats, delay, cuts, paths that
//! die and come back, fences, receives that are posted late. Every chunk is placed exactly once
//! before its message ends, nothing is placed after a fence, and nothing starves.
//!
//! `UCCL_CHAOS_RUNS=1000000 cargo test -p uccl-tran --test many_paths` runs so many schedules;
//! `UCCL_CHAOS_SEED` runs one again.

mod schedule;
mod sim;

use schedule::Schedule;
use sim::each_seed;
use uccl_tran::multipath::Repeats;

#[test]
fn every_chunk_is_placed_once_where_the_receiver_places() {
    each_seed(10_000, |seed| Schedule::random(seed, Repeats::Harmless).run());
}

#[test]
fn every_chunk_is_placed_once_where_the_network_places() {
    each_seed(10_000, |seed| Schedule::random(seed, Repeats::OnlyWhenProven).run());
}
