//! Copies that the owner of the memory makes: slow ones, and requests without a copy.

use std::sync::atomic::Ordering::SeqCst;

use fastrand::Rng;
use uccl_chaos::each_seed;
use uccl_fabric::{mem::Span, region::Rights};
use uccl_wire::message::{self, Answer, AskPiece, Direction, Place};

use super::{
    PATIENT, SHORT,
    workload::move_one,
    world::{LaneChaos, Memory, Side, join_asking},
};
use crate::{
    Error, MrId, Op, Request, Status, TransferId,
    drive::{core::connection::loans::Grants, regions::Lease},
};

const LEN: usize = 300_000;

/// A write or a read of the first side. The second side, the owner, makes the copy.
struct OwnersCopy {
    sides: [Side; 2],
    local: Memory,
    remote: Memory,
    mr: MrId,
    there: MrId,
    transfer: TransferId,
}

impl OwnersCopy {
    /// Posts it. The owner holds back `hold_completions` completions.
    fn post(seed: u64, op: Op, hold_completions: u32, patience: std::time::Duration) -> Self {
        let mut lane = LaneChaos::default();
        lane.ends[1].hold_completions = hold_completions;
        let sides = join_asking(seed, &[lane], patience, [true; 2]);
        let mut rng = Rng::with_seed(seed);
        let (local, remote) = (Memory::new(&mut rng, &[LEN]), Memory::new(&mut rng, &[LEN]));
        let (mr, there) = (sides[0].register(&local), sides[1].register(&remote));
        let (iovs, adverts) = (local.iovs(mr), remote.adverts(&sides[1], there));
        let conn = sides[0].conn;
        let request = Request::new(conn, op, &iovs, &adverts);
        let transfer = sides[0].ep.post(&request).expect("posted");
        Self { sides, local, remote, mr, there, transfer }
    }

    /// Waits until the owner has begun the copy.
    fn until_under_way(&self) {
        let owner = &self.sides[1];
        owner.until("the beginning of an ask", || is_posted(owner) || self.is_done());
    }

    fn is_fenced_at_owner(&self) -> bool {
        let transfers = &self.sides[1].ep.core().transfers;
        !transfers.unfinished(|t| t.fencing.load(SeqCst)).is_empty()
    }

    fn is_done(&self) -> bool {
        !matches!(self.status(), Status::Pending)
    }

    fn status(&self) -> Status {
        self.sides[0].ep.poll(self.transfer).expect("it is known")
    }

    fn leave(mut self) {
        self.sides.iter_mut().for_each(Side::leave);
        assert!(self.local.guards_hold() && self.remote.guards_hold());
    }
}

#[test]
fn owners_copy_if_both_sides_agreed_to_it() {
    for (asks, copies) in [([true, true], 2), ([false, true], 0), ([true, false], 0)] {
        let mut sides = join_asking(1, &[LaneChaos::default()], PATIENT, asks);
        let mut rng = Rng::with_seed(1);
        for op in [Op::Write, Op::Read] {
            move_one(&sides, &mut rng, op, 5 << 20).expect("one of them copies");
        }
        assert_eq!(sides[1].ep.stats().expect("ours").copied_for_peers, copies, "{asks:?}");
        // The copies for the other side are no transfers of this side's callers.
        assert_eq!(sides[1].ep.stats().expect("ours").transfers_posted, 0);
        sides.iter_mut().for_each(Side::leave);
    }
}

#[test]
fn deregistration_ends_a_copy_that_was_asked_for() {
    each_seed(|seed| {
        let op = if seed % 2 == 0 { Op::Write } else { Op::Read };
        let copy = OwnersCopy::post(seed, op, 3000, PATIENT);
        copy.until_under_way();
        copy.sides[1].ep.deregister(copy.there).expect("deregistered");
        let now = copy.remote.now();
        let conn = copy.sides[1].connection();
        assert!(!conn.end_copies(0), "it is not over");
        drop(conn);
        copy.sides[0].until("the end of a transfer", || copy.is_done());
        let status = copy.status();
        let revoked = matches!(&status, Status::Failed(Error::RemoteAccess { reason, .. })
            if reason.contains("deregistration"));
        assert!(revoked || matches!(status, Status::Done(_)), "{status:?}");
        assert!(copy.remote.now() == now, "a byte lands after the deregistration");
        copy.sides[0].ep.deregister(copy.mr).expect("nothing uses it");
        copy.leave();
    });
}

#[test]
fn a_cancel_waits_for_the_owner() {
    each_seed(|seed| {
        let op = if seed % 2 == 0 { Op::Write } else { Op::Read };
        let copy = OwnersCopy::post(seed, op, 3000, PATIENT);
        if seed % 3 > 0 {
            copy.until_under_way();
        }
        let status = copy.sides[0].ep.cancel(copy.transfer).expect("it is known");
        let now = (copy.local.now(), copy.remote.now());
        assert!(
            matches!(status, Status::Done(_) | Status::Failed(Error::Cancelled { .. })),
            "{status:?}"
        );
        // The key that was made for the ask is revoked, and the owner copies nothing more.
        copy.sides[0].ep.deregister(copy.mr).expect("nothing uses it");
        assert!(copy.sides[0].ep.core().mrs.table.is_empty());
        copy.sides[1].ep.deregister(copy.there).expect("nothing uses it");
        assert!((copy.local.now(), copy.remote.now()) == now);
        copy.leave();
    });
}

#[test]
fn an_owner_that_does_not_end_it_is_given_up() {
    let copy = OwnersCopy::post(1, Op::Read, u32::MAX, SHORT);
    copy.until_under_way();
    let status = std::thread::scope(|scope| {
        let ended = scope.spawn(|| copy.sides[0].ep.cancel(copy.transfer).expect("it is known"));
        // The owner has received the cancel.
        copy.sides[1].until("a fence", || copy.is_fenced_at_owner());
        ended.join().expect("no panic")
    });
    assert!(matches!(status, Status::Failed(Error::Cancelled { .. })), "{status:?}");
    let lost = copy.sides[0].ep.check_connection(copy.sides[0].conn);
    assert!(matches!(lost, Err(Error::ConnectionLost { .. })), "{lost:?}");
    copy.sides[0].ep.deregister(copy.mr).expect("nothing uses it");
    copy.leave();
}

#[test]
fn memory_that_is_being_copied_for_a_peer_is_not_given_back() {
    let copy = OwnersCopy::post(1, Op::Write, u32::MAX, SHORT);
    copy.until_under_way();
    // The copy goes on, whichever side gives the other up first.
    let hold = copy.sides[1].lanes[0].hold_copy();
    let refused = std::thread::scope(|scope| {
        let refused = scope.spawn(|| copy.sides[1].ep.deregister(copy.there));
        // The deregistration ends the copy, and does not only wait for it.
        copy.sides[1].until("a fence", || copy.is_fenced_at_owner());
        refused.join().expect("no panic").expect_err("a copy is under way")
    });
    assert!(refused.to_string().contains("may still touch"), "{refused}");
    drop(hold);
    copy.sides[0].until("the end of a transfer", || copy.is_done());
    copy.leave();
}

fn lease_of(side: &Side, mr: MrId) -> Lease {
    side.ep.core().mrs.look_up(mr, |mr| mr.lease()).expect("registered")
}

/// A peer asks for a copy of memory that was lent to it for a send, and does not wait for the
/// answer.
#[test]
fn memory_is_not_given_back_while_a_part_of_it_is_copied() {
    let mut lane = LaneChaos::default();
    lane.ends[0].hold_completions = u32::MAX;
    let mut sides = join_asking(1, &[lane], SHORT, [true; 2]);
    let mut rng = Rng::with_seed(1);
    let (ours, theirs) = (Memory::new(&mut rng, &[LEN]), Memory::new(&mut rng, &[LEN]));
    let (mr, there) = (sides[0].register(&ours), sides[1].register(&theirs));
    let lease = [lease_of(&sides[0], mr)];
    let span = Span { addr: ours.addr(), len: LEN };
    let granted = sides[0].connection().grant(&lease, &[span], Rights::READ);
    let (sources, grants) = granted.expect("granted");
    let (source, target) = (sources[0], sides[1].ep.core().mrs.get(there).expect("registered"));
    let piece = AskPiece {
        owner: Place { addr: source.addr, key: source.key, slot: source.slot },
        asker: Place {
            addr: theirs.addr() as u64,
            key: target.region.key,
            slot: target.region.slot,
        },
        len: source.len,
    };
    let mut bytes = Vec::new();
    message::ask(1, Direction::FromOwner, [piece].into_iter(), &mut bytes);
    sides[1].connection().send_message(&[&bytes]);
    sides[0].until("the beginning of an ask", || is_posted(&sides[0]));
    // The end of the send does the same.
    drop(grants);
    drop(lease);
    // The copy goes on, whichever side gives the other up first.
    let copy = sides[0].lanes[0].hold_copy();
    let refused = sides[0].ep.deregister(mr).expect_err("a copy is under way");
    assert!(refused.to_string().contains("may still touch"), "{refused}");
    drop((copy, target));
    sides.iter_mut().for_each(Side::leave);
}

/// Whether a lane has an operation of a transfer: a transfer that is called off before that moves
/// nothing.
fn is_posted(side: &Side) -> bool {
    let transfers = side.ep.core().transfers.unfinished(|_| true);
    transfers.iter().any(|transfer| !transfer.body.lock().ops.is_empty())
}

/// Sends a message from one side. Returns whether the other accepts it.
fn says(message: &[u8]) -> bool {
    let mut sides = join_asking(1, &[LaneChaos::default()], PATIENT, [true; 2]);
    let conn = sides[0].connection();
    conn.send_message(&[message]);
    drop(conn);
    // A notification behind the message: if it succeeds, the message has been read.
    let copy = sides[0].ep.run_notif(sides[0].conn, b"?", None, &mut crate::NoInterrupt);
    let check = sides[1].ep.check_connection(sides[1].conn);
    if let Err(e) = &check {
        assert!(matches!(e, Error::Protocol { .. }), "{e}");
    }
    assert_eq!(copy.is_ok(), check.is_ok());
    sides.iter_mut().for_each(Side::leave);
    check.is_ok()
}

#[test]
fn answers_to_nothing_end_the_connection() {
    let mut bytes = Vec::new();
    message::answer(1, Answer::Copied, &mut bytes);
    assert!(!says(&bytes));
    bytes.clear();
    // A cancel may cross the answer on its way.
    message::ask_cancel(1, &mut bytes);
    assert!(says(&bytes));
}

#[test]
fn keys_made_for_an_ask_are_good_for_no_more() {
    let sides = join_asking(1, &[LaneChaos::default()], PATIENT, [true; 2]);
    let mut rng = Rng::with_seed(1);
    let memory = Memory::new(&mut rng, &[100, 200, 300]);
    let mr = sides[0].register(&memory);
    let mr = sides[0].ep.core().mrs.get(mr).expect("registered");
    let lease = [lease_of(&sides[0], mr.id)];
    let spans: Vec<_> =
        memory.iovs(mr.id).iter().map(|iov| Span { addr: iov.ptr, len: iov.len }).collect();
    let conn = sides[0].connection();
    let (sources, grants): (_, Grants) =
        conn.grant(&lease, &spans[1..], Rights::READ).expect("granted");
    let region = grants[0].region;
    assert_eq!((grants.len(), region.rights), (1, Rights::READ));
    // From the first piece to the last, without a byte before or behind them.
    let end = spans[2].addr + spans[2].len;
    assert_eq!((region.span.addr, region.span.addr + region.span.len), (spans[1].addr, end));
    assert!(region.key != mr.region.key);
    assert!(sources.iter().zip(&spans[1..]).all(|(source, span)| {
        (source.key, source.slot) == (region.key, region.slot)
            && (source.addr, source.len) == (span.addr as u64, span.len as u64)
    }));
    let outside =
        conn.grant(&lease, &[Span { addr: memory.addr() + memory.len(), len: 1 }], Rights::READ);
    assert!(outside.is_err());
    drop(grants);
    assert_eq!(sides[0].ep.core().mrs.table.len(), 1);
}
