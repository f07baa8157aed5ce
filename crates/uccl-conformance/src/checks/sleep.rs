//! Every event that needs a thread wakes it from its sleep on a lane.

use uccl_fabric::{lane::OpKind, region::Rights};

use crate::{
    memory::{pattern, piece},
    pair::Pair,
};

pub(crate) fn woken(pair: &Pair) {
    const LEN: usize = 3 << 20;
    let (ours, theirs) = (pair.private(LEN), pair.private(LEN));
    ours.fill_with(&pattern(LEN, 3));
    let region = pair.region(&theirs, Rights::ALL);
    for round in 0..150 {
        let len = [8, 4096, 100_000, LEN][round % 4];
        let kind = if round.is_multiple_of(3) { OpKind::Read } else { OpKind::Write };
        let remote = [piece(&region.remote(), 0, len)].into();
        let done = pair.post(kind, [ours.part(0, len)], remote, None);
        pair.until_asleep("an operation ends", || done.result().is_some());
        assert_eq!(done.result(), Some(Ok(())), "round {round}");
        let Some(messages) = &pair.b.messages else { continue };
        pair.a.inbox.0.lock().clear();
        messages.send(&[b"a word"]).expect("it lives");
        pair.until_asleep("a message comes", || !pair.a.inbox.0.lock().is_empty());
    }
}
