//! Sleeping until there is something to do, on either end.

use std::{
    os::fd::AsFd,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use uccl_fabric::{
    lane::OpKind,
    rail::{Channel, RailError, RequestEnd},
};

use crate::pair::{Memory, PATIENCE, Pair, for_each_provider, open, pattern};

for_each_provider!(both_ends_sleep_and_are_woken, a_thread_without_work_may_sleep);

/// Sleeps as an engine does: armed, on the descriptor, no longer than `wake_in` and `most` allow.
fn sleep(channel: &mut dyn Channel, most: Duration) -> Result<(), RailError> {
    if !channel.arm()? {
        return Ok(());
    }
    let wait = channel.wake_in(Instant::now()).unwrap_or(most).min(most);
    let timeout = Timespec::try_from(wait).expect("a short time");
    match channel.fd() {
        Some(fd) => {
            let mut fds = [PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)];
            let _ = poll(&mut fds, Some(&timeout));
        }
        None => thread::sleep(wait),
    }
    Ok(())
}

/// Ends the other thread, whether or not all went well here.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn both_ends_sleep_and_are_woken(provider: &str) {
    let Some(rail) = open(provider) else { return };
    let mut pair = Pair::new(&rail);
    let len = 300_000;
    let (ours, theirs) = (Memory::new(&rail, len, pattern), Memory::new(&rail, len, |_| 0));
    let one = pair.request(OpKind::Write, &ours, &theirs);
    let Pair { mut a, mut b } = pair;
    let is_over = AtomicBool::new(false);
    let rounds = 30;
    thread::scope(|scope| {
        // A target that only ever sleeps and polls: its descriptor must show that it is needed.
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                let mut ended: Vec<RequestEnd> = Vec::new();
                if b.channel.poll(&mut ended).is_err() {
                    return;
                }
                sleep(&mut *b.channel, Duration::from_millis(200)).expect("it lives");
            }
        });
        let _over = Over(&is_over);
        let start = Instant::now();
        for round in 1..=rounds {
            // SAFETY: the memory lives until the channels are dropped.
            let posted = unsafe { a.channel.post(&[one]) }.expect("it goes");
            assert_eq!(posted, 1);
            while a.ended.len() < round {
                a.poll().expect("it lives");
                if a.ended.len() < round {
                    // Longer than the test may take: only an event ends this sleep.
                    sleep(&mut *a.channel, PATIENCE).expect("it lives");
                }
                assert!(start.elapsed() < PATIENCE, "{} of {rounds} rounds", a.ended.len());
            }
        }
    });
    assert!(theirs.bytes == ours.bytes);
    drop(a);
}

fn a_thread_without_work_may_sleep(provider: &str) {
    let Some(rail) = open(provider) else { return };
    let mut pair = Pair::new(&rail);
    pair.a.channel.probe(1).expect("it goes");
    pair.until("a probe", |pair| Ok(pair.a.ended.len() == 1)).expect("it ends");
    // The connections may still be changing. After that the channel must let its thread sleep.
    let mut is_quiet = false;
    for _ in 0..10_000 {
        pair.a.poll().expect("it lives");
        let _ = pair.b.poll();
        if pair.a.channel.arm().expect("it lives") {
            is_quiet = true;
            break;
        }
        thread::yield_now();
    }
    assert!(is_quiet, "it never lets its thread sleep");
    let wake = pair.a.channel.wake_in(Instant::now());
    match pair.a.channel.fd() {
        Some(_) => assert!(wake.is_none_or(|wake| wake >= Duration::from_millis(100)), "{wake:?}"),
        None => assert!(wake.is_some()),
    }
}
