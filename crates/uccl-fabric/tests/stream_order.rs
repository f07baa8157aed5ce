//! Turns, windows and limits of the stream lane.

mod support;

use std::sync::Arc;

use fastrand::Rng;
use uccl_fabric::chaos::Faults;
use uccl_fabric::lane::{Lane, OpError, OpKind};
use uccl_fabric::mem::RemoteSpan;
use uccl_fabric::region::Rights;
use uccl_wire::frame::{DESC_LEN, HEADER_LEN, MAX_PAYLOAD, Status, TRAILER_LEN};

use support::{Done, Patch, plain_sides, run_until, sides};

/// The length of a frame with one piece of the longest payload.
const LONGEST: usize = HEADER_LEN + DESC_LEN + MAX_PAYLOAD as usize + TRAILER_LEN;

#[test]
fn a_short_write_does_not_overtake_the_end_of_a_long_one() {
    let mut rng = Rng::with_seed(1);
    // The last frame of the long write begins when the pipe is full.
    let full = Faults { capacity_bytes: LONGEST, ..Faults::default() };
    let sides = sides(1, full, Faults::default(), [false; 2]);
    let long = Patch::new(&mut rng, &[MAX_PAYLOAD as usize, 100]);
    let short = Patch::new(&mut rng, &[100]);
    let dest = Patch::new(&mut rng, &[MAX_PAYLOAD as usize, 100]);
    let region = sides[1].register(dest.whole(), Rights::WRITE);
    let end = dest.remote(&region)[1];
    let mut pieces = dest.remote(&region);
    pieces[0].key ^= 1;
    let (first, second) = (Done::watching(dest.whole()), Done::watching(dest.whole()));
    sides[0].post(OpKind::Write, long.spans(), pieces, &first).expect("alive");
    sides[0]
        .post(OpKind::Write, short.spans(), [end].into_iter().collect(), &second)
        .expect("alive");
    run_until(&sides, || first.result().is_some() && second.result().is_some()).expect("alive");
    assert_eq!(first.result(), Some(Err(OpError::Remote(Status::UnknownKey))));
    assert_eq!(second.result(), Some(Ok(())));
    let landed = dest.pieces_of(&dest.now());
    assert!(landed[MAX_PAYLOAD as usize..] == short.pieces_of(&short.before), "posted later");
}
