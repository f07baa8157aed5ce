//! Transfers move the requested bytes and no others.

use std::sync::Arc;

use fastrand::Rng;
use uccl_fabric::{
    lane::{OpKind, RemoteSpans, Spans},
    region::Rights,
};

use crate::{
    done::{Lands, ResultSlot},
    memory::{Memory, pattern, piece},
    pair::Pair,
};

const LENGTHS: [usize; 9] = [0, 1, 7, 64, 4096, 33_000, 256 << 10, (1 << 20) + 3, 9 << 20];

pub(crate) fn any_length(pair: &Pair) {
    LENGTHS.into_iter().for_each(|len| there_and_back(pair, len, Pair::private));
}

pub(crate) fn shared_memory(pair: &Pair) {
    [8, 5000, 1 << 20].into_iter().for_each(|len| there_and_back(pair, len, Pair::shared));
}

fn there_and_back(pair: &Pair, len: usize, memory: fn(&Pair, usize) -> Arc<Memory>) {
    // The bytes beside the transferred range must keep their values.
    let [from, to, back] = [(); 3].map(|()| memory(pair, len + 16));
    let bytes = pattern(len + 16, len as u64);
    from.fill_with(&bytes);
    to.fill(0xEE);
    back.fill(0xDD);
    let region = pair.region(&to, Rights::ALL);
    let target = piece(&region.remote(), 8, len);
    let lands = Lands { memory: Arc::clone(&to), at: 8, bytes: bytes[8..8 + len].to_vec() };
    let done = pair.post(OpKind::Write, [from.part(8, len)], [target].into(), Some(lands));
    assert_eq!(pair.end_of(&done), Ok(()), "{len} bytes");
    let read = pair.carry(OpKind::Read, back.part(8, len), [target].into());
    assert_eq!(read, Ok(()), "{len} bytes");
    for (memory, around) in [(&to, 0xEE), (&back, 0xDD)] {
        let found = memory.bytes();
        assert!(found[8..8 + len] == bytes[8..8 + len], "{len} bytes");
        let edges = [&found[..8], &found[8 + len..]].concat();
        assert_eq!(edges, [around; 16], "{len} bytes");
    }
    pair.take_back(&region);
}

pub(crate) fn vectors(pair: &Pair) {
    const LEN: usize = 300_000;
    let (from, to, back) = (pair.private(LEN), pair.private(LEN), pair.private(LEN));
    let region = pair.region(&to, Rights::ALL);
    let most = pair.a.lane.caps().max_pieces.min(700);
    for seed in 0..12 {
        let mut rng = Rng::with_seed(seed);
        let bytes = pattern(LEN, seed);
        from.fill_with(&bytes);
        [&to, &back].into_iter().for_each(|memory| memory.fill(0));
        let pieces = scattered(&mut rng, LEN, most);
        let here = |memory: &Memory| -> Spans {
            pieces.iter().map(|(at, _, len)| memory.part(*at, *len)).collect()
        };
        let there = |(_, at, len): &(usize, usize, usize)| piece(&region.remote(), *at, *len);
        let remote: RemoteSpans = pieces.iter().map(there).collect();
        for (kind, local) in [(OpKind::Write, here(&from)), (OpKind::Read, here(&back))] {
            let done = pair.post(kind, local, remote.clone(), None);
            assert_eq!(pair.end_of(&done), Ok(()), "seed {seed}");
        }
        let (landed, read) = (to.bytes(), back.bytes());
        for (at, place, len) in pieces {
            assert!(landed[place..place + len] == bytes[at..at + len], "seed {seed}: written");
        }
        assert!(read == bytes, "seed {seed}: read");
    }
}

/// Cuts `len` bytes into fewer than `most` random pieces, a few of them empty. Each piece is its
/// offset here, its offset there (in another order) and its length.
fn scattered(rng: &mut Rng, len: usize, most: usize) -> Vec<(usize, usize, usize)> {
    let mut cuts: Vec<_> = (1..rng.usize(1..most)).map(|_| rng.usize(0..len)).collect();
    cuts.extend([0, len]);
    cuts.sort_unstable();
    let mut pieces: Vec<_> = cuts.windows(2).map(|ends| (ends[0], 0, ends[1] - ends[0])).collect();
    rng.shuffle(&mut pieces);
    let mut place = 0;
    for (_, there, len) in &mut pieces {
        *there = place;
        place += *len;
    }
    rng.shuffle(&mut pieces);
    pieces
}

pub(crate) fn many_at_a_time(pair: &Pair) {
    const COUNT: usize = 400;
    const EACH: usize = 3001;
    let (from, to) = (pair.private(COUNT * EACH), pair.private(COUNT * EACH));
    let bytes = pattern(COUNT * EACH, 9);
    from.fill_with(&bytes);
    let region = pair.region(&to, Rights::ALL);
    let post = |n: usize| {
        let at = n * EACH;
        let lands = Lands { memory: Arc::clone(&to), at, bytes: bytes[at..at + EACH].to_vec() };
        let remote = [piece(&region.remote(), at, EACH)].into();
        pair.post(OpKind::Write, [from.part(at, EACH)], remote, Some(lands))
    };
    let all: Vec<Arc<ResultSlot>> = (0..COUNT).map(post).collect();
    pair.until("all have ended", || all.iter().all(|done| done.result().is_some()));
    assert!(all.iter().all(|done| done.result() == Some(Ok(()))));
    pair.until("nothing is left", || pair.a.lane.load() == 0 && !pair.a.lane.has_work());
    assert!(to.bytes() == bytes);
}
