//! Transfers arrive whole, and in their place only.

use std::time::Instant;

use uccl_fabric::{
    lane::OpKind::{self, Read, Write},
    rail::{Rail, Request},
};
use uccl_verbs::VerbsSettings;
use uccl_wire::verbs::VerbsAddress;

use crate::support::{Cable, Memory, Pair, Rails, all_kinds_of_channels, request};

/// Lengths around those of inline data, a packet and a chunk.
const LENGTHS: &[usize] = &[
    0,
    1,
    8,
    127,
    128,
    129,
    219,
    220,
    221,
    4095,
    4096,
    4097,
    65536,
    65537,
    1 << 20,
    (1 << 20) + 3,
];

/// Cuts a transfer into requests as a lane does.
fn in_chunks(
    kind: OpKind,
    pair: &mut Pair,
    sides: (&Memory, &Memory),
    range: std::ops::Range<usize>,
) -> Vec<Request> {
    let chunk = pair.a.limits().chunk_bytes as usize;
    let starts: Vec<_> = range.clone().step_by(chunk).collect();
    let cut = |(tag, start): (usize, usize)| {
        let end = (start + chunk).min(range.end);
        request(kind, pair.a.as_mut(), sides, start..end, tag as u64)
    };
    match starts.len() {
        0 => vec![request(kind, pair.a.as_mut(), sides, range, 0)],
        _ => starts.into_iter().enumerate().map(cut).collect(),
    }
}

/// A length that takes a while.
const MUCH: usize = 64 << 20;

fn moves_exactly(rails: &Rails, pair: &mut Pair, kind: OpKind, len: usize) {
    const EDGE: usize = 64;
    let (mut from, mut to) = (&rails.a, &rails.b);
    if kind == Read {
        (from, to) = (to, from);
    }
    let source = Memory::random(from, len + 2 * EDGE, len as u64);
    let target = Memory::zeros(to, len + 2 * EDGE);
    let sides = if kind == Read { (&target, &source) } else { (&source, &target) };
    let requests = in_chunks(kind, pair, sides, EDGE..EDGE + len);
    pair.run_well(&requests);
    let arrived = &target.bytes[EDGE..EDGE + len];
    assert!(arrived == &source.bytes[EDGE..EDGE + len], "{kind:?} of {len} bytes arrived wrong");
    let edges = target.bytes[..EDGE].iter().chain(&target.bytes[EDGE + len..]);
    assert!(edges.copied().all(|byte| byte == 0), "{kind:?} of {len} bytes went past its range");
}

#[test]
fn all_lengths_arrive() {
    for (name, settings) in all_kinds_of_channels() {
        let Some(rails) = Rails::open(Cable::Shared, &settings) else { return };
        let mut pair = rails.joined();
        for &len in LENGTHS {
            for kind in [Write, Read] {
                moves_exactly(&rails, &mut pair, kind, len);
            }
        }
        eprintln!("{name}: {} lengths", LENGTHS.len());
    }
}

#[test]
fn much_arrives() {
    for (name, settings) in all_kinds_of_channels() {
        let Some(rails) = Rails::open(Cable::Shared, &settings) else { return };
        let mut pair = rails.joined();
        for kind in [Write, Read] {
            let began = Instant::now();
            moves_exactly(&rails, &mut pair, kind, MUCH);
            eprintln!(
                "{name}: {kind:?} of {MUCH} bytes and what is around it: {:?}",
                began.elapsed()
            );
        }
    }
}

#[test]
fn uc_is_used_where_it_is_asked_for() {
    for (name, settings) in all_kinds_of_channels() {
        let Some(rails) = Rails::open(Cable::Shared, &settings) else { return };
        let channel = rails.a.open().expect("a channel");
        let address = VerbsAddress::decode(channel.address()).expect("an address");
        let pairs = usize::from(settings.queue_pairs.expect("a number"));
        assert_eq!(address.reliable.len(), pairs, "{name}");
        assert_eq!(address.unreliable.len(), if settings.rc_mode { 0 } else { pairs }, "{name}");
    }
    let settings = VerbsSettings { rc_mode: false, ..VerbsSettings::default() };
    let Some(rails) = Rails::open(Cable::Shared, &settings) else { return };
    let mut pair = rails.joined();
    assert_eq!(pair.a.wake_in(Instant::now()), None);
    let (ours, theirs) = (Memory::random(&rails.a, 4096, 1), Memory::zeros(&rails.b, 4096));
    let write = request(Write, pair.a.as_mut(), (&ours, &theirs), 0..4096, 1);
    // SAFETY: the memory is kept until it has ended.
    assert_eq!(unsafe { pair.a.post(&[write]) }.expect("posted"), 1);
    assert!(pair.a.wake_in(Instant::now()).is_some(), "an acknowledgement is waited for");
    let mut ended = Vec::new();
    while ended.is_empty() {
        pair.a.poll(&mut ended).expect("it lives");
        pair.b.poll(&mut Vec::new()).expect("it lives");
        std::thread::yield_now();
    }
    assert!(ours.bytes == theirs.bytes);
}

/// Writes go over reliable queue pairs where the peer has no unreliable ones.
#[test]
fn ends_that_disagree_about_uc_work() {
    let uc = VerbsSettings { rc_mode: false, ..VerbsSettings::default() };
    let Some(reliable) = Rails::shared() else { return };
    let Some(unreliable) = Rails::open(Cable::Shared, &uc) else { return };
    for rails in
        [Rails { a: reliable.a, b: unreliable.b }, Rails { a: unreliable.a, b: reliable.b }]
    {
        let mut pair = rails.joined();
        moves_exactly(&rails, &mut pair, Write, 300_000);
        moves_exactly(&rails, &mut pair, Read, 300_000);
    }
}

#[test]
fn many_short_requests_arrive() {
    for (name, settings) in all_kinds_of_channels() {
        let Some(rails) = Rails::open(Cable::Shared, &settings) else { return };
        let mut pair = rails.joined();
        let mut ours = Memory::random(&rails.a, 1000 * 64, 1);
        let theirs = Memory::zeros(&rails.b, 1000 * 64);
        let sent = ours.bytes.clone();
        for kind in [Write, Read] {
            // Of 0 to 63 bytes, with holes between them.
            let requests: Vec<_> = (0..1000)
                .map(|index| {
                    let range = index * 64..index * 64 + index % 64;
                    request(kind, pair.a.as_mut(), (&ours, &theirs), range, index as u64)
                })
                .collect();
            pair.run_well(&requests);
            let come = if kind == Write { &theirs } else { &ours };
            for index in 0..1000 {
                let (start, len) = (index * 64, index % 64);
                let (piece, hole) = come.bytes[start..start + 64].split_at(len);
                let what = format!("{name}: {kind:?} {index}");
                assert!(piece == &sent[start..start + len], "{what}: {piece:02x?}");
                assert!(hole.iter().all(|&byte| byte == 0), "{what}, beyond it: {hole:02x?}");
            }
            // The next reads must bring these bytes back.
            ours.bytes.fill(0);
        }
    }
}

#[test]
fn short_pieces_in_two_pages_arrive() {
    const PAGE: usize = 4096;
    let Some(rails) = Rails::shared() else { return };
    let mut pair = rails.joined();
    let mut ours = Memory::random(&rails.a, 3 * PAGE, 1);
    let mut theirs = Memory::random(&rails.b, 3 * PAGE, 2);
    for kind in [Write, Read] {
        let source = if kind == Write { &ours } else { &theirs };
        let page = PAGE + source.bytes.as_ptr().align_offset(PAGE);
        for len in 2..=65 {
            for before in [1, len / 2, len - 1] {
                let range = page - before..page - before + len;
                let target = if kind == Write { &mut theirs } else { &mut ours };
                target.bytes.fill(0);
                fastrand::Rng::with_seed(len as u64).fill(match kind {
                    Write => &mut ours.bytes,
                    Read => &mut theirs.bytes,
                });
                // The request before it keeps the device from sending the piece while it is posted.
                let requests = [0..PAGE / 2, range.clone()].map(|range| {
                    request(
                        kind,
                        pair.a.as_mut(),
                        (&ours, &theirs),
                        range.clone(),
                        range.start as u64,
                    )
                });
                pair.run_well(&requests);
                let moved = ours.bytes[range.clone()] == theirs.bytes[range];
                assert!(moved, "{kind:?} of {len} bytes, {before} of them before a page");
            }
        }
    }
}

/// A full channel takes no more requests; it takes the rest once there is room.
#[test]
fn a_full_channel_takes_no_more() {
    let settings = VerbsSettings { queue_pairs: Some(2), depth: 32, ..VerbsSettings::default() };
    let Some(rails) = Rails::open(Cable::Shared, &settings) else { return };
    let mut pair = rails.joined();
    assert_eq!(pair.a.limits().depth, 32);
    let ours = Memory::random(&rails.a, 4 << 20, 2);
    let theirs = Memory::zeros(&rails.b, 4 << 20);
    let requests: Vec<_> = (0..1024)
        .map(|index| {
            let range = index * 4096..(index + 1) * 4096;
            request(Write, pair.a.as_mut(), (&ours, &theirs), range, index as u64)
        })
        .collect();
    // SAFETY: the memory is kept until all has ended.
    let posted = unsafe { pair.a.post(&requests) }.expect("posted");
    assert_eq!(posted, 32);
    // SAFETY: as above.
    let more = unsafe { pair.a.post(&requests[posted..]) }.expect("nothing is wrong");
    assert_eq!(more, 0);
    let mut ended = Vec::new();
    pair.a.probe(5000).expect("it waits for room");
    while ended.len() < 33 {
        pair.a.poll(&mut ended).expect("it lives");
        pair.b.poll(&mut Vec::new()).expect("it lives");
        std::thread::yield_now();
    }
    assert!(ended.iter().any(|ended| ended.tag == 5000), "the probe ended");
    pair.run_well(&requests[posted..]);
    assert!(theirs.bytes == ours.bytes);
}

#[test]
fn both_ends_may_write_at_once_and_probe() {
    let Some(rails) = Rails::shared() else { return };
    let mut pair = rails.joined();
    let (a, b) = (Memory::random(&rails.a, 1 << 20, 3), Memory::zeros(&rails.b, 1 << 20));
    let (c, d) = (Memory::zeros(&rails.a, 1 << 20), Memory::random(&rails.b, 1 << 20, 4));
    let back = request(Write, pair.b.as_mut(), (&d, &c), 0..1 << 20, 9);
    // SAFETY: the memory is kept until all has ended.
    assert_eq!(unsafe { pair.b.post(&[back]) }.expect("posted"), 1);
    let there = request(Write, pair.a.as_mut(), (&a, &b), 0..1 << 20, 8);
    // SAFETY: as above.
    assert_eq!(unsafe { pair.a.post(&[there]) }.expect("posted"), 1);
    let (mut of_a, mut of_b) = (Vec::new(), Vec::new());
    while of_a.is_empty() || of_b.is_empty() {
        pair.a.poll(&mut of_a).expect("it lives");
        pair.b.poll(&mut of_b).expect("it lives");
        std::thread::yield_now();
    }
    assert_eq!((of_a[0].tag, of_b[0].tag), (8, 9));
    assert!(a.bytes == b.bytes && c.bytes == d.bytes);
    pair.probes().expect("the way works");
}

/// The end with fewer queue pairs decides how many are joined.
#[test]
fn ends_with_other_numbers_of_queue_pairs_work() {
    let settings = |count| VerbsSettings { queue_pairs: Some(count), ..VerbsSettings::default() };
    let Some(one) = Rails::open(Cable::Shared, &settings(1)) else { return };
    let Some(four) = Rails::open(Cable::Shared, &settings(4)) else { return };
    for rails in [Rails { a: one.a, b: four.b }, Rails { a: four.a, b: one.b }] {
        let mut pair = rails.joined();
        moves_exactly(&rails, &mut pair, Write, 300_000);
        moves_exactly(&rails, &mut pair, Read, 300_000);
        assert!(rails.a.is_up() && rails.b.is_up());
    }
}
