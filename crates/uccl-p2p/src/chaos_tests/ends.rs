//! The order in which connections, lanes and transfers end. Each step is held until the test has
//! checked it.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use fastrand::Rng;
use uccl_chaos::GateHold;

use super::{
    PATIENT, SHORT, lost,
    workload::move_one,
    world::{FAR, LaneChaos, Memory, Side, join_again, join_asking},
};
use crate::{
    Error, MrId, NoInterrupt, Op, Request, Status, TransferId,
    drive::{
        core::connection::{
            transfer::{Fence, Transfer},
            transfers::Lookup,
        },
        deadline,
    },
};

const LEN: usize = 300_000;

/// Two sides, and a region of each.
struct Ends {
    sides: [Side; 2],
    memory: [Memory; 2],
    mrs: [MrId; 2],
}

impl Ends {
    /// Joins the two sides. Neither asks the owner of memory to copy.
    fn new(lanes: &[LaneChaos], timeout: Duration) -> Self {
        let mut rng = Rng::with_seed(1);
        let sides = join_asking(1, lanes, timeout, [false; 2]);
        let memory = [(); 2].map(|()| Memory::new(&mut rng, &[LEN]));
        let mrs = [0, 1].map(|side| sides[side].register(&memory[side]));
        Self { sides, memory, mrs }
    }

    /// Calls `begin` with a request of the first side.
    fn with<T>(&self, op: Op, begin: impl Fn(&Request<'_>) -> T) -> T {
        let iovs = self.memory[0].iovs(self.mrs[0]);
        let mut adverts = self.memory[1].adverts(&self.sides[1], self.mrs[1]);
        adverts.retain(|_| matches!(op, Op::Read | Op::Write));
        begin(&Request::new(self.sides[0].conn, op, &iovs, &adverts))
    }

    fn post(&self, op: Op) -> TransferId {
        self.with(op, |request| self.sides[0].ep.post(request).expect("posted"))
    }

    fn transfer(&self, id: TransferId) -> Arc<Transfer> {
        match self.sides[0].ep.core().transfers.find(id).expect("known") {
            Lookup::Live(transfer) => transfer,
            Lookup::Ended(status) => panic!("it has ended: {status:?}"),
        }
    }

    /// No bytes from the peer arrive on this lane.
    fn stall(&self, lane: usize) {
        self.sides[1].lanes[lane].inner().pipe().stall();
    }

    /// Disconnects the first side while `then` looks. Its first lane is not killed before `then`
    /// has returned.
    fn disconnect_meanwhile(&self, then: impl FnOnce(&Self)) {
        let side = &self.sides[0];
        let hold: GateHold = side.lanes[0].hold_kill();
        std::thread::scope(|scope| {
            scope.spawn(|| side.ep.disconnect(side.conn).expect("it was there"));
            side.until("the killing of a lane", || hold.is_waited_for());
            then(self);
            drop(hold);
        });
    }

    /// The final status of a transfer of the first side.
    fn end_of(&self, id: TransferId) -> Status {
        self.sides[0].ep.wait(id, None, &mut NoInterrupt).expect("known")
    }
}

fn is_lost(status: &Status) -> bool {
    matches!(status, Status::Failed(Error::ConnectionLost { .. }))
}

#[test]
fn a_transfer_does_not_end_before_the_lanes_of_its_connection() {
    let ends = Ends::new(&[LaneChaos::default()], PATIENT);
    ends.stall(0);
    let id = ends.post(Op::Read);
    let transfer = ends.transfer(id);
    ends.disconnect_meanwhile(|ends| {
        assert!(!transfer.finished(), "its memory may still be touched");
        let refused = ends.sides[0].ep.deregister(ends.mrs[0]);
        assert!(matches!(refused, Err(Error::Invalid(_))), "{refused:?}");
    });
    // The transfer has ended when `disconnect` returns.
    assert!(transfer.finished() && is_lost(&ends.end_of(id)));
}

/// The lane has been killed, but a copy of ours hangs in the kernel.
#[test]
fn a_transfer_does_not_end_before_a_copy_that_outlives_its_lane() {
    let ends = Ends::new(&[LaneChaos::default()], PATIENT);
    ends.stall(0);
    let id = ends.post(Op::Read);
    let transfer = ends.transfer(id);
    let side = &ends.sides[0];
    let copy = side.lanes[0].hold_copy();
    side.connection().fail(Error::Closed);
    side.ep.core().look_after_aftermaths();
    assert!(!transfer.finished(), "its memory is still touched");
    drop(copy);
    side.ep.core().look_after_aftermaths();
    assert!(transfer.finished(), "nothing touches its memory");
}

#[test]
fn a_copy_that_does_not_end_is_told() {
    let ends = Ends::new(&[LaneChaos::default()], Duration::from_millis(100));
    ends.stall(0);
    let id = ends.post(Op::Read);
    let side = &ends.sides[0];
    let _copy = side.lanes[0].hold_copy();
    side.connection().fail(Error::Closed);
    let status = ends.end_of(id);
    assert!(matches!(status, Status::Failed(Error::StillTouched { .. })), "{status:?}");
    let refused = side.ep.deregister(ends.mrs[0]);
    assert!(matches!(refused, Err(Error::StillTouched { .. })), "{refused:?}");
}

#[test]
fn a_cancel_ends_though_a_copy_of_ours_does_not() {
    let mut lane = LaneChaos::default();
    lane.ends[0].hold_completions = u32::MAX;
    lane.ends[0].is_ours = true;
    let ends = Ends::new(&[lane], Duration::from_millis(500));
    let id = ends.post(Op::Write);
    let side = &ends.sides[0];
    let _copy = side.lanes[0].hold_copy();
    let ep = side.ep.clone();
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || tell.send(ep.cancel(id)));
    let status = told.recv_timeout(FAR).expect("the cancel ends").expect("ours");
    assert!(matches!(status, Status::Failed(Error::StillTouched { .. })), "{status:?}");
    let lost = side.ep.check_connection(side.conn);
    assert!(lost.is_err_and(|e| e.to_string().contains("a copy that this process makes")));
}

/// A caller looks its connection up, and the connection ends before the caller posts.
#[test]
fn a_transfer_that_is_posted_meanwhile_does_not_either() {
    let ends = Ends::new(&vec![LaneChaos::default(); 2], PATIENT);
    (0..2).for_each(|lane| ends.stall(lane));
    let conn = ends.sides[0].connection();
    let mut posted = None;
    ends.disconnect_meanwhile(|ends| {
        // No lane has been killed yet.
        let transfer = ends.with(Op::Read, |request| {
            ends.sides[0].ep.start(Arc::clone(&conn), request, None).expect("posted")
        });
        assert!(ends.sides[0].lanes.iter().any(|lane| lane.posted() > 0), "nothing is under way");
        assert!(!transfer.finished(), "its memory may still be touched");
        posted = Some(transfer);
    });
    let transfer = posted.expect("it was posted");
    assert!(transfer.finished() && is_lost(&transfer.status()));
}

#[test]
fn a_transfer_of_a_lost_lane_is_posted_again_after_the_peers_word() {
    let ends = Ends::new(&vec![LaneChaos::default(); 2], PATIENT);
    ends.stall(0);
    ends.stall(1);
    // The lane with the least load takes the second.
    let ids = [(); 2].map(|()| ends.post(Op::Write));
    let [ours, theirs] = [0, 1].map(|side| &ends.sides[side]);
    assert_eq!([0, 1].map(|lane| ours.lanes[lane].posted()), [1, 1]);
    let hold = theirs.lanes[1].hold_kill();
    theirs.lanes[0].inner().pipe().resume();
    ours.lose(1);
    ours.until("the end of our end", || ours.connection().peer_owes_since_ms().is_some());
    // The peer may still place bytes that are under way.
    assert_eq!((ours.lanes[0].posted(), lost(ours)), (1, 0));
    theirs.until("the killing of the peer's end", || hold.is_waited_for());
    assert_eq!((ours.lanes[0].posted(), lost(ours)), (1, 0));
    drop(hold);
    for id in ids {
        assert!(matches!(ends.end_of(id), Status::Done(_)));
    }
    assert_eq!((ours.lanes[0].posted(), lost(ours)), (2, 1));
    assert!(ends.memory[0].pieces() == ends.memory[1].pieces());
}

/// A caller that has called a transfer off gets its memory back, and the transfer is not attempted
/// again.
#[test]
fn a_transfer_of_a_lost_lane_is_not_posted_again_if_it_is_to_end() {
    let ends = Ends::new(&vec![LaneChaos::default(); 2], PATIENT);
    (0..2).for_each(|lane| ends.stall(lane));
    let [ours, theirs] = [0, 1].map(|side| &ends.sides[side]);
    let transfers = [(); 2].map(|()| ends.transfer(ends.post(Op::Write)));
    let lane_of = |transfer: &Transfer| transfer.body.lock().ops[0].0;
    let on = |lane| transfers.iter().find(|t| lane_of(t) == lane).expect("one a lane");
    let (goes_on, to_end) = (on(0), on(1));
    let hold = theirs.lanes[1].hold_kill();
    ours.lose(1);
    ours.until("the end of our end", || ours.connection().peer_owes_since_ms().is_some());
    to_end.conn.fence(to_end, Fence::Cancel);
    assert!(!to_end.finished(), "the peer may still place it");
    drop(hold);
    theirs.lanes[0].inner().pipe().resume();
    ours.until("the end of both", || goes_on.finished() && to_end.finished());
    let ended = to_end.status();
    assert!(matches!(ended, Status::Failed(Error::Cancelled { .. })), "{ended:?}");
    assert!(matches!(goes_on.status(), Status::Done(_)));
    assert_eq!((ours.lanes[0].posted(), lost(ours)), (1, 1), "it was posted again");
}

/// Fences a transfer for its deadline, and judges it as if `tenths` tenths of its peer's time had
/// passed since. Returns whether the connection lives then.
fn lives(op: Op, is_ours: bool, tenths: u32) -> bool {
    let mut lane = LaneChaos::default();
    lane.ends[0].hold_completions = u32::MAX;
    lane.ends[0].is_ours = is_ours;
    let ends = Ends::new(&[lane], PATIENT);
    let transfer = ends.transfer(ends.post(op));
    if op == Op::Recv {
        let iovs = ends.memory[1].iovs(ends.mrs[1]);
        let sent = Request::new(ends.sides[1].conn, Op::Send, &iovs, &[]);
        ends.sides[1].ep.post(&sent).expect("posted");
        // A lane counts an operation before its transfer knows of it.
        ends.sides[0].until("the copy", || !transfer.body.lock().ops.is_empty());
    }
    transfer.conn.fence(&transfer, Fence::Deadline);
    deadline::enforce(&transfer, Instant::now() + PATIENT * tenths / 10);
    ends.sides[0].ep.check_connection(ends.sides[0].conn).is_ok()
}

#[test]
fn a_peer_has_its_time_to_let_a_transfer_end() {
    assert!(lives(Op::Write, false, 9), "not for as long as it takes to be called silent");
    assert!(!lives(Op::Write, false, 30), "but no longer");
}

#[test]
fn a_peer_is_not_given_up_for_a_transfer_that_only_we_hold() {
    for op in [Op::Write, Op::Read, Op::Recv] {
        assert!(lives(op, true, 1000), "{op:?}");
    }
}

#[test]
fn a_second_deregistration_leaves_the_next_region_in_the_slot_alone() {
    let mut sides = join_asking(1, &[LaneChaos::default()], PATIENT, [false; 2]);
    let mut rng = Rng::with_seed(1);
    let memory = [(); 2].map(|()| Memory::new(&mut rng, &[100]));
    let core = sides[0].ep.core();
    let mr = sides[0].register(&memory[0]);
    let slot = core.mrs.get(mr).expect("it is there").region.slot;
    // Two callers. When the faster one has the memory back, the slower one has not looked yet.
    let [first, second] = [(); 2].map(|()| core.mrs.revoke(mr).expect("it is there still"));
    core.drain(vec![first], None).expect("nobody is at it");
    let next = sides[0].register(&memory[1]);
    assert_eq!(core.mrs.get(next).expect("it is there").region.slot, slot);
    sides[0].lanes[0].touch(Some(slot));
    core.drain(vec![second], Some(Instant::now())).expect("that memory was given back");
    assert_eq!(sides[0].lanes[0].asked_about_touched(), 0, "the next one was looked at");
    sides[0].lanes[0].touch(None);
    move_one(&sides, &mut rng, Op::Write, 1000).expect("the peer was not given up");
    sides.iter_mut().for_each(Side::leave);
}

#[test]
fn all_lanes_at_a_region_are_asked_to_let_go_at_once() {
    let mut first = join_asking(1, &[LaneChaos::default()], PATIENT, [false; 2]);
    let second = join_again(&first, 2);
    let memory = Memory::new(&mut Rng::with_seed(1), &[100]);
    let mr = first[0].register(&memory);
    let slot = first[0].ep.core().mrs.get(mr).expect("it is there").region.slot;
    let lanes = [&first, &second].map(|sides| &sides[0].lanes[0]);
    lanes.iter().for_each(|lane| lane.touch(Some(slot)));
    std::thread::scope(|scope| {
        let given_back = scope.spawn(|| first[0].ep.deregister(mr));
        first[0].until("a question to everyone", || {
            lanes.iter().all(|lane| lane.asked_about_touched() > 0)
        });
        lanes.iter().for_each(|lane| lane.touch(None));
        given_back.join().expect("no panic").expect("nobody is at it any more");
    });
    second.iter().for_each(|side| side.ep.disconnect(side.conn).expect("it was there"));
    first.iter_mut().for_each(Side::leave);
}

#[test]
fn connections_are_closed_beside_each_other() {
    let first = join_asking(1, &[LaneChaos::default()], PATIENT, [false; 2]);
    let second = join_again(&first, 2);
    let holds = [&first, &second].map(|sides| sides[0].lanes[0].hold_kill());
    std::thread::scope(|scope| {
        let closed = scope.spawn(|| first[0].ep.close());
        first[0]
            .until("the killing of every lane", || holds.iter().all(|hold| hold.is_waited_for()));
        drop(holds);
        closed.join().expect("no panic").expect("nobody touches anything");
    });
    first[1].ep.close().expect("nobody touches anything");
}

#[test]
fn a_worker_that_does_not_end_is_left_to_end_by_itself() {
    let sides = join_asking(1, &[LaneChaos::default()], SHORT, [false; 2]);
    let ep = &sides[0].ep;
    let hold = sides[0].lanes[0].hold_progress();
    sides[0].until("a look at the lane", || {
        // Only a worker looks at the lane.
        sides[1].ep.send_notif(sides[1].conn, b"look", None).expect("posted");
        hold.is_waited_for()
    });
    let stuck = ep.close().expect_err("it is in the middle of something").to_string();
    assert!(stuck.starts_with("what the endpoint has cannot be given back: a worker"), "{stuck}");
    assert_eq!(ep.core().workers.running(), 1);
    drop(hold);
    // Now the worker ends, and `close` waits for it.
    ep.close().expect("nobody touches anything");
    assert_eq!(ep.core().workers.running(), 0);
    sides[1].ep.close().expect("nobody touches anything");
}
