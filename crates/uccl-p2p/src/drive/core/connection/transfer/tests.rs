//! Tests of transfers and of their steps.

use std::thread::{scope, sleep};

use super::*;
use crate::{Transport, drive::pair::JoinedPair};

/// Longer than any awaited event takes.
const FAR: Duration = Duration::from_secs(20);

/// Two endpoints, and the connection of the first of them.
pub(in super::super) fn joined(by: Transport) -> (JoinedPair, Arc<Connection>) {
    let pair = JoinedPair::by(by);
    let conn = pair.a.core().conn(pair.to_b).expect("a connection");
    (pair, conn)
}

pub(in super::super) fn plan(conn: &Arc<Connection>) -> Plan {
    Plan {
        kind: Kind::Write,
        context: 0,
        conn: Arc::clone(conn),
        bytes: 1,
        timeout: None,
        leases: SmallVec::new(),
        after: After::Publish,
        targets: SmallVec::new(),
    }
}

/// A write that is being posted.
pub(in super::super) fn posting(conn: &Arc<Connection>) -> Arc<Transfer> {
    conn.admit(plan(conn)).expect("there is room")
}

/// A write of one operation, which has been posted.
pub(in super::super) fn write(conn: &Arc<Connection>) -> Arc<Transfer> {
    let transfer = posting(conn);
    transfer.expect_ops(1);
    transfer.op_ended();
    transfer
}

/// A strong signal, which has been posted, and how many it follows.
pub(in super::super) fn strong(conn: &Arc<Connection>) -> (Arc<Transfer>, usize) {
    let (transfer, earlier) = conn.admit_strong(plan(conn)).expect("there is room");
    earlier.iter().for_each(|earlier| earlier.lead(&transfer));
    transfer.op_ended();
    (transfer, earlier.len())
}

/// Waits for a step of another thread.
pub(in super::super) fn wait_until(is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < FAR, "the other thread does not go on");
        sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_transfer_with_no_copies_left_waits_for_nobody() {
    // Only this process copies between two processes of a host.
    let (_pair, conn) = joined(Transport::Local);
    let transfer = posting(&conn);
    assert!(transfer.waits_for_peer(), "nothing is under way here");
    transfer.expect_ops(1);
    transfer.body.lock().ops.push((0, OpName(1)));
    transfer.op_ended();
    assert!(!transfer.waits_for_peer() && !transfer.finished());
    // As they are when the connection learns that the last copy has ended.
    transfer.ops_left.store(0, SeqCst);
    transfer.body.lock().ops.clear();
    assert!(!transfer.waits_for_peer() && !transfer.finished());
    transfer.publish(Ok(()));
    assert!(transfer.finished());
}

#[test]
fn a_follower_that_stops_following_is_not_told_again() {
    let (_pair, conn) = joined(Transport::Tcp);
    let leader = write(&conn);
    let (follower, earlier) = conn.admit_strong(plan(&conn)).expect("there is room");
    earlier.iter().for_each(|earlier| earlier.lead(&follower));
    // Its own operation.
    follower.expect_ops(1);
    follower.op_ended();
    follower.stop_following();
    leader.op_ended();
    assert!(leader.finished() && !follower.finished(), "its own operation is under way");
    follower.op_ended();
    assert!(follower.finished());
}

#[test]
fn an_ended_transfer_follows_nobody_and_keeps_nothing() {
    let (_pair, conn) = joined(Transport::Tcp);
    let leader = write(&conn);
    let (follower, earlier) = conn.admit_strong(plan(&conn)).expect("there is room");
    // Its connection ends meanwhile.
    follower.publish(Err(Error::Closed));
    earlier.iter().for_each(|earlier| earlier.lead(&follower));
    assert_eq!(Arc::strong_count(&follower), 1, "it keeps itself");
    drop((leader, earlier));
}

#[test]
fn a_failure_is_noted_before_anybody_can_see_it() {
    let (_pair, conn) = joined(Transport::Tcp);
    let transfer = posting(&conn);
    transfer.note_error(Error::Closed);
    transfer.note_error(Error::Interrupted);
    scope(|threads| {
        // The thread that ends it stops here, when it has the result.
        let _contexts = conn.failed_contexts.lock();
        threads.spawn(|| transfer.op_ended());
        wait_until(|| transfer.body.lock().result.is_some());
        for _ in 0..20 {
            assert!(!transfer.finished(), "it is seen before it is noted");
            sleep(Duration::from_millis(1));
        }
    });
    assert!(transfer.finished() && conn.failed_contexts.check(0).is_err());
    assert!(matches!(transfer.status(), Status::Failed(Error::Closed)), "the first stays");
}

#[test]
fn a_held_transfer_ends_with_its_hold_after_its_connection() {
    let (_pair, conn) = joined(Transport::Tcp);
    let transfer = posting(&conn);
    let [first, second] = [transfer.hold(), transfer.hold()];
    conn.fail(Error::Closed);
    assert!(conn.has_ended() && !transfer.finished(), "it is held");
    drop(first);
    assert!(!transfer.finished(), "it is held still");
    drop(second);
    assert!(transfer.finished());
}

#[test]
fn an_ended_transfer_does_not_end_anew() {
    let (_pair, conn) = joined(Transport::Tcp);
    let transfer = posting(&conn);
    transfer.publish(Err(Error::Closed));
    for verdict in [Ok(()), Err(Error::Interrupted)] {
        transfer.publish(verdict);
        assert!(matches!(transfer.status(), Status::Failed(Error::Closed)));
    }
    assert_eq!(conn.pending.load(SeqCst), 0, "its connection is told once");
}
