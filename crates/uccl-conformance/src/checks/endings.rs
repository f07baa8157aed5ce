//! Operations, lanes and peers that end early.

use std::{sync::Arc, thread, time::Instant};

use uccl_fabric::{
    lane::{LaneError, OpError, OpKind},
    region::Rights,
};

use crate::{
    done::ResultSlot,
    end::End,
    memory::piece,
    pair::{FAR, Pair},
};

const MUCH: usize = 16 << 20;

pub(crate) fn cancelled(pair: &Pair) {
    let (ours, theirs) = (pair.private(MUCH), pair.private(MUCH));
    let region = pair.region(&theirs, Rights::ALL);
    for (kind, turns) in
        [OpKind::Write, OpKind::Read].into_iter().flat_map(|kind| [0, 1, 4].map(|n| (kind, n)))
    {
        // A device that does not give a cancelled operation back loses its channel, and gets
        // another.
        pair.until_up();
        ours.fill(0x11);
        theirs.fill(0x22);
        let done = pair.post(kind, [ours.part(0, MUCH)], [region.remote()].into(), None);
        pair.turns(turns);
        // A cancel may be repeated until the operation has ended.
        pair.until("a cancelled operation ends", || {
            done.name().into_iter().for_each(|name| pair.a.lane.cancel(name));
            done.result().is_some()
        });
        let result = done.result().expect("it has ended");
        let has_ended = matches!(result, Ok(()) | Err(OpError::Cancelled | OpError::Unreachable));
        assert!(has_ended, "{kind:?}: {result:?}");
        // From now on the memory of both sides belongs to its owners.
        ours.fill(0x33);
        theirs.fill(0x44);
        pair.turns(300);
        assert_eq!(ours.bytes(), vec![0x33; MUCH], "{kind:?} after {turns} turns");
        assert_eq!(theirs.bytes(), vec![0x44; MUCH], "{kind:?} after {turns} turns");
    }
}

pub(crate) fn cancelled_too_late(pair: &Pair) {
    let (ours, theirs) = (pair.private(4096), pair.private(4096));
    let region = pair.region(&theirs, Rights::ALL);
    for _ in 0..3 {
        let done = pair.post(OpKind::Write, [ours.part(0, 4096)], [region.remote()].into(), None);
        assert_eq!(pair.end_of(&done), Ok(()));
        done.name().into_iter().for_each(|name| pair.a.lane.cancel(name));
        pair.turns(10);
        assert_eq!(done.result(), Some(Ok(())));
    }
}

pub(crate) fn killed(pair: &Pair) {
    const EACH: usize = MUCH / 8;
    let (ours, theirs) = (pair.private(MUCH), pair.private(MUCH));
    ours.fill(0x11);
    theirs.fill(0x22);
    let region = pair.region(&theirs, Rights::ALL);
    let post = |n: usize| {
        let kind = if n.is_multiple_of(2) { OpKind::Write } else { OpKind::Read };
        let remote = [piece(&region.remote(), n * EACH, EACH)].into();
        pair.post(kind, [ours.part(n * EACH, EACH)], remote, None)
    };
    let all: Vec<Arc<ResultSlot>> = (0..8).map(post).collect();
    pair.turns(2);
    pair.a.lane.kill();
    assert!(all.iter().all(|done| done.result().is_some()), "not all were told");
    ours.fill(0x33);
    (0..200).for_each(|_| drop(pair.b.lane.progress(&pair.b.inbox)));
    assert_eq!(ours.bytes(), vec![0x33; MUCH], "memory of a killed lane is its owner's");
    assert!(
        theirs.bytes().iter().all(|byte| [0x11, 0x22].contains(byte)),
        "it is sent from no more"
    );
    let late =
        pair.post(OpKind::Write, [ours.part(0, 8)], [piece(&region.remote(), 0, 8)].into(), None);
    assert!(matches!(late.result(), Some(Err(OpError::LaneDown))), "{:?}", late.result());
}

pub(crate) fn peer_says_goodbye(pair: &Pair) {
    // A lane over rails learns of its peer's end from the lane that carries its notes.
    let Some(messages) = &pair.b.messages else { return };
    messages.bye();
    let end = first_error(&pair.a);
    assert!(matches!(end, LaneError::Closed), "after a goodbye: {end}");
}

pub(crate) fn peer_is_killed(pair: &Pair) {
    if pair.b.messages.is_none() {
        // As above.
        return;
    }
    pair.b.lane.kill();
    let end = first_error(&pair.a);
    assert!(!matches!(end, LaneError::Closed | LaneError::Killed), "without a goodbye: {end}");
}

/// The error that ends a lane.
fn first_error(end: &End) -> LaneError {
    let begun = Instant::now();
    loop {
        if let Err(e) = end.lane.progress(&end.inbox) {
            return e;
        }
        assert!(begun.elapsed() < FAR, "the peer's end is not noticed");
        thread::yield_now();
    }
}
