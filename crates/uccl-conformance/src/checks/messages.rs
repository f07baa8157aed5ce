//! Lanes that carry messages.

use std::{thread, time::Duration};

use uccl_fabric::{lane::OpKind, region::Rights};

use crate::{memory::pattern, pair::Pair};

pub(crate) fn in_order(pair: &Pair) {
    let (Some(ours), Some(theirs)) = (&pair.a.messages, &pair.b.messages) else { return };
    let most = pair.a.lane.caps().max_message;
    let lengths = [0, 1, 8, 100, 5000, 60_000, most];
    let sent: Vec<Vec<u8>> =
        (0..70).map(|n| pattern(lengths[n % lengths.len()], n as u64)).collect();
    for bytes in &sent {
        let (head, rest) = bytes.split_at(bytes.len() / 3);
        ours.send(&[head, &[], rest]).expect("it lives");
        theirs.send(&[rest, head]).expect("it lives");
    }
    pair.until("every message comes", || {
        [&pair.a, &pair.b].iter().all(|end| end.inbox.0.lock().len() == sent.len())
    });
    assert!(*pair.b.inbox.0.lock() == sent);
    pair.until("nothing waits", || ours.queued_bytes() == 0 && theirs.queued_bytes() == 0);
    // A message that is sent after the end of a write arrives after the write's bytes.
    let (from, to) = (pair.private(8), pair.private(8));
    let region = pair.region(&to, Rights::ALL);
    for round in 0..200_u64 {
        from.fill_with(&round.to_le_bytes());
        let written = pair.carry(OpKind::Write, from.part(0, 8), [region.remote()].into());
        assert_eq!(written, Ok(()));
        pair.b.inbox.0.lock().clear();
        ours.send(&[&round.to_le_bytes()]).expect("it lives");
        pair.until("a message comes", || !pair.b.inbox.0.lock().is_empty());
        assert_eq!(to.bytes(), round.to_le_bytes());
    }
}

pub(crate) fn ping(pair: &Pair) {
    let Some(lane) = &pair.a.messages else { return };
    pair.turns(5);
    let before = lane.last_heard_ms();
    thread::sleep(Duration::from_millis(40));
    lane.ping().expect("it lives");
    pair.until("a sign of life comes", || lane.last_heard_ms() > before);
}
