//! A lane with faults of its own, over a pipe with faults.

mod support;

use std::sync::Arc;

use fastrand::Rng;
use parking_lot::Mutex;
use uccl_chaos::{ChaosLane, ChaosPipe, Faults, LaneFaults, each_seed};
use uccl_conformance::Inbox;
use uccl_device::MemoryKind;
use uccl_fabric::lane::{
    Completion, Lane, LaneError, OpError, OpKind, OpResult, Operation, PostOutcome,
};
use uccl_fabric::region::Rights;
use uccl_stream::StreamLane;

use support::{Patch, Side, sides};

/// A lane with faults, and its peer without.
struct Pair {
    lane: ChaosLane<StreamLane<ChaosPipe>>,
    inbox: Inbox,
    peer: Side,
}

fn pair_with(seed: u64, faults: LaneFaults) -> Pair {
    let [a, peer] = sides(seed, Faults::default(), Faults::default(), [true; 2]);
    Pair { lane: ChaosLane::new(a.lane, seed, faults), inbox: a.inbox, peer }
}

/// Ended operations, in order, by number.
type EndedOps = Arc<Mutex<Vec<(usize, OpResult)>>>;

struct NumberedOp(usize, EndedOps);

impl Completion for NumberedOp {
    fn complete(self: Arc<Self>, result: OpResult) {
        self.1.lock().push((self.0, result));
    }
}

impl Pair {
    fn progress(&self) -> Result<bool, LaneError> {
        let moved = self.lane.progress(&self.inbox)?;
        Ok(moved | self.peer.progress()?)
    }

    /// Posts writes of a patch of its own each; those that failed at once are in `ended` already.
    fn write_all(&self, rng: &mut Rng, count: usize, ended: &EndedOps) -> Vec<(Patch, Patch)> {
        let mut patches = Vec::new();
        for i in 0..count {
            let len = rng.usize(0..9000);
            let (source, dest) = (Patch::new(rng, &[len]), Patch::new(rng, &[len]));
            let region = self.peer.register(dest.whole(), Rights::WRITE);
            let op = Operation {
                kind: OpKind::Write,
                local: source.spans(),
                memory: MemoryKind::Host,
                remote: dest.remote(&region),
                done: Arc::new(NumberedOp(i, Arc::clone(ended))),
            };
            // SAFETY: the tests keep the patches until both lanes are gone.
            match unsafe { self.lane.post(op) } {
                Ok(PostOutcome::Done(result)) => ended.lock().push((i, result)),
                Ok(PostOutcome::Pending(_)) => {}
                Err(_) => return patches,
            }
            patches.push((source, dest));
        }
        patches
    }
}

fn landed((source, dest): &(Patch, Patch)) -> bool {
    dest.pieces_of(&dest.now()) == source.pieces_of(&source.before)
}

#[test]
fn completions_are_late_and_in_another_order_but_all_come() {
    let ended = EndedOps::default();
    let faults = LaneFaults { hold_completions: 10, ..LaneFaults::default() };
    let pair = pair_with(1, faults);
    let patches = pair.write_all(&mut Rng::with_seed(1), 100, &ended);
    while ended.lock().len() < 100 {
        pair.progress().expect("alive");
    }
    let mut order: Vec<_> = ended.lock().iter().map(|end| end.0).collect();
    assert!(!order.is_sorted(), "in another order");
    order.sort_unstable();
    assert!(order.into_iter().eq(0..100), "each once");
    assert!(ended.lock().iter().all(|end| end.1 == Ok(())) && patches.iter().all(landed));
}

#[test]
fn a_repeated_write_is_the_same_write() {
    let ended = EndedOps::default();
    let faults = LaneFaults { repeat_writes_percent: 50, ..LaneFaults::default() };
    let pair = pair_with(2, faults);
    let patches = pair.write_all(&mut Rng::with_seed(2), 100, &ended);
    assert!(pair.lane.load() > patches.iter().map(|p| p.0.before.len() as u64).sum::<u64>());
    while ended.lock().len() < 100 {
        pair.progress().expect("alive");
    }
    assert!(ended.lock().iter().all(|end| end.1 == Ok(())) && patches.iter().all(landed));
    patches.iter().for_each(|patch| patch.1.assert_guards());
}

#[test]
fn refused_posts_move_nothing() {
    let ended = EndedOps::default();
    let faults = LaneFaults { fail_posts_percent: 30, ..LaneFaults::default() };
    let pair = pair_with(3, faults);
    let patches = pair.write_all(&mut Rng::with_seed(3), 100, &ended);
    let refused = ended.lock().len();
    assert!((1..100).contains(&refused));
    while ended.lock().len() < 100 {
        pair.progress().expect("alive");
    }
    for (i, result) in ended.lock().iter() {
        let (_, dest) = &patches[*i];
        match result {
            Ok(()) => assert!(landed(&patches[*i])),
            Err(e) => assert!(*e == OpError::LocalFault && dest.now() == dest.before),
        }
    }
}

#[test]
fn a_lost_lane_ends_everything_when_killed() {
    each_seed(|seed| {
        let ended = EndedOps::default();
        let faults = LaneFaults {
            hold_completions: 5,
            repeat_writes_percent: 30,
            lose_after: Some(20),
            ..LaneFaults::default()
        };
        let pair = pair_with(seed, faults);
        let patches = pair.write_all(&mut Rng::with_seed(seed), 100, &ended);
        assert_eq!(patches.len(), 20);
        assert!(matches!(pair.progress(), Err(LaneError::Lost(_))));
        pair.lane.kill();
        let mut order: Vec<_> = ended.lock().iter().map(|end| end.0).collect();
        order.sort_unstable();
        assert!(order.into_iter().eq(0..20), "each once");
        for (i, result) in ended.lock().iter() {
            assert!(*result == Err(OpError::LaneDown) || landed(&patches[*i]));
        }
    });
}
