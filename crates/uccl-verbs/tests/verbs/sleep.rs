//! Sleeping until something has happened.

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use uccl_fabric::{
    lane::OpKind::Write,
    rail::{Channel, RailError},
};
use uccl_verbs::VerbsSettings;

use crate::support::{Cable, Memory, Pair, Rails, impatient, request};

/// Sleeps until the channel needs a poll; whether it was woken, and not by time.
fn sleep(channel: &dyn Channel, most_ms: i64) -> bool {
    let fd = channel.fd().expect("a descriptor");
    let mut watched = [PollFd::new(&fd, PollFlags::IN)];
    let timeout =
        rustix::time::Timespec { tv_sec: most_ms / 1000, tv_nsec: most_ms % 1000 * 1_000_000 };
    poll(&mut watched, Some(&timeout)).expect("poll") > 0
}

#[test]
fn a_sleeper_is_woken_by_the_end_of_its_request() {
    let Some(rails) = Rails::shared() else { return };
    let ours = Memory::random(&rails.a, 1 << 20, 1);
    let theirs = Memory::zeros(&rails.b, 1 << 20);
    let Pair { mut a, b: _b } = rails.joined();
    let mut ended = Vec::new();
    for round in 0..20 {
        assert!(a.arm().expect("it lives"), "nothing to do in round {round}");
        assert!(!sleep(a.as_ref(), 0), "nothing has happened in round {round}");
        let len = if round % 2 == 0 { 8 } else { 1 << 20 };
        let write = request(Write, a.as_mut(), (&ours, &theirs), 0..len, round);
        // SAFETY: the memory is kept until it has ended.
        assert_eq!(unsafe { a.post(&[write]) }.expect("posted"), 1);
        while ended.len() as u64 <= round {
            if a.arm().expect("it lives") {
                assert!(sleep(a.as_ref(), 60_000), "not woken in round {round}");
            }
            a.poll(&mut ended).expect("it lives");
        }
    }
    assert!(ended.iter().map(|ended| ended.tag).eq(0..20));
}

/// Over UC both ends have something to do: acknowledgements and timers.
#[test]
fn both_ends_may_sleep_over_uc() {
    let settings = VerbsSettings { rc_mode: false, ..VerbsSettings::default() };
    let Some(rails) = Rails::open(Cable::Shared, &settings) else { return };
    let ours = Memory::random(&rails.a, 1 << 20, 1);
    let theirs = Memory::zeros(&rails.b, 1 << 20);
    let mut pair = rails.joined();
    let mut ended = Vec::new();
    for round in 0..20 {
        let write = request(Write, pair.a.as_mut(), (&ours, &theirs), 0..1 << 20, round);
        // SAFETY: the memory is kept until it has ended.
        assert_eq!(unsafe { pair.a.post(&[write]) }.expect("posted"), 1);
        while ended.len() as u64 <= round {
            sleep_both(&mut pair);
            pair.a.poll(&mut ended).expect("it lives");
            pair.b.poll(&mut Vec::new()).expect("it lives");
        }
    }
    assert!(ours.bytes == theirs.bytes);
}

/// Sleeps until one of them is woken, or must look at the time.
fn sleep_both(pair: &mut Pair) {
    if !(pair.a.arm().expect("it lives") && pair.b.arm().expect("it lives")) {
        return;
    }
    let now = Instant::now();
    let due = [pair.a.wake_in(now), pair.b.wake_in(now)].into_iter().flatten().min();
    let due = due.unwrap_or(Duration::from_secs(60));
    let (a, b) = (pair.a.fd().expect("a descriptor"), pair.b.fd().expect("a descriptor"));
    let mut watched = [PollFd::new(&a, PollFlags::IN), PollFd::new(&b, PollFlags::IN)];
    let timeout = rustix::time::Timespec {
        tv_sec: due.as_secs() as i64,
        tv_nsec: i64::from(due.subsec_nanos()),
    };
    let woken = poll(&mut watched, Some(&timeout)).expect("poll");
    assert!(woken > 0 || due < Duration::from_secs(60), "nobody is woken");
}

/// A poller that saw the end itself leaves the event behind; that must not wake a later sleeper.
#[test]
fn an_end_that_was_polled_wakes_no_later_sleeper() {
    let Some(rails) = Rails::shared() else { return };
    let mut pair = rails.joined();
    assert!(pair.a.arm().expect("it lives"));
    pair.probes().expect("the way works");
    assert!(pair.a.arm().expect("it lives"));
    assert!(!sleep(pair.a.as_ref(), 20), "nothing has happened since");
    pair.a.probe(1).expect("posted");
    assert!(sleep(pair.a.as_ref(), 60_000), "still armed");
}

#[test]
fn a_sleeper_is_woken_by_the_loss_of_its_peer() {
    let Some(rails) = Rails::open(Cable::Shared, &impatient()) else { return };
    let Pair { mut a, b } = rails.joined();
    drop(b);
    a.probe(1).expect("posted");
    let mut ended = Vec::new();
    let error = loop {
        if a.arm().expect("not known yet") {
            assert!(sleep(a.as_ref(), 60_000), "not woken");
        }
        if let Err(error) = a.poll(&mut ended) {
            break error;
        }
    };
    assert!(matches!(error, RailError::Lost(_)) && ended.is_empty(), "{error}");
}
