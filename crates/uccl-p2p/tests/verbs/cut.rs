//! A rail that is cut in mid-transfer: the other takes over, and the rail is used once more after
//! its return.
//!
//! `UCCL_TEST_ROUNDS` is the number of cuts; `UCCL_TEST_RDMA` adds settings, as
//! `UCCL_RCMODE=0,UCCL_P2P_RDMA_QPS=3`.

use std::{
    env,
    time::{Duration, Instant},
};

use uccl_p2p::Config;

use crate::{
    cables::Cable,
    ends::{EndMemory, joined, set, there, until},
    support::Pair,
    usage::Usage,
};

/// Memory may be freed late, and caches first grow to their size.
const SLACK_KIB: u64 = 16 << 10;

fn rounds() -> usize {
    env::var("UCCL_TEST_ROUNDS").map_or(3, |count| count.parse().expect("a number"))
}

/// Losses are noticed soon, unless `UCCL_TEST_RDMA` has another timeout.
fn settings(config: &mut Config) {
    set(config, "UCCL_P2P_RDMA_TIMEOUT", "10");
    let more = env::var("UCCL_TEST_RDMA").unwrap_or_default();
    for (name, value) in more.split(',').filter_map(|setting| setting.split_once('=')) {
        set(config, name, value);
    }
}

/// The observations of a test.
#[derive(Default)]
struct Observations {
    /// Transfers that were in the middle when the cable was cut.
    in_middle: usize,
    /// The times from the cable's return to its next use.
    returns: Vec<Duration>,
}

/// Cuts the cable at one end in mid-transfer, and connects it once more.
fn round(
    p: &Pair,
    cable: &Cable,
    end: usize,
    memory: &mut [EndMemory; 2],
    seen: &mut Observations,
) {
    let [long, short] = memory;
    let way = there(p);
    until("the return of the rail", || way.rails() == 2);
    let before = cable.bytes();
    let cut = |id| {
        cable.until_used(before, way, id);
        cable.set(end, "down");
        seen.in_middle += usize::from(way.is_pending(id));
    };
    long.write(way, cut).expect("the other takes over");
    // The loss of an unused rail is not noticed, so the writes continue.
    until("the loss of the rail", || {
        short.write(way, |_| {}).expect("one is enough");
        way.rails() == 1
    });
    let before = cable.bytes();
    cable.set(end, "up");
    let joined = Instant::now();
    until("use of the rail", || {
        short.write(way, |_| {}).expect("one is enough, and two are");
        cable.is_used(before)
    });
    seen.returns.push(joined.elapsed());
}

#[test]
fn a_rail_that_is_cut_hands_its_work_to_the_other_and_comes_back() {
    let Some(cable) = Cable::of_guest(1) else {
        eprintln!("skipped: no cable that may be cut (run it with cargo xtask guest --rails 2)");
        return;
    };
    let Some(p) = joined(2, settings) else { return };
    let (mut memory, mut seen) = ([16 << 20, 1 << 20].map(EndMemory::new), Observations::default());
    let rounds = rounds();
    let mut early = None;
    for number in 1..=rounds {
        round(&p, &cable, number % 2, &mut memory, &mut seen);
        if number == rounds.div_ceil(2).min(5) {
            early = Some(Usage::now());
        }
    }
    let (early, late) = (early.expect("a round"), Usage::now());
    seen.returns.sort();
    let Observations { in_middle, returns } = seen;
    let (median, last) = (returns[rounds / 2], returns[rounds - 1]);
    eprintln!("{rounds} cuts, {in_middle} of them in mid-transfer");
    eprintln!("used again {median:.2?} after its return (median), {last:.2?} at the latest");
    eprintln!("early: {early}\nat the end: {late}");
    assert!(in_middle > 0, "no transfer was in its middle");
    assert_eq!((early.files, &early.objects), (late.files, &late.objects));
    assert!(late.resident_kib < early.resident_kib + SLACK_KIB, "memory grows");
}
