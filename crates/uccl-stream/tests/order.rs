//! Turns, windows and limits of the stream lane.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use fastrand::Rng;
use uccl_chaos::Faults;
use uccl_device::MemoryKind;
use uccl_fabric::lane::{Completion, Lane, MessageLane, OpError, OpKind, OpResult, Operation};
use uccl_fabric::region::{Region, Rights};
use uccl_wire::frame::{DESC_LEN, HEADER_LEN, MAX_PAYLOAD, Status, TRAILER_LEN};

use support::{Patch, ResultAndCopy, Side, plain_sides, run_until, sides};

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
    let (first, second) =
        (ResultAndCopy::watching(dest.whole()), ResultAndCopy::watching(dest.whole()));
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

/// Counts operations that have ended well.
#[derive(Default)]
struct Count(AtomicUsize);

impl Completion for Count {
    fn complete(self: Arc<Self>, result: OpResult) {
        assert_eq!(result, Ok(()));
        self.0.fetch_add(1, SeqCst);
    }
}

impl Count {
    fn has(&self, n: usize) -> bool {
        self.0.load(SeqCst) == n
    }
}

/// Posts an operation of the whole patches.
fn post(side: &Side, kind: OpKind, local: &Patch, remote: &Patch, key: &Region, done: &Arc<Count>) {
    let done = Arc::clone(done) as Arc<dyn Completion>;
    let (local, remote) = (local.spans(), remote.remote(key));
    // SAFETY: the tests keep their memory until both lanes are gone.
    unsafe { side.lane.post(Operation { kind, local, memory: MemoryKind::Host, remote, done }) }
        .expect("a live lane");
}

#[test]
fn more_reads_than_may_be_under_way_all_end() {
    let mut rng = Rng::with_seed(2);
    let sides = plain_sides(false);
    let (source, dest) = (Patch::new(&mut rng, &[40]), Patch::new(&mut rng, &[40]));
    let region = sides[1].register(source.whole(), Rights::READ);
    let done = Arc::new(Count::default());
    for _ in 0..2000 {
        post(&sides[0], OpKind::Read, &dest, &source, &region, &done);
    }
    assert!(!sides[0].lane.has_work(), "all that may be asked has been asked");
    assert!(sides[0].lane.arm(), "so it may sleep");
    run_until(&sides, || done.has(2000)).expect("alive");
    assert!(dest.pieces_of(&dest.now()) == source.pieces_of(&source.before));
}

#[test]
fn reads_behind_a_full_pipe_all_end() {
    let mut rng = Rng::with_seed(3);
    let sides = plain_sides(false);
    let patch = Patch::new(&mut rng, &[1 << 20]);
    let dest = Patch::new(&mut rng, &[1 << 20]);
    let region = sides[1].register(dest.whole(), Rights::ALL);
    let done = Arc::new(Count::default());
    post(&sides[0], OpKind::Write, &patch, &dest, &region, &done);
    let (small, back) = (Patch::new(&mut rng, &[10]), Patch::new(&mut rng, &[10]));
    let small_region = sides[1].register(small.whole(), Rights::READ);
    for _ in 0..700 {
        post(&sides[0], OpKind::Read, &back, &small, &small_region, &done);
    }
    run_until(&sides, || done.has(701)).expect("alive");
}

#[test]
fn cancelling_a_read_that_waits_lets_the_next_operation_go() {
    let mut rng = Rng::with_seed(4);
    let sides = plain_sides(false);
    let (source, dest) = (Patch::new(&mut rng, &[4000]), Patch::new(&mut rng, &[4000]));
    let region = sides[1].register(dest.whole(), Rights::ALL);
    let reads: Vec<_> = (0..600).map(|_| ResultAndCopy::watching(source.whole())).collect();
    let names: Vec<_> = reads
        .iter()
        .map(|done| {
            sides[0].post(OpKind::Read, source.spans(), dest.remote(&region), done).expect("alive")
        })
        .collect();
    let count = Arc::new(Count::default());
    post(&sides[0], OpKind::Write, &source, &dest, &region, &count);
    names.iter().for_each(|name| sides[0].lane.cancel(*name));
    assert!(reads.iter().all(|done| done.result() == Some(Err(OpError::Cancelled))));
    run_until(&sides, || count.has(1)).expect("alive");
}

#[test]
fn floods_of_messages_in_both_directions_pass() {
    let sides = plain_sides(false);
    let message = vec![7; 64 << 10];
    for _ in 0..200 {
        sides.iter().for_each(|side| side.send(&message));
    }
    let heard = |side: &Side| side.inbox.0.lock().len() == 200;
    run_until(&sides, || sides.iter().all(heard)).expect("alive");
}

#[test]
fn floods_of_short_writes_in_both_directions_pass() {
    const COUNT: usize = 100_000;
    let mut rng = Rng::with_seed(5);
    // More than may be under way at a time.
    let faults = Faults { capacity_bytes: 16 << 20, ..Faults::default() };
    let sides = sides(5, faults.clone(), faults, [false; 2]);
    let (source, dest) = (Patch::new(&mut rng, &[1]), Patch::new(&mut rng, &[1]));
    let regions = [1, 0].map(|i| sides[i].register(dest.whole(), Rights::WRITE));
    let done = Arc::new(Count::default());
    for _ in 0..COUNT {
        for i in [0, 1] {
            post(&sides[i], OpKind::Write, &source, &dest, &regions[i], &done);
        }
    }
    run_until(&sides, || done.has(2 * COUNT)).expect("alive");
}

#[test]
fn a_write_that_is_posted_beside_a_kill_ends_or_is_refused() {
    for seed in 0..200 {
        let mut rng = Rng::with_seed(seed);
        let sides = plain_sides(true);
        let (source, dest) = (Patch::new(&mut rng, &[5000]), Patch::new(&mut rng, &[5000]));
        let region = sides[1].register(dest.whole(), Rights::ALL);
        let jobs: Vec<_> = std::thread::scope(|scope| {
            let poster = scope.spawn(|| {
                let mut jobs = Vec::new();
                loop {
                    let done = ResultAndCopy::watching(dest.whole());
                    let remote = dest.remote(&region);
                    match sides[0].post(OpKind::Write, source.spans(), remote, &done) {
                        Ok(_) => jobs.push(done),
                        Err(_) => return jobs,
                    }
                }
            });
            (0..seed * 20).for_each(|_| std::hint::spin_loop());
            sides[0].lane.kill();
            poster.join().expect("no panic")
        });
        assert!(jobs.iter().all(|done| done.result() == Some(Err(OpError::LaneDown))));
    }
}

#[test]
fn a_stalled_peer_blocks_no_call() {
    let mut rng = Rng::with_seed(6);
    let sides = plain_sides(true);
    let (source, dest) = (Patch::new(&mut rng, &[3 << 20]), Patch::new(&mut rng, &[3 << 20]));
    let region = sides[1].register(dest.whole(), Rights::ALL);
    sides[0].lane.pipe().stall();
    let done: Vec<_> = (0..20).map(|_| ResultAndCopy::watching(dest.whole())).collect();
    let mut names = Vec::new();
    for done in &done {
        let (local, remote) = (source.spans(), dest.remote(&region));
        names.push(sides[0].post(OpKind::Write, local, remote, done).expect("alive"));
        sides[0].send(&[1; 60_000]);
        sides[0].lane.ping().expect("alive");
        sides[0].progress().expect("alive");
        sides[1].progress().expect("alive");
    }
    assert!(sides[0].lane.arm() && sides[1].lane.arm(), "both may sleep");
    // The first is on its way and ends with the peer's answer, the last has not begun.
    sides[0].lane.cancel(names[0]);
    sides[0].lane.cancel(names[19]);
    assert_eq!(done[0].result(), None);
    assert_eq!(done[19].result(), Some(Err(OpError::Cancelled)));
    sides[0].lane.pipe().resume();
    run_until(&sides, || done.iter().all(|done| done.result().is_some())).expect("alive");
    assert!(done[1..19].iter().all(|done| done.result() == Some(Ok(()))));
    assert!(dest.pieces_of(&dest.now()) == source.pieces_of(&source.before));
    sides[0].lane.pipe().stall();
    let late = ResultAndCopy::watching(dest.whole());
    sides[0].post(OpKind::Write, source.spans(), dest.remote(&region), &late).expect("alive");
    sides[0].lane.bye();
    sides[0].lane.kill();
    assert_eq!(late.result(), Some(Err(OpError::LaneDown)));
}
