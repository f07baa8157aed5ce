//! Forbidden accesses of a peer fail and harm nothing else.

use uccl_fabric::{
    lane::{OpError, OpKind},
    mem::RemoteSpan,
    region::Rights,
};
use uccl_wire::frame::Status;

use crate::{
    memory::{Memory, pattern, piece},
    pair::Pair,
};

const LEN: usize = 4096;

fn refused(pair: &Pair, kind: OpKind, ours: &Memory, remote: RemoteSpan) -> Status {
    let len = remote.len as usize;
    match pair.carry(kind, ours.part(0, len), [remote].into()) {
        Err(OpError::Remote(status)) => status,
        other => panic!("a {kind:?} that is to be refused: {other:?}"),
    }
}

pub(crate) fn without_the_right(pair: &Pair) {
    let (ours, theirs) = (pair.private(LEN), pair.private(LEN));
    ours.fill(0x11);
    theirs.fill(0x22);
    for (rights, kind, may) in [
        (Rights::READ, OpKind::Write, OpKind::Read),
        (Rights::WRITE, OpKind::Read, OpKind::Write),
        (Rights::SIGNAL, OpKind::Write, OpKind::Write),
    ] {
        let region = pair.region(&theirs, rights);
        let remote = region.remote();
        let (was, had) = (theirs.bytes(), ours.bytes());
        assert_eq!(refused(pair, kind, &ours, remote), Status::Denied, "{rights:?}");
        assert!(theirs.bytes() == was && ours.bytes() == had, "{rights:?}");
        if may != kind {
            let done = pair.carry(may, ours.part(0, LEN), [remote].into());
            assert_eq!(done, Ok(()), "{rights:?}");
        }
        pair.take_back(&region);
    }
}

pub(crate) fn forged_or_outside(pair: &Pair) {
    let (ours, theirs) = (pair.private(2 * LEN), pair.private(2 * LEN));
    theirs.fill(0x33);
    let region = pair.region(&theirs, Rights::ALL);
    let whole = region.remote();
    let forged = RemoteSpan { key: whole.key ^ 1, ..whole };
    let elsewhere = RemoteSpan { slot: whole.slot + 77, ..whole };
    for (remote, status) in [
        (forged, Status::UnknownKey),
        (elsewhere, Status::UnknownKey),
        (piece(&whole, LEN, LEN + 1), Status::OutOfBounds),
        (RemoteSpan { addr: whole.addr - 1, len: 8, ..whole }, Status::OutOfBounds),
    ] {
        for kind in [OpKind::Write, OpKind::Read] {
            assert_eq!(refused(pair, kind, &ours, remote), status, "{kind:?} {remote:?}");
        }
    }
    assert_eq!(theirs.bytes(), vec![0x33; 2 * LEN]);
    let good = pair.carry(OpKind::Write, ours.part(0, LEN), [piece(&whole, 0, LEN)].into());
    assert_eq!(good, Ok(()), "the lane goes on");
}

pub(crate) fn taken_back(pair: &Pair) {
    for memory in [Pair::private, Pair::shared] {
        let (ours, theirs) = (pair.private(LEN), memory(pair, LEN));
        ours.fill_with(&pattern(LEN, 5));
        let region = pair.region(&theirs, Rights::ALL);
        let remote = region.remote();
        let written = pair.carry(OpKind::Write, ours.part(0, LEN), [remote].into());
        assert_eq!(written, Ok(()));
        pair.take_back(&region);
        theirs.fill(0x44);
        assert_eq!(refused(pair, OpKind::Write, &ours, remote), Status::UnknownKey);
        assert_eq!(refused(pair, OpKind::Read, &ours, remote), Status::UnknownKey);
        assert_eq!(theirs.bytes(), vec![0x44; LEN], "its owner's again");
    }
}

pub(crate) fn taken_back_during_a_write(pair: &Pair) {
    const MUCH: usize = 24 << 20;
    let (ours, theirs) = (pair.private(MUCH), pair.private(MUCH));
    ours.fill(0x55);
    for turns in [0, 1, 3, 20] {
        let region = pair.region(&theirs, Rights::ALL);
        let remote = region.remote();
        let done = pair.post(OpKind::Write, [ours.part(0, MUCH)], [remote].into(), None);
        pair.turns(turns);
        pair.take_back(&region);
        theirs.fill(0x66);
        let result = pair.end_of(&done);
        let is_told = matches!(result, Ok(()) | Err(OpError::Remote(Status::UnknownKey)));
        assert!(is_told, "after {turns} turns: {result:?}");
        assert_eq!(theirs.bytes(), vec![0x66; MUCH], "after {turns} turns");
    }
}
