//! Tests that every link has to pass. They run over all pairs of a test binary, which its function
//! `pairs` makes.

use std::{
    collections::VecDeque,
    sync::atomic::{
        AtomicBool, AtomicU64,
        Ordering::{Acquire, Release},
    },
    time::Duration,
};

use uccl_p2p::{
    Change, Endpoint, Error, Iov, NoInterrupt, Op, Request, Signal, Status, TransferHandle,
    TransferId, TryOutcome, Until, wire::advert::Advert,
};

use super::{Pair, advert, advert_word, finish, iov, pattern, register, register_words, request};
use crate::pairs;

const SIZES: [usize; 9] = [0, 1, 64, 4096, 33_000, 256 << 10, (1 << 20) + 3, 8 << 20, 40 << 20];

#[test]
fn write_and_read() {
    for (link, p) in pairs() {
        for len in SIZES {
            let (mut from, mut to) = (pattern(len.max(1), 1), vec![0xEE; len.max(1)]);
            let (here, there) = (register(&p.a, &mut from), register(&p.b, &mut to));
            let adverts = [advert(&p.b, there, &to[..len])];
            let iovs = [iov(here, &from[..len])];
            let done = p.a.run(&request(p.to_b, Op::Write, &iovs, &adverts), &mut NoInterrupt);
            assert_eq!(done.expect("written").bytes, len as u64, "{link} {len}");
            assert!(from[..len] == to[..len], "{link} {len}");
            let mut back = vec![0xDD; len.max(1)];
            let mine = register(&p.a, &mut back);
            let iovs = [iov(mine, &back[..len])];
            let id = p.a.post(&request(p.to_b, Op::Read, &iovs, &adverts)).expect("posted");
            assert_eq!(finish(&p.a, id).expect("read"), len as u64, "{link} {len}");
            assert!(from[..len] == back[..len], "{link} {len}");
            for mr in [here, mine] {
                p.a.deregister(mr).expect("deregistered");
            }
            p.b.deregister(there).expect("deregistered");
        }
    }
}

#[test]
fn a_transfer_that_is_tried_is_done_or_under_way() {
    for (link, p) in pairs() {
        for len in [8, 4096, 3 << 20] {
            let (mut from, mut to) = (pattern(len, 6), vec![0; len]);
            let (here, there) = (register(&p.a, &mut from), register(&p.b, &mut to));
            let (iovs, adverts) = ([iov(here, &from)], [advert(&p.b, there, &to)]);
            let write = request(p.to_b, Op::Write, &iovs, &adverts);
            let moved = match p.a.try_run(&write).expect(link) {
                TryOutcome::Done(outcome) => outcome.bytes,
                TryOutcome::Under(id) => finish(&p.a, id).expect(link),
            };
            assert_eq!(moved, len as u64, "{link}");
            assert!(from == to, "{link}");
            let outside = [Iov { len: len + 1, ..iovs[0] }];
            let wrong = request(p.to_b, Op::Write, &outside, &adverts);
            assert!(matches!(p.a.try_run(&wrong), Err(Error::OutsideRegion { .. })), "{link}");
            p.a.deregister(here).expect("unused");
            p.b.deregister(there).expect("unused");
        }
    }
}

#[test]
fn send_and_recv_either_first() {
    for (link, p) in pairs() {
        for len in SIZES {
            let (mut from, mut to) = (pattern(len.max(1), 2), vec![0xEE; len + 64]);
            let (here, there) = (register(&p.a, &mut from), register(&p.b, &mut to));
            for send_first in [true, false] {
                let sends = [iov(here, &from[..len])];
                let recvs = [iov(there, &to)];
                let send = || p.a.post(&request(p.to_b, Op::Send, &sends, &[])).expect("sent");
                let recv = || p.b.post(&request(p.to_a, Op::Recv, &recvs, &[])).expect("posted");
                let (sent, received) = if send_first {
                    let sent = send();
                    std::thread::sleep(Duration::from_millis(5));
                    (sent, recv())
                } else {
                    let received = recv();
                    (send(), received)
                };
                assert_eq!(finish(&p.b, received).expect("received"), len as u64, "{link} {len}");
                finish(&p.a, sent).expect("sent");
                assert!(to[..len] == from[..len] && to[len..] == [0xEE; 64], "{link} {len}");
                to[..len].fill(0xEE);
            }
        }
    }
}

#[test]
fn a_send_that_is_too_long_fails_on_both_sides() {
    for (link, p) in pairs() {
        for len in [100, 100_000] {
            let (mut from, mut to) = (pattern(len, 3), vec![0xEE; len]);
            let (here, there) = (register(&p.a, &mut from), register(&p.b, &mut to));
            let sends = [iov(here, &from)];
            let recvs = [iov(there, &to[..len - 1])];
            let received = p.b.post(&request(p.to_a, Op::Recv, &recvs, &[])).expect("posted");
            let sent = p.a.post(&request(p.to_b, Op::Send, &sends, &[])).expect("posted");
            for result in [finish(&p.a, sent), finish(&p.b, received)] {
                assert!(matches!(result, Err(Error::Truncated { .. })), "{link} {result:?}");
            }
            assert!(to.iter().all(|byte| *byte == 0xEE), "{link}");
        }
    }
}

#[test]
fn vectors_of_many_pieces() {
    for (link, p) in pairs() {
        let (n, piece) = (3000, 1000);
        let (mut from, mut to) = (pattern(n * piece, 4), vec![0xEE; n * piece]);
        let (here, there) = (register(&p.a, &mut from), register(&p.b, &mut to));
        // In reverse order, so that no pieces can be merged.
        let iovs: Vec<_> = from.chunks(piece).map(|chunk| iov(here, chunk)).collect();
        let adverts: Vec<_> =
            to.chunks(piece).rev().map(|chunk| advert(&p.b, there, chunk)).collect();
        let done = p.a.run(&request(p.to_b, Op::Write, &iovs, &adverts), &mut NoInterrupt);
        assert_eq!(done.expect("written").bytes, (n * piece) as u64, "{link}");
        assert!(from.chunks(piece).eq(to.chunks(piece).rev()), "{link}");
        let targets: Vec<_> = to.chunks(piece).map(|chunk| iov(there, chunk)).collect();
        let received = p.b.post(&request(p.to_a, Op::Recv, &targets, &[])).expect("posted");
        let sent = p.a.post(&request(p.to_b, Op::Send, &iovs, &[])).expect("posted");
        finish(&p.b, received).expect("received");
        finish(&p.a, sent).expect("sent");
        assert!(from == to, "{link}");
    }
}

#[test]
fn vectors_are_cut_where_a_lane_takes_no_more() {
    const COUNT: usize = 70_001;
    for (name, p) in pairs() {
        let mut source = pattern(COUNT * 4, 3);
        let mut sink = vec![0; COUNT * 4];
        let (m, n) = (register(&p.a, &mut source), register(&p.b, &mut sink));
        // Every second pair of bytes, so that no pieces are neighbours.
        let place = |memory: &[u8], i: usize| memory.as_ptr() as usize + 4 * i;
        let iovs: Vec<_> =
            (0..COUNT).map(|i| Iov { mr: m, ptr: place(&source, i), len: 2 }).collect();
        let adverts: Vec<_> =
            (0..COUNT).map(|i| p.b.advertise(n, place(&sink, i), 2).expect("inside")).collect();
        let write = request(p.to_b, Op::Write, &iovs, &adverts);
        let done = p.a.run(&write, &mut NoInterrupt).expect(name);
        assert_eq!(done.bytes, 2 * COUNT as u64, "{name}");
        for (i, (got, sent)) in sink.chunks(4).zip(source.chunks(4)).enumerate() {
            assert_eq!(got, [sent[0], sent[1], 0, 0], "{name}: piece {i}");
        }
        // Two-sided transfers have a limit of fewer pieces.
        let send = request(p.to_b, Op::Send, &iovs, &[]);
        assert!(matches!(p.a.run(&send, &mut NoInterrupt), Err(Error::Invalid(_))), "{name}");
    }
}

#[test]
fn notifications_follow_their_data() {
    for (link, p) in pairs() {
        let mut said = Vec::new();
        for (i, len) in [0, 5, 40_000, 3 << 20, 7].into_iter().enumerate() {
            let payload = pattern(len, i as u8);
            let id = p.a.send_notif(p.to_b, &payload, None).expect("posted");
            said.push((id, payload));
        }
        let (mut from, mut to) = (pattern(2 << 20, 5), vec![0; 2 << 20]);
        let (here, there) = (register(&p.a, &mut from), register(&p.b, &mut to));
        let iovs = [iov(here, &from)];
        let adverts = [advert(&p.b, there, &to)];
        let write =
            Request { notif: Some(b"landed"), ..request(p.to_b, Op::Write, &iovs, &adverts) };
        let id = p.a.post(&write).expect("posted");
        said.push((id, b"landed".to_vec()));
        let mut heard = Vec::new();
        while heard.len() < said.len() {
            let limit = Some(Duration::from_secs(20));
            let more = p.b.wait_notifs(limit, &mut NoInterrupt).expect("notified");
            assert!(!more.is_empty(), "{link}: {} of {} came", heard.len(), said.len());
            heard.extend(more);
        }
        for ((id, payload), notif) in said.iter().zip(&heard) {
            assert!(notif.payload == *payload && notif.conn == p.to_a, "{link}");
            finish(&p.a, *id).expect("answered");
        }
        assert!(from == to, "{link}");
    }
}

/// Words that signals change.
fn words<const N: usize>() -> [AtomicU64; N] {
    std::array::from_fn(|_| AtomicU64::new(0))
}

fn signal(advert: Advert, change: Change) -> Option<Signal> {
    Some(Signal { advert, change, strong: false })
}

#[test]
fn signals_follow_the_bytes_that_they_stand_for() {
    for (link, p) in pairs() {
        let limit = Some(Duration::from_secs(20));
        let of_b = words::<2>();
        let m = register_words(&p.b, &of_b);
        let word = |at: usize| advert_word(&p.b, m, &of_b[at]);
        for (round, len) in SIZES.into_iter().enumerate() {
            let round = round as u64 + 1;
            let (mut from, mut to) = (pattern(len.max(1), round as u8), vec![0xEE; len.max(1)]);
            let (here, there) = (register(&p.a, &mut from), register(&p.b, &mut to));
            let (iovs, adverts) = ([iov(here, &from[..len])], [advert(&p.b, there, &to[..len])]);
            let write = request(p.to_b, Op::Write, &iovs, &adverts);
            let set = Request { signal: signal(word(0), Change::Set(round)), ..write };
            let id = p.a.post(&set).expect("posted");
            let until = Until::AtLeast(round);
            let at = |word: &AtomicU64| word.as_ptr() as usize;
            let seen = p.b.wait_word(m, at(&of_b[0]), until, limit, &mut NoInterrupt);
            // Links may need the owner's help. Workers give it: a wait for a word drives no link.
            assert_eq!(seen.expect(link), round, "{link} {len}");
            assert!(from[..len] == to[..len], "{link} {len}: a signal before its bytes");
            finish(&p.a, id).expect("written");
            to.fill(0xEE);
            let add = Request { signal: signal(word(1), Change::Add(10)), ..write };
            p.a.run(&add, &mut NoInterrupt).expect("written");
            assert_eq!(of_b[1].load(Acquire), 10 * round, "{link} {len}: done, and not visible");
            assert!(from[..len] == to[..len], "{link} {len}");
            for (ep, mr) in [(&p.a, here), (&p.b, there)] {
                ep.deregister(mr).expect("unused");
            }
        }
        p.b.deregister(m).expect("unused");
    }
}

#[test]
fn a_signal_needs_no_bytes_and_comes_before_the_notification() {
    for (link, p) in pairs() {
        let of_b = words::<1>();
        let m = register_words(&p.b, &of_b);
        let signal = signal(advert_word(&p.b, m, &of_b[0]), Change::Add(u64::MAX));
        let none = Request { signal, ..request(p.to_b, Op::Write, &[], &[]) };
        let done = p.a.run(&none, &mut NoInterrupt).expect(link);
        assert_eq!((done.bytes, of_b[0].load(Acquire)), (0, u64::MAX), "{link}");
        let notified = Request { notif: Some(b"signalled"), ..none };
        let id = p.a.post(&notified).expect("posted");
        let limit = Some(Duration::from_secs(20));
        let heard = p.b.wait_notifs(limit, &mut NoInterrupt).expect("notified");
        assert_eq!(of_b[0].load(Acquire), u64::MAX - 1, "{link}");
        assert_eq!(heard[0].payload, b"signalled", "{link}");
        finish(&p.a, id).expect("done");
        p.b.deregister(m).expect("unused");
    }
}

#[test]
fn nothing_is_signalled_that_is_not_there_or_not_allowed() {
    for (link, p) in pairs() {
        let of_b = words::<2>();
        let m = register_words(&p.b, &of_b);
        let good = advert_word(&p.b, m, &of_b[0]);
        for len in [64, 100_000] {
            let (mut from, mut to) = (pattern(len, 7), vec![0xEE; len]);
            let (here, there) = (register(&p.a, &mut from), register(&p.b, &mut to));
            let (iovs, bytes) = ([iov(here, &from)], advert(&p.b, there, &to));
            let write = |bytes: Advert, word: Advert| {
                let adverts = [bytes];
                let write = request(p.to_b, Op::Write, &iovs, &adverts);
                let signal = signal(word, Change::Add(1));
                p.a.run(&Request { signal, ..write }, &mut NoInterrupt)
            };
            let forged = |advert: Advert| Advert { key: advert.key ^ 1, ..advert };
            let refused = write(forged(bytes), good);
            assert!(matches!(refused, Err(Error::RemoteAccess { .. })), "{link} {refused:?}");
            let refused = write(bytes, forged(good));
            assert!(matches!(refused, Err(Error::RemoteAccess { .. })), "{link} {refused:?}");
            let beyond = Advert { addr: good.addr + 16, ..good };
            let refused = write(bytes, beyond);
            assert!(matches!(refused, Err(Error::RemoteAccess { .. })), "{link} {refused:?}");
            for wrong in [Advert { addr: good.addr + 4, ..good }, Advert { len: 7, ..good }] {
                let refused = write(bytes, wrong);
                assert!(matches!(refused, Err(Error::Invalid(_))), "{link} {refused:?}");
            }
            let foreign = Advert { instance: good.instance ^ 1, ..good };
            assert!(matches!(write(bytes, foreign), Err(Error::ForeignAdvert { .. })), "{link}");
            for (ep, mr) in [(&p.a, here), (&p.b, there)] {
                ep.deregister(mr).expect("unused");
            }
        }
        let read = request(p.to_b, Op::Read, &[], &[]);
        let read = Request { signal: signal(good, Change::Add(1)), ..read };
        assert!(matches!(p.a.run(&read, &mut NoInterrupt), Err(Error::Invalid(_))), "{link}");
        p.b.deregister(m).expect("unused");
        let revoked = Request { op: Op::Write, ..read };
        let revoked = p.a.run(&revoked, &mut NoInterrupt);
        assert!(matches!(revoked, Err(Error::RemoteAccess { .. })), "{link} {revoked:?}");
        assert!(of_b.iter().all(|word| word.load(Acquire) == 0), "{link}");
    }
}

/// Each round posts long writes of a context, and a write with a strong signal that stands for all
/// of them.
#[test]
fn strong_signals_stand_for_all_of_their_context() {
    for (link, p) in pairs() {
        let limit = Some(Duration::from_secs(20));
        let of_b = words::<1>();
        let m = register_words(&p.b, &of_b);
        let (mut from, mut to) = (pattern(6 << 20, 9), vec![0; 6 << 20]);
        let (here, there) = (register(&p.a, &mut from), register(&p.b, &mut to));
        let signal = Some(Signal {
            advert: advert_word(&p.b, m, &of_b[0]),
            change: Change::Add(1),
            strong: true,
        });
        for round in 1..=8 {
            let mut ids = Vec::new();
            for (from, to) in from.chunks(1 << 20).zip(to.chunks(1 << 20)) {
                let (iovs, adverts) = ([iov(here, from)], [advert(&p.b, there, to)]);
                let write = request(p.to_b, Op::Write, &iovs, &adverts);
                ids.push(p.a.post(&Request { context: 5, ..write }).expect("posted"));
            }
            let none = Request { signal, context: 5, ..request(p.to_b, Op::Write, &[], &[]) };
            ids.push(p.a.post(&none).expect("posted"));
            let (at, until) = (of_b[0].as_ptr() as usize, Until::Equals(round));
            p.b.wait_word(m, at, until, limit, &mut NoInterrupt).expect(link);
            assert!(from == to, "{link}: a strong signal before a write of its context");
            for id in ids {
                finish(&p.a, id).expect("done");
            }
            to.fill(0);
        }
        // After a write that fails, no signal of its context is sent. Another context is not
        // affected.
        let forged = advert(&p.b, there, &to);
        let forged = [Advert { key: forged.key ^ 1, ..forged }];
        let iovs = [iov(here, &from)];
        let failing = Request { context: 5, ..request(p.to_b, Op::Write, &iovs, &forged) };
        let failing = p.a.post(&failing);
        let none = Request { signal, context: 5, ..request(p.to_b, Op::Write, &[], &[]) };
        let signalled = p.a.post(&none).and_then(|id| finish(&p.a, id));
        assert!(matches!(signalled, Err(Error::ContextFailed { context: 5 })), "{link}");
        assert!(failing.and_then(|id| finish(&p.a, id)).is_err(), "{link}");
        let signalled = p.a.run(&none, &mut NoInterrupt);
        assert!(matches!(signalled, Err(Error::ContextFailed { context: 5 })), "{link}");
        assert_eq!(of_b[0].load(Acquire), 8, "{link}");
        p.a.run(&Request { context: 6, ..none }, &mut NoInterrupt).expect(link);
        assert_eq!(of_b[0].load(Acquire), 9, "{link}");
        for (ep, mr) in [(&p.a, here), (&p.b, there), (&p.b, m)] {
            ep.deregister(mr).expect("unused");
        }
    }
}

#[test]
fn signals_of_several_threads_add_up() {
    const EACH: u64 = 300;
    for (link, p) in pairs() {
        let of_b = words::<1>();
        let m = register_words(&p.b, &of_b);
        let signal = signal(advert_word(&p.b, m, &of_b[0]), Change::Add(1));
        let (mut from, mut to) = (pattern(4096, 1), vec![0; 4096]);
        let (here, there) = (register(&p.a, &mut from), register(&p.b, &mut to));
        let (iovs, adverts) = ([iov(here, &from)], [advert(&p.b, there, &to)]);
        let write = Request { signal, ..request(p.to_b, Op::Write, &iovs, &adverts) };
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..EACH {
                        p.a.run(&write, &mut NoInterrupt).expect(link);
                    }
                });
            }
        });
        assert_eq!(of_b[0].load(Acquire), 3 * EACH, "{link}");
        for (ep, mr) in [(&p.a, here), (&p.b, there), (&p.b, m)] {
            ep.deregister(mr).expect("unused");
        }
    }
}

/// The number of strong signals that all threads together post over each link; `UCCL_TEST_SIGNALS`
/// sets it.
fn strong_signals() -> usize {
    std::env::var("UCCL_TEST_SIGNALS").map_or(960, |count| count.parse().expect("a number"))
}

#[test]
fn strong_signals_of_two_threads_do_not_wait_for_each_other() {
    strong_signals_of(2);
}

#[test]
fn strong_signals_of_eight_threads_do_not_wait_for_each_other() {
    strong_signals_of(8);
}

#[test]
fn strong_signals_of_many_threads_do_not_wait_for_each_other() {
    strong_signals_of(32);
}

/// Runs over every link, in one context and in several.
fn strong_signals_of(threads: usize) {
    for contexts in [1, threads.min(4)] {
        for (link, p) in pairs() {
            let begun = std::time::Instant::now();
            let posted = strong_signals_in(link, &p, threads, contexts.min(threads));
            let took = begun.elapsed();
            println!(
                "{link}: {posted} strong signals of {threads} threads, contexts: {contexts}, {took:.1?}"
            );
        }
    }
}

/// The number of rounds that a thread of [`strong_signals_in`] may have in flight.
const AHEAD: usize = 6;
/// The number of places for a thread's bytes. A place is rewritten only after a later round than
/// its own has ended.
const PLACES: usize = 2 * AHEAD;

/// The words of one thread at the owner.
struct WordChanges<'a> {
    bytes: &'a [AtomicU64],
    /// Two words that are set to the round, one after the other.
    set: &'a [AtomicU64],
}

impl<'a> WordChanges<'a> {
    /// The number of words of a thread.
    const LEN: usize = PLACES + 2;

    fn of(words: &'a [AtomicU64]) -> Self {
        let (bytes, set) = words.split_at(PLACES);
        Self { bytes, set }
    }

    /// Returns the round of the first signal. Checks that the second signal and the bytes agree.
    fn look(&self, link: &str) -> u64 {
        let second = self.set[1].load(Acquire);
        let first = self.set[0].load(Acquire);
        assert!(first >= second, "{link}: the second signal of round {second} came first");
        let bytes = self.bytes[first as usize % PLACES].load(Acquire);
        let is_whole = self.set[0].load(Acquire) == first;
        assert!(bytes >= first || !is_whole, "{link}: signal {first} came before its bytes");
        first
    }
}

/// Each thread writes bytes, and then posts three strong signals without a wait: two set words of
/// its own, one adds to the word of its context. The owner checks their order. Returns the number
/// of signals.
fn strong_signals_in(link: &str, p: &Pair, threads: usize, contexts: usize) -> u64 {
    let rounds = strong_signals().div_ceil(3 * threads) as u64;
    let words = |count| (0..count).map(|_| AtomicU64::new(0)).collect::<Vec<_>>();
    let (of_a, of_b) = (words(threads * PLACES), words(threads * WordChanges::LEN + contexts));
    let (here, there) = (register_words(&p.a, &of_a), register_words(&p.b, &of_b));
    let (sums, of_threads) = of_b.split_at(contexts);
    let changed: Vec<_> = of_threads.chunks(WordChanges::LEN).map(WordChanges::of).collect();
    let one_thread = |thread: usize| {
        let context = (thread % contexts) as u32;
        let WordChanges { bytes, set } = &changed[thread];
        let post = |iovs: &[Iov], adverts: &[Advert], signal| {
            let write = request(p.to_b, Op::Write, iovs, adverts);
            p.a.post_held(&Request { context, signal, ..write }).expect(link)
        };
        let signal = |word, change| {
            let advert = advert_word(&p.b, there, word);
            post(&[], &[], Some(Signal { advert, change, strong: true }))
        };
        // Waits on handles: more transfers may end meanwhile than the endpoint keeps results of.
        let finish = |transfer: TransferHandle| {
            let status = transfer.wait(None, &mut NoInterrupt).expect(link);
            assert!(matches!(status, Status::Done(_)), "{link}: {status:?}");
        };
        let mut under_way: VecDeque<[_; 4]> = VecDeque::new();
        for round in 1..=rounds {
            if under_way.len() == AHEAD {
                under_way.pop_front().into_iter().flatten().for_each(finish);
            }
            let at = round as usize % PLACES;
            let from = &of_a[thread * PLACES + at];
            from.store(round, Release);
            let iov = Iov { mr: here, ptr: from.as_ptr() as usize, len: 8 };
            under_way.push_back([
                post(&[iov], &[advert_word(&p.b, there, &bytes[at])], None),
                signal(&set[0], Change::Set(round)),
                signal(&set[1], Change::Set(round)),
                signal(&sums[thread % contexts], Change::Add(1)),
            ]);
        }
        under_way.into_iter().flatten().for_each(finish);
    };
    let is_over = AtomicBool::new(false);
    let watch = || {
        let mut seen = vec![0; threads];
        while !is_over.load(Acquire) {
            for (seen, changed) in seen.iter_mut().zip(&changed) {
                let first = changed.look(link);
                assert!(first >= *seen, "{link}: signal {first} came after signal {seen}");
                *seen = first;
            }
            std::thread::yield_now();
        }
    };
    std::thread::scope(|scope| {
        let one_thread = &one_thread;
        let watch = scope.spawn(watch);
        let at_work: Vec<_> =
            (0..threads).map(|thread| scope.spawn(move || one_thread(thread))).collect();
        let ended: Vec<_> = at_work.into_iter().map(|thread| thread.join()).collect();
        is_over.store(true, Release);
        watch.join().expect("all in order");
        ended.into_iter().for_each(|ended| ended.expect("every signal ends well"));
    });
    for changed in &changed {
        assert_eq!((changed.look(link), changed.set[1].load(Acquire)), (rounds, rounds), "{link}");
    }
    let sum: u64 = sums.iter().map(|sum| sum.load(Acquire)).sum();
    assert_eq!(sum, rounds * threads as u64, "{link}: each is applied once");
    for (ep, mr) in [(&p.a, here), (&p.b, there)] {
        ep.deregister(mr).expect("unused");
    }
    3 * sum
}

#[test]
fn a_word_that_does_not_change_is_waited_for_as_long_as_was_said() {
    for (link, p) in pairs().into_iter().take(1) {
        let of_b = words::<2>();
        let m = register_words(&p.b, &of_b);
        let at = of_b[0].as_ptr() as usize;
        let soon = Some(Duration::from_millis(30));
        let wait = |at, until| p.b.wait_word(m, at, until, soon, &mut NoInterrupt);
        assert!(matches!(wait(at, Until::AtLeast(1)), Err(Error::Timeout(_))), "{link}");
        assert_eq!(wait(at, Until::Equals(0)).expect("it is"), 0, "{link}");
        assert!(matches!(wait(at + 4, Until::Equals(0)), Err(Error::Invalid(_))), "{link}");
        assert!(matches!(wait(at + 16, Until::Equals(0)), Err(Error::OutsideRegion { .. })));
        p.b.deregister(m).expect("unused");
    }
}

#[test]
fn nobody_is_notified_of_data_that_was_refused() {
    for (link, p) in pairs() {
        for len in [64, 100_000] {
            let (mut from, mut to) = (pattern(len, 7), vec![0xEE; len]);
            let (here, there) = (register(&p.a, &mut from), register(&p.b, &mut to));
            let (iovs, good) = ([iov(here, &from)], advert(&p.b, there, &to));
            let write = |advert: Advert, notif| {
                let adverts = [advert];
                let write = request(p.to_b, Op::Write, &iovs, &adverts);
                p.a.run(&Request { notif: Some(notif), ..write }, &mut NoInterrupt)
            };
            let refused = write(Advert { key: good.key ^ 1, ..good }, b"refused");
            assert!(matches!(refused, Err(Error::RemoteAccess { .. })), "{link} {refused:?}");
            write(good, b"landed").expect("written");
            // A notification of the refused write would have come first.
            let limit = Some(Duration::from_secs(20));
            let heard = p.b.wait_notifs(limit, &mut NoInterrupt).expect("notified");
            let heard: Vec<_> = heard.into_iter().map(|notif| notif.payload).collect();
            assert_eq!(heard, [b"landed"], "{link} {len}");
            p.a.deregister(here).expect("unused");
            p.b.deregister(there).expect("unused");
        }
    }
}

#[test]
fn a_send_of_more_or_fewer_iovs_than_its_receive_has_fails_on_both_sides() {
    for (link, p) in pairs() {
        for piece in [30, 50_000] {
            let (mut from, mut to) = (pattern(3 * piece, 8), vec![0xEE; 3 * piece]);
            let (here, there) = (register(&p.a, &mut from), register(&p.b, &mut to));
            for (sent, received) in [(2, 3), (3, 2)] {
                let sends: Vec<_> =
                    from.chunks(piece).take(sent).map(|chunk| iov(here, chunk)).collect();
                let recvs: Vec<_> =
                    to.chunks(piece).take(received).map(|chunk| iov(there, chunk)).collect();
                let received = p.b.post(&request(p.to_a, Op::Recv, &recvs, &[])).expect("posted");
                let sent = p.a.post(&request(p.to_b, Op::Send, &sends, &[])).expect("posted");
                let (sent, received) = (finish(&p.a, sent), finish(&p.b, received));
                assert!(matches!(received, Err(Error::Invalid(_))), "{link} {received:?}");
                assert!(matches!(sent, Err(Error::RemoteAccess { .. })), "{link} {sent:?}");
            }
            assert!(to.iter().all(|byte| *byte == 0xEE), "{link}");
        }
    }
}

#[test]
fn the_owner_refuses() {
    for (link, p) in pairs() {
        let (mut from, mut to) = (pattern(9000, 6), vec![0xEE; 9000]);
        let (here, there) = (register(&p.a, &mut from), register(&p.b, &mut to));
        let good = advert(&p.b, there, &to);
        let write = |advert: Advert| {
            p.a.run(&request(p.to_b, Op::Write, &[iov(here, &from)], &[advert]), &mut NoInterrupt)
        };
        let forged = Advert { key: good.key ^ 1, ..good };
        let beyond = Advert { addr: good.addr + 1, ..good };
        for bad in [forged, beyond] {
            let refused = write(bad);
            assert!(matches!(refused, Err(Error::RemoteAccess { .. })), "{link} {refused:?}");
        }
        let short = Advert { len: 8999, ..good };
        assert!(matches!(write(short), Err(Error::OutsideAdvert { .. })), "{link}");
        let foreign = Advert { instance: good.instance ^ 1, ..good };
        assert!(matches!(write(foreign), Err(Error::ForeignAdvert { .. })), "{link}");
        assert!(to.iter().all(|byte| *byte == 0xEE), "{link}");
        write(good).expect("written");
        p.b.deregister(there).expect("deregistered");
        to.fill(0xEE);
        let revoked = write(good);
        assert!(matches!(revoked, Err(Error::RemoteAccess { .. })), "{link} {revoked:?}");
        assert!(to.iter().all(|byte| *byte == 0xEE), "{link}");
    }
}

#[test]
fn an_advert_reaches_the_region_that_it_was_made_of_and_no_other() {
    for (link, p) in pairs() {
        let (mut from, mut to) = (pattern(9000, 8), vec![0xEE; 9000]);
        let here = register(&p.a, &mut from);
        let (all, part) = (register(&p.b, &mut to), register(&p.b, &mut to[3000..6000]));
        let write = |advert: Advert| {
            let iovs = [iov(here, &from[..advert.len as usize])];
            p.a.run(&request(p.to_b, Op::Write, &iovs, &[advert]), &mut NoInterrupt)
        };
        let refused = |advert: Advert| {
            let refused = write(advert);
            assert!(matches!(refused, Err(Error::RemoteAccess { .. })), "{link} {refused:?}");
        };
        let of_part = advert(&p.b, part, &to[3000..6000]);
        let whole = advert(&p.b, all, &to);
        // All of these bytes are registered, but only a part of them under the presented key.
        refused(Advert { len: 3001, ..of_part });
        refused(Advert { addr: of_part.addr - 1, ..of_part });
        refused(Advert { addr: whole.addr, ..of_part });
        assert!(to.iter().all(|byte| *byte == 0xEE), "{link}");
        write(of_part).expect(link);
        assert!(to[3000..6000] == from[..3000], "{link}");
        // The same bytes of the surrounding region; its key is valid for all of it.
        let inner = advert(&p.b, all, &to[3000..6000]);
        assert_eq!((inner.key, inner.slot), (whole.key, whole.slot));
        write(Advert { addr: whole.addr, len: 9000, ..inner }).expect(link);
        assert!(to == from, "{link}");
        refused(Advert { addr: whole.addr, len: 9000, ..of_part });
        // Each region ends by itself.
        p.b.deregister(part).expect("unused");
        refused(of_part);
        write(inner).expect(link);
    }
}

#[test]
fn cancel_and_deadline_end_a_transfer_that_would_never_end() {
    for (link, p) in pairs() {
        let mut memory = vec![0xEE; 1 << 20];
        let mr = register(&p.a, &mut memory);
        let iovs = [iov(mr, &memory)];
        for op in [Op::Recv, Op::Send] {
            let id = p.a.post(&request(p.to_b, op, &iovs, &[])).expect("posted");
            let ended = p.a.cancel(id).expect("known");
            assert!(matches!(ended, Status::Failed(Error::Cancelled { .. })), "{link} {ended:?}");
            let again = p.a.poll(id).expect("known");
            assert!(matches!(again, Status::Failed(Error::Cancelled { .. })), "{link}");
            let soon = Request {
                timeout: Some(Duration::from_millis(100)),
                ..request(p.to_b, op, &iovs, &[])
            };
            // First without a wait: a call that never returns would not report anything.
            let id = p.a.post(&soon).expect("posted");
            let late = ended_by_itself(&p.a, id);
            let exceeded = matches!(late, Status::Failed(Error::DeadlineExceeded { .. }));
            assert!(exceeded, "{link} {late:?}");
            let late = p.a.run(&soon, &mut NoInterrupt);
            assert!(matches!(late, Err(Error::DeadlineExceeded { .. })), "{link} {late:?}");
        }
        p.a.check_connection(p.to_b).expect("the connection lives");
        p.a.deregister(mr).expect("nothing uses it any more");
    }
}

/// Polls a transfer until it ends. The peer's message that it has released the memory may get lost,
/// and be sent once more.
fn ended_by_itself(ep: &Endpoint, id: TransferId) -> Status {
    for _ in 0..100 {
        std::thread::sleep(Duration::from_millis(200));
        let status = ep.poll(id).expect("known");
        if !matches!(status, Status::Pending) {
            return status;
        }
    }
    Status::Pending
}

#[test]
fn transfers_that_use_a_region_are_ended_and_no_others() {
    for (link, p) in pairs() {
        let (mut one, mut other) = (vec![0; 4096], vec![0; 4096]);
        let (mine, others) = (register(&p.a, &mut one), register(&p.a, &mut other));
        let post = |iovs: &[Iov]| p.a.post(&request(p.to_b, Op::Recv, iovs, &[])).expect("posted");
        let first = post(&[iov(mine, &one)]);
        let both = post(&[iov(others, &other[..8]), iov(mine, &one)]);
        let spared = post(&[iov(others, &other)]);
        assert!(p.a.deregister(mine).is_err(), "{link}: it is used");
        assert_eq!(p.a.cancel_all_using(mine).expect("known"), 2, "{link}");
        p.a.deregister(mine).expect("nothing uses it any more");
        for id in [first, both] {
            let ended = p.a.poll(id).expect("known");
            assert!(matches!(ended, Status::Failed(Error::Cancelled { .. })), "{link} {ended:?}");
        }
        assert!(matches!(p.a.poll(spared), Ok(Status::Pending)), "{link}");
    }
}

#[test]
fn closing_ends_the_peers_transfers() {
    for (link, p) in pairs() {
        let mut memory = vec![0; 4096];
        let mr = register(&p.a, &mut memory);
        let id = p.a.post(&request(p.to_b, Op::Recv, &[iov(mr, &memory)], &[])).expect("posted");
        p.b.close().expect("closed");
        let lost = finish(&p.a, id);
        assert!(matches!(lost, Err(Error::ConnectionLost { .. })), "{link} {lost:?}");
        let refused = p.a.check_connection(p.to_b);
        assert!(matches!(refused, Err(Error::ConnectionLost { .. })), "{link}");
    }
}
