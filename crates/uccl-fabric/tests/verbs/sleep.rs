//! Sleeping until something has happened.

use rustix::event::{PollFd, PollFlags, poll};
use uccl_fabric::{
    lane::OpKind::Write,
    rma::rail::{Channel, RailError},
};

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

/// A poller that saw the end itself leaves the event behind; that wakes nobody later.
#[test]
fn what_was_polled_wakes_no_later_sleeper() {
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
