//! Faults: keys and ranges that are not there, peers that go away, channels dropped in full flight.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Instant,
};

use uccl_fabric::{
    lane::OpKind,
    rail::{Rail, RailError, Request, RequestError},
};

use crate::pair::{Memory, PATIENCE, Pair, for_each_provider, open, pattern};

for_each_provider!(
    a_wrong_key_is_refused,
    a_request_that_is_out_of_range_is_refused,
    memory_is_out_of_reach_once_it_is_deregistered,
    a_peer_that_goes_away_ends_the_requests_in_flight,
    a_drop_ends_the_requests_in_flight,
    a_drop_in_the_middle_of_an_answer_harms_nobody,
    rails_are_independent,
);

/// Whether the provider reports a request for memory that does not exist as refused. `tcp` cuts the
/// peer's connection instead, and `shm` does not answer.
fn is_told_why(provider: &str) -> bool {
    !provider.starts_with("tcp") && provider != "shm"
}

/// `verbs` reports the refusal, and then the connection is over as well.
fn costs_the_channel(provider: &str) -> bool {
    !is_told_why(provider) || provider.starts_with("verbs")
}

/// In one process, both ends of `shm` use one mapping of each end, and the process does not survive
/// that one end goes first. `processes.rs` tests it in two processes.
fn needs_two_processes(provider: &str) -> bool {
    if provider == "shm" {
        eprintln!("skipped: shm lacks a mapping for each end in one process");
    }
    provider == "shm"
}

/// Posts one request that the peer's side must refuse, and checks that `theirs` is unchanged.
fn is_refused(provider: &str, pair: &mut Pair, request: Request, theirs: &Memory) {
    let before = theirs.bytes.clone();
    let result = pair.run(&[Request { tag: 77, ..request }]);
    if !is_told_why(provider) {
        let lost = matches!(result, Err(RailError::Lost(_)));
        assert!(lost, "{result:?}, {:?}", pair.a.result_of(77));
    } else {
        result.expect("the channel lives");
        assert_eq!(pair.a.result_of(77), Some(&Err(RequestError::Access)));
    }
    assert!(theirs.bytes == before, "a refused request has written");
}

/// A good request still works, over this channel or, if that died, over a new one.
fn a_good_one_goes(
    provider: &str,
    rail: &dyn Rail,
    pair: &mut Pair,
    ours: &Memory,
    theirs: &Memory,
) {
    if costs_the_channel(provider) {
        *pair = Pair::new(rail);
    }
    let good = pair.request(OpKind::Write, ours, theirs);
    pair.run(&[Request { tag: 78, ..good }]).expect("it goes");
    assert_eq!(pair.a.result_of(78), Some(&Ok(())));
}

fn a_wrong_key_is_refused(provider: &str) {
    let Some(rail) = open(provider) else { return };
    let (ours, theirs) = (Memory::new(&rail, 5000, pattern), Memory::new(&rail, 5000, |_| 1));
    for kind in [OpKind::Write, OpKind::Read] {
        let mut pair = Pair::new(&rail);
        let good = pair.request(kind, &ours, &theirs);
        let wrong = Request { remote_key: good.remote_key ^ 0x5555, ..good };
        is_refused(provider, &mut pair, wrong, &theirs);
        a_good_one_goes(provider, &rail, &mut pair, &ours, &theirs);
    }
}

fn a_request_that_is_out_of_range_is_refused(provider: &str) {
    let Some(rail) = open(provider) else { return };
    let (ours, theirs) = (Memory::new(&rail, 5000, pattern), Memory::new(&rail, 6000, |_| 1));
    let mut pair = Pair::new(&rail);
    let good = pair.request(OpKind::Write, &ours, &theirs);
    let wrong = Request { remote_addr: good.remote_addr + 1001, ..good };
    is_refused(provider, &mut pair, wrong, &theirs);
    a_good_one_goes(provider, &rail, &mut pair, &ours, &theirs);
}

fn memory_is_out_of_reach_once_it_is_deregistered(provider: &str) {
    let Some(rail) = open(provider) else { return };
    let ours = Memory::new(&rail, 5000, pattern);
    let Memory { registration, bytes } = Memory::new(&rail, 5000, |_| 1);
    let theirs = Memory { registration, bytes };
    let mut pair = Pair::new(&rail);
    let request = pair.request(OpKind::Write, &ours, &theirs);
    pair.run(&[request]).expect("it goes");
    assert!(theirs.bytes == ours.bytes);
    let Memory { registration, bytes } = theirs;
    drop(registration);
    // The memory is still there, and registered under another key.
    let mut theirs = Memory::new(&rail, 1, |_| 0);
    theirs.bytes = bytes;
    is_refused(provider, &mut pair, request, &theirs);
}

fn a_peer_that_goes_away_ends_the_requests_in_flight(provider: &str) {
    if needs_two_processes(provider) {
        return;
    }
    let Some(rail) = open(provider) else { return };
    let len = 1 << 20;
    let (ours, theirs) = (Memory::new(&rail, len, pattern), Memory::new(&rail, len, |_| 0));
    let mut pair = Pair::new(&rail);
    let one = pair.request(OpKind::Write, &ours, &theirs);
    pair.run(&[one]).expect("it goes");
    let Pair { mut a, mut b } = pair;
    let requests: Vec<_> = (0..64).map(|i| Request { tag: 100 + i, ..one }).collect();
    // SAFETY: the memory lives until the channel is dropped.
    let posted = unsafe { a.channel.post(&requests) }.expect("they go");
    for _ in 0..3 {
        let _ = a.poll();
        let _ = b.poll();
    }
    drop(b);
    let start = Instant::now();
    // All requests end, or the channel dies.
    let died = loop {
        match a.poll() {
            Err(error) => break Some(error),
            Ok(()) if a.ended.len() == posted + 1 => break None,
            Ok(()) => {}
        }
        assert!(start.elapsed() < PATIENCE, "{} of {posted} ended", a.ended.len() - 1);
        std::thread::yield_now();
    };
    if let Some(error) = died {
        assert!(matches!(error, RailError::Lost(_)), "{error}");
        // The channel remains dead.
        assert!(a.poll().is_err() && a.channel.probe(1).is_err());
        // SAFETY: it is not taken.
        assert!(unsafe { a.channel.post(&[one]) }.is_err());
    }
    drop(a);
}

fn a_drop_ends_the_requests_in_flight(provider: &str) {
    if needs_two_processes(provider) {
        return;
    }
    let Some(rail) = open(provider) else { return };
    let len = 4 << 20;
    for turns in 0..8 {
        let mut pair = Pair::new(&rail);
        let mut ours = Memory::new(&rail, len, pattern);
        let theirs = Memory::new(&rail, len, |_| 0);
        let kind = if turns % 2 == 0 { OpKind::Write } else { OpKind::Read };
        let one = pair.request(kind, &ours, &theirs);
        let requests: Vec<_> = (0..8).map(|i| Request { tag: i, ..one }).collect();
        // SAFETY: the memory lives until the channel is dropped, below.
        unsafe { pair.a.channel.post(&requests) }.expect("they go");
        for _ in 0..turns * 3 {
            pair.a.poll().expect("it lives");
            let _ = pair.b.poll();
        }
        let Pair { a, mut b } = pair;
        drop(a);
        // Our memory is ours again: nothing is written to it any more.
        ours.bytes.fill(0xee);
        for _ in 0..1000 {
            let _ = b.poll();
            std::thread::yield_now();
        }
        assert!(ours.bytes.iter().all(|byte| *byte == 0xee), "a dropped channel has written");
    }
}

/// The peer stands still with an answer half sent, or goes on and sends the rest.
fn a_drop_in_the_middle_of_an_answer_harms_nobody(provider: &str) {
    if needs_two_processes(provider) {
        return;
    }
    let Some(rail) = open(provider) else { return };
    for goes_on in [true, false] {
        // More than sockets hold, so that no poll takes in all of it.
        let len = 32 << 20;
        let (mut ours, theirs) =
            (Memory::new(&rail, len, |_| !pattern(0)), Memory::new(&rail, len, pattern));
        let mut pair = Pair::new(&rail);
        let one = pair.request(OpKind::Read, &ours, &theirs);
        // SAFETY: the memory lives until the channel is dropped, below.
        unsafe { pair.a.channel.post(&[one]) }.expect("it goes");
        let Pair { mut a, mut b } = pair;
        let start = Instant::now();
        while ours.bytes[0] != pattern(0) && a.ended.is_empty() {
            let _ = b.poll();
            a.poll().expect("it lives");
            assert!(start.elapsed() < PATIENCE, "nothing has come");
        }
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let answers = scope.spawn(|| {
                while goes_on && !stop.load(Ordering::Relaxed) {
                    let _ = b.poll();
                    std::thread::yield_now();
                }
                b
            });
            drop(a);
            // Our memory is ours again, also when the peer wakes.
            ours.bytes.fill(0xee);
            stop.store(true, Ordering::Relaxed);
            let mut b = answers.join().expect("it polls");
            for _ in 0..1000 {
                let _ = b.poll();
                std::thread::yield_now();
            }
        });
        assert!(ours.bytes.iter().all(|byte| *byte == 0xee), "a dropped channel has written");
        // Other channels of the rail go on, and do not drive the dropped channel's read either.
        let mut next = Pair::new(&rail);
        let again = next.request(OpKind::Write, &ours, &theirs);
        next.run(&[again]).expect("it goes");
        assert!(ours.bytes.iter().all(|byte| *byte == 0xee), "another channel has written");
        assert!(theirs.bytes.iter().all(|byte| *byte == 0xee));
    }
}

fn rails_are_independent(provider: &str) {
    let (Some(one), Some(other)) = (open(provider), open(provider)) else { return };
    assert_eq!(one.info(), other.info());
    assert!(one.is_up());
    let (mut first, mut second) = (Pair::new(&one), Pair::over(&one, &other));
    let ours = Memory::new(&one, 70_000, pattern);
    let (theirs, elsewhere) =
        (Memory::new(&one, 70_000, |_| 0), Memory::new(&other, 70_000, |_| 0));
    let to_theirs = first.request(OpKind::Write, &ours, &theirs);
    let to_elsewhere = second.request(OpKind::Write, &ours, &elsewhere);
    first.run(&[to_theirs]).expect("it goes");
    drop(first);
    second.run(&[to_elsewhere]).expect("it goes");
    assert!(theirs.bytes == ours.bytes && elsewhere.bytes == ours.bytes);
}
