//! Bytes arrive, of any length, in both directions, one by one and in batches.

use uccl_fabric::{lane::OpKind, mem::Span, rail::Request};

use crate::pair::{Memory, Pair, for_each_provider, open, pattern};

const LENGTHS: &[usize] = &[0, 1, 3, 64, 4095, 4096, 65_537, 1 << 20, (16 << 20) + 1, 64 << 20];

for_each_provider!(
    writes_of_any_length_arrive,
    reads_of_any_length_arrive,
    many_small_ones_arrive,
    both_directions_at_once,
    probes_end,
    a_request_that_is_too_long_fails_alone,
);

fn writes_of_any_length_arrive(provider: &str) {
    any_length(provider, OpKind::Write);
}

fn reads_of_any_length_arrive(provider: &str) {
    any_length(provider, OpKind::Read);
}

fn any_length(provider: &str, kind: OpKind) {
    let Some(rail) = open(provider) else { return };
    let mut pair = Pair::new(&rail);
    let max = pair.a.channel.limits().max_bytes;
    for len in LENGTHS.iter().copied().filter(|len| *len as u64 <= max) {
        let (source, target) =
            (Memory::new(&rail, len + 2, pattern), Memory::new(&rail, len + 2, |_| 0));
        let (ours, theirs) =
            if kind == OpKind::Write { (&source, &target) } else { (&target, &source) };
        let request = pair.request(kind, ours, theirs);
        // All but the first and the last byte, which must stay.
        let local = ours.span(1, len);
        let request = Request { local, remote_addr: request.remote_addr + 1, ..request };
        pair.run(&[request]).expect("it goes");
        let ended = pair.a.ended.pop().expect("one");
        assert_eq!((ended.tag, ended.result), (1, Ok(())), "{len} bytes");
        assert!(target.bytes[1..=len] == source.bytes[1..=len], "{len} bytes arrived as others");
        assert_eq!((target.bytes[0], target.bytes[len + 1]), (0, 0), "{len} bytes went too far");
    }
}

fn many_small_ones_arrive(provider: &str) {
    let Some(rail) = open(provider) else { return };
    let mut pair = Pair::new(&rail);
    let (count, len) = (1000, 100);
    let ours = Memory::new(&rail, count * len, pattern);
    let theirs = Memory::new(&rail, count * len, |_| 0);
    let one = pair.request(OpKind::Write, &ours, &theirs);
    // Each request copies to the mirrored place: as far from the end as it was from the start.
    let requests: Vec<_> = (0..count)
        .map(|i| Request {
            local: ours.span(i * len, len),
            remote_addr: one.remote_addr + ((count - 1 - i) * len) as u64,
            tag: i as u64,
            ..one
        })
        .collect();
    pair.run(&requests).expect("they go");
    let mut tags: Vec<_> = pair.a.ended.iter().map(|ended| ended.tag).collect();
    tags.sort_unstable();
    assert_eq!(tags, (0..count as u64).collect::<Vec<_>>());
    assert!(pair.a.ended.iter().all(|ended| ended.result.is_ok()));
    for (i, chunk) in theirs.bytes.chunks(len).enumerate() {
        assert!(chunk == &ours.bytes[(count - 1 - i) * len..][..len], "piece {i}");
    }
}

fn both_directions_at_once(provider: &str) {
    let Some(rail) = open(provider) else { return };
    let mut pair = Pair::new(&rail);
    let (len, rounds) = (300_000, 20);
    let [from_a, from_b] = [0, 1].map(|k| Memory::new(&rail, len, move |i| pattern(i + k)));
    let [to_a, to_b] = [0; 2].map(|_| Memory::new(&rail, len, |_| 0));
    let a_writes = pair.request(OpKind::Write, &from_a, &to_b);
    let (a, b) = (&mut pair.a, &mut pair.b);
    let key = a.channel.export_now(&*to_a.registration).expect("a key");
    let b_writes = Request {
        local: from_b.span(0, len),
        local_key: from_b.registration.local_key(),
        remote_addr: key.base,
        remote_key: b.channel.import(&key.key).expect("our own key"),
        ..a_writes
    };
    let (mut from_here, mut from_there) = (0, 0);
    pair.until("both directions", |pair| {
        // SAFETY: the memory lives until the end of the test, and the channels are dropped before
        // it.
        unsafe {
            if from_here < rounds {
                from_here += pair.a.channel.post(&[a_writes])?;
            }
            if from_there < rounds {
                from_there += pair.b.channel.post(&[b_writes])?;
            }
        }
        Ok(pair.a.ended.len() == rounds && pair.b.ended.len() == rounds)
    })
    .expect("they go");
    assert!(pair.a.ended.iter().chain(&pair.b.ended).all(|ended| ended.result.is_ok()));
    assert!(to_b.bytes == from_a.bytes && to_a.bytes == from_b.bytes);
    drop(pair);
}

fn probes_end(provider: &str) {
    let Some(rail) = open(provider) else { return };
    let mut pair = Pair::new(&rail);
    // More probes than a channel has slots for, beside as many requests as it takes.
    let (depth, memory) = (pair.a.channel.limits().depth, Memory::new(&rail, 64, |_| 0));
    let one = pair.request(OpKind::Write, &memory, &memory);
    let requests: Vec<_> = (0..depth as u64).map(|i| Request { tag: 100 + i, ..one }).collect();
    // SAFETY: the memory lives until the channels are dropped.
    let posted = unsafe { pair.a.channel.post(&requests) }.expect("they go");
    for tag in 0..10 {
        pair.a.channel.probe(tag).expect("it goes");
    }
    pair.until("probes", |pair| Ok(pair.a.ended.len() == posted + 10)).expect("they end");
    for tag in 0..10 {
        assert_eq!(pair.a.result_of(tag), Some(&Ok(())), "probe {tag}");
    }
    drop(pair);
}

fn a_request_that_is_too_long_fails_alone(provider: &str) {
    let Some(rail) = open(provider) else { return };
    let mut pair = Pair::new(&rail);
    let memory = Memory::new(&rail, 64, pattern);
    let one = pair.request(OpKind::Write, &memory, &memory);
    let max = pair.a.channel.limits().max_bytes;
    let Some(len) = usize::try_from(max).ok().and_then(|max| max.checked_add(1)) else { return };
    // No byte of it is touched, so the memory need not exist.
    let long = Request { local: Span { addr: one.local.addr, len }, ..one };
    pair.run(&[long, Request { tag: 2, ..one }]).expect("the channel lives");
    assert!(pair.a.result_of(1).expect("ended").is_err());
    assert_eq!(pair.a.result_of(2), Some(&Ok(())));
}
