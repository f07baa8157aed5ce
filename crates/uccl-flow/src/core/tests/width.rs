//! The number of streams, over links in virtual time.

use super::{
    net::Faults,
    sim::{Sim, Work, params},
};
use crate::core::Scheduler;

const SECOND_US: u64 = 1_000_000;
/// Bytes for each millisecond of a stream.
const RATE: u64 = 1000;

/// Eight streams at most, of which two carry chunks at first, and a sender that always has more.
fn link(total: Option<u64>) -> Sim {
    let mut params = params(8);
    params.width.first = 2;
    let mut sim = Sim::with(params, 11, Work { flows: 4, messages: 160, longest: 256 << 10 });
    sim.net.set_rates(RATE);
    sim.net.total = total;
    sim
}

/// The part of a time in which more streams than `count` carried chunks, in percent.
fn share_above(sim: &mut Sim, count: usize, time_us: u64) -> usize {
    let looks = (0..100).filter(|_| {
        sim.run_until(sim.now_us() + time_us / 100);
        sim.width().0 > count
    });
    looks.count()
}

#[test]
fn streams_that_are_limited_each_become_more() {
    let mut sim = link(None);
    sim.run_until(2 * SECOND_US);
    assert_eq!(sim.width(), (8, 8));
    let before: u64 = sim.net.delivered().iter().sum();
    sim.run_until(3 * SECOND_US);
    let delivered = sim.net.delivered().iter().sum::<u64>() - before;
    assert!(delivered * 10 > 8 * RATE * 1000 * 9, "{delivered} bytes in a second");
}

#[test]
fn a_slow_stream_that_is_passed_over_hides_no_full_link() {
    let mut sim = link(None);
    sim.net.faults = Faults::Slow { stream: 1, by: 20 };
    sim.run_until(2 * SECOND_US);
    assert_eq!(sim.width(), (8, 8));
}

#[test]
fn more_streams_that_do_not_help_rest() {
    let mut sim = link(Some(2 * RATE));
    sim.run_until(SECOND_US);
    assert_eq!(sim.width(), (2, 4), "four were tried");
    assert!(share_above(&mut sim, 2, 15 * SECOND_US) <= 10);
    assert_eq!(sim.width(), (2, 4));
    // Each stream may have work again, and those that rest none.
    let before = sim.net.delivered();
    sim.run_until(sim.now_us() + SECOND_US / 10);
    let moved: Vec<_> =
        before.iter().zip(sim.net.delivered()).map(|(old, all)| all - old).collect();
    assert!(moved[..2].iter().all(|bytes| *bytes > 0) && moved[2..].iter().sum::<u64>() == 0);
}

#[test]
fn a_link_that_gets_slower_keeps_its_streams() {
    let mut sim = link(Some(2 * RATE));
    sim.run_until(SECOND_US);
    sim.net.total = Some(RATE / 2);
    assert!(share_above(&mut sim, 2, 15 * SECOND_US) <= 10);
    assert_eq!(sim.width().0, 2);
}

#[test]
fn streams_that_get_slower_become_more() {
    let mut sim = link(Some(2 * RATE));
    sim.run_until(SECOND_US);
    assert_eq!(sim.width().0, 2);
    sim.net.set_rates(RATE / 4);
    sim.run_until(6 * SECOND_US);
    assert_eq!(sim.width(), (8, 8));
}

#[test]
fn a_sender_with_little_to_send_needs_no_more_streams() {
    let mut params = params(8);
    params.width.first = 2;
    let mut sim = Sim::with(params, 3, Work { flows: 1, messages: 4000, longest: 4000 });
    // A chunk each time, and one flow: it has to wait for its turn.
    sim.net.set_rates(64 * RATE);
    sim.run_until(2 * SECOND_US);
    assert_eq!(sim.width(), (2, 2));
}

#[test]
fn a_stream_that_rests_takes_the_place_of_one_that_has_ended() {
    let mut params = params(2);
    params.width.first = 1;
    let mut scheduler = Scheduler::new(params);
    scheduler.open(0, 0);
    scheduler.open(1, 0);
    scheduler.push(1, 0, 2 * params.chunk_len, 0, 0);
    scheduler.on_posted(1, 1);
    assert_eq!(scheduler.next(1, 0), None, "it rests");
    let first = scheduler.next(0, 0).expect("a chunk");
    scheduler.lose(0);
    let again = scheduler.next(1, 0).expect("a chunk");
    assert_eq!((again.offset, again.is_repeat), (first.offset, true));
    scheduler.open(0, 10);
    assert!(scheduler.next(0, 10).is_some());
    assert_eq!(scheduler.next(1, 10), None, "the first ones carry chunks");
}
