//! Signals change words of the peer: a lane between processes of one host changes them itself,
//! another lane sends a signal along with a write.

use std::sync::{Arc, atomic::Ordering::Relaxed};

use uccl_fabric::{
    lane::{OpError, RemoteSpans, Spans},
    mem::RemoteSpan,
    region::{Region, Rights},
    signal::Word,
};
use uccl_wire::{frame::Status, signal::Change};

use crate::{
    done::ResultSlot,
    memory::{Memory, pattern, piece},
    pair::Pair,
};

pub(crate) fn by_the_writer(pair: &Pair) {
    let Some(host) = &pair.a.host else {
        // On other lanes the owner changes the word.
        return;
    };
    if pair.is_on_gpu() {
        // On a GPU, the GPU that writes the data changes the word.
        return;
    }
    let (from, to) = (pair.private(64), pair.shared(72));
    let region = pair.region(&to, Rights::ALL);
    let (data, word) = (piece(&region.remote(), 0, 64), piece(&region.remote(), 64, 8));
    let value = || u64::from_le_bytes(to.bytes()[64..].try_into().expect("eight bytes"));
    let mut expected = 0_u64;
    for round in 0..100_u64 {
        let bytes = pattern(64, round);
        from.fill_with(&bytes);
        let change = if round.is_multiple_of(3) { Change::Set(round) } else { Change::Add(round) };
        expected = match change {
            Change::Set(value) => value,
            Change::Add(value) => expected.wrapping_add(value),
        };
        // SAFETY: the memory lives during the call. The lane may decline at any time.
        match unsafe { host.try_signalled(from.part(0, 64), &data, &word, change) } {
            Some(done) => {
                assert_eq!(done, Ok(()));
                assert!(to.bytes()[..64] == bytes, "the bytes are there");
            }
            None => while host.try_signal(&word, change).is_none() {},
        }
        assert_eq!(value(), expected, "round {round}");
    }
    pair.take_back(&region);
    for rights in [Rights::READ, Rights::WRITE] {
        let region = pair.region(&to, rights);
        let changed = host.try_signal(&piece(&region.remote(), 64, 8), Change::Add(1));
        assert!(!matches!(changed, Some(Ok(()))), "without the right: {rights:?}");
        pair.take_back(&region);
    }
    assert_eq!(value(), expected);
}

/// Memory of the second end that is written, and a word beside it that only signals change.
struct SignalledMemory {
    from: Arc<Memory>,
    to: Arc<Memory>,
    words: Arc<Memory>,
    data: Region,
    word: Region,
}

impl SignalledMemory {
    fn new(pair: &Pair, len: usize, [data, word]: [Rights; 2]) -> Self {
        let (from, to, words) = (pair.private(len), pair.private(len), pair.private(16));
        from.fill_with(&pattern(len, len as u64));
        let (data, word) = (pair.region(&to, data), pair.region(&words, word));
        Self { from, to, words, data, word }
    }

    fn value(&self) -> u64 {
        u64::from_le_bytes(self.words.bytes()[..8].try_into().expect("eight bytes"))
    }

    fn place(&self) -> RemoteSpan {
        piece(&self.word.remote(), 0, 8)
    }

    fn has_landed(&self) -> bool {
        self.to.bytes() == self.from.bytes()
    }

    /// Posts a write of all bytes from the first end, with a signal that adds one to `word`.
    fn post(&self, pair: &Pair, word: RemoteSpan) -> Option<Arc<ResultSlot>> {
        let word = Word { span: word, change: Change::Add(1) };
        // An empty write names no memory.
        let some = (self.from.span().len > 0).then(|| (self.from.span(), self.data.remote()));
        let (local, remote): (Spans, RemoteSpans) = some.into_iter().unzip();
        pair.post_signalled(local, remote, word)
    }

    fn take_back(&self, pair: &Pair) {
        pair.take_back(&self.data);
        pair.take_back(&self.word);
    }
}

const FREE: [Rights; 2] = [Rights::WRITE, Rights::SIGNAL];

pub(crate) fn with_a_write(pair: &Pair) {
    for len in [0, 8, 2000, 4096, 33_000, 256 << 10, 9 << 20] {
        let all = SignalledMemory::new(pair, len, FREE);
        let told = || pair.b.inbox.1.load(Relaxed);
        let before = told();
        let Some(done) = all.post(pair, all.place()) else { continue };
        pair.until_asleep("a signalled write ends", || {
            assert!(all.value() == 0 || all.has_landed(), "{len} bytes: signalled too early");
            done.result().is_some()
        });
        assert_eq!(done.result(), Some(Ok(())), "{len} bytes");
        pair.turns(20);
        assert!(all.value() == 1 && all.has_landed(), "{len} bytes");
        assert_eq!(told() - before, 1, "{len} bytes: its owner is told once");
        all.take_back(pair);
    }
}

pub(crate) fn refused(pair: &Pair) {
    for len in [0, 64, 300_000] {
        let all = SignalledMemory::new(pair, len, [Rights::READ, Rights::SIGNAL]);
        if len > 0
            && let Some(done) = all.post(pair, all.place())
        {
            assert_eq!(pair.end_of(&done), Err(OpError::Remote(Status::Denied)));
            assert_eq!(all.value(), 0, "{len} bytes that were refused");
        }
        all.take_back(pair);
        for rights in [Rights::READ, Rights::WRITE] {
            let all = SignalledMemory::new(pair, len, [Rights::WRITE, rights]);
            ends_with(pair, &all, all.place(), Status::Denied);
            all.take_back(pair);
        }
        let all = SignalledMemory::new(pair, len, FREE);
        let place = all.place();
        ends_with(pair, &all, RemoteSpan { key: place.key ^ 1, ..place }, Status::UnknownKey);
        ends_with(pair, &all, RemoteSpan { addr: place.addr + 16, ..place }, Status::OutOfBounds);
        ends_with(pair, &all, RemoteSpan { addr: place.addr + 4, ..place }, Status::Protocol);
        all.take_back(pair);
    }
}

/// Checks that a write with a refused signal fails with that status after its bytes have landed.
fn ends_with(pair: &Pair, all: &SignalledMemory, word: RemoteSpan, status: Status) {
    let Some(done) = all.post(pair, word) else { return };
    assert_eq!(pair.end_of(&done), Err(OpError::Remote(status)));
    assert!(all.words.bytes() == [0; 16] && all.has_landed(), "{status:?}");
}

pub(crate) fn cancelled(pair: &Pair) {
    for turns in [0, 1, 4, 30] {
        let all = SignalledMemory::new(pair, 16 << 20, FREE);
        let Some(done) = all.post(pair, all.place()) else { return };
        pair.turns(turns);
        pair.until("a cancelled write ends", || {
            done.name().into_iter().for_each(|name| pair.a.lane.cancel(name));
            done.result().is_some()
        });
        let is_done = match done.result().expect("it has ended") {
            Ok(()) => true,
            Err(OpError::Cancelled) => false,
            Err(e) => panic!("after {turns} turns: {e}"),
        };
        pair.turns(300);
        assert_eq!(all.value(), u64::from(is_done), "after {turns} turns");
        all.take_back(pair);
    }
}

pub(crate) fn taken_back(pair: &Pair) {
    for turns in [0, 1, 3, 20] {
        let all = SignalledMemory::new(pair, 8 << 20, FREE);
        let Some(done) = all.post(pair, all.place()) else { return };
        pair.turns(turns);
        pair.take_back(&all.word);
        let value = all.value();
        let end = pair.end_of(&done);
        match value {
            0 => assert_eq!(end, Err(OpError::Remote(Status::UnknownKey)), "{turns} turns"),
            _ => assert_eq!(end, Ok(()), "after {turns} turns"),
        }
        pair.turns(20);
        assert_eq!(all.value(), value, "after {turns} turns");
        pair.take_back(&all.data);
    }
}
