//! Tests of the list of transfers.

use std::thread::scope;

use uccl_fabric::mem::Span;

use super::{
    super::transfer::tests::{joined, plan, posting, strong, wait_until, write},
    *,
};
use crate::Transport;

/// Two threads have put theirs into the list before either looks at the earlier ones.
#[test]
fn of_two_strong_signals_only_the_later_follows_the_other() {
    let (_pair, conn) = joined(Transport::Tcp);
    let [first, second] = [(); 2].map(|()| conn.admit_strong(plan(&conn)).expect("room"));
    assert!(first.1.is_empty());
    assert!(second.1.len() == 1 && Arc::ptr_eq(&second.1[0], &first.0));
}

#[test]
fn each_write_is_followed_by_one_strong_signal() {
    let (_pair, conn) = joined(Transport::Tcp);
    let writes: Vec<_> = (0..3).map(|_| write(&conn)).collect();
    let (first, followed) = strong(&conn);
    assert_eq!(followed, 3);
    let later = write(&conn);
    let (second, followed) = strong(&conn);
    assert_eq!(followed, 2, "the first stands for what was before it");
    later.op_ended();
    writes[1..].iter().for_each(Transfer::op_ended);
    assert!(!first.finished() && !second.finished());
    writes[0].op_ended();
    assert!(first.finished() && second.finished());
    assert!(later.finished());
    assert_eq!(strong(&conn).1, 0, "all have ended");
}

#[test]
fn a_refused_transfer_takes_no_room() {
    let (_pair, conn) = joined(Transport::Tcp);
    let list = &conn.core.transfers;
    let first = write(&conn);
    let mut rooms: Vec<_> = (1..MAX_PENDING).map(|_| list.room().expect("room")).collect();
    for _ in 0..3 {
        let refused = conn.admit(plan(&conn)).map(|transfer| transfer.id);
        assert!(matches!(refused, Err(Error::Full { .. })), "{refused:?}");
    }
    rooms.pop();
    let second = write(&conn);
    assert!(list.room().is_err(), "it has taken the room");
    for transfer in [first, second] {
        transfer.op_ended();
        rooms.push(list.room().expect("it gives its room back"));
    }
    drop(rooms);
    assert_eq!(list.pending.load(Relaxed), 0);
}

/// Another transfer may have its place in the list, in another context.
#[test]
fn a_write_that_has_ended_leaves_its_context() {
    let (_pair, conn) = joined(Transport::Tcp);
    let ended = write(&conn);
    ended.op_ended();
    // As many as are kept, and its place is used again.
    for _ in 0..KEPT {
        let other = conn.admit(Plan { context: 1, ..plan(&conn) }).expect("there is room");
        other.op_ended();
    }
    let again = conn.admit(Plan { context: 2, ..plan(&conn) }).expect("there is room");
    assert_eq!(index(again.id), index(ended.id));
    assert_eq!(strong(&conn).1, 0, "nothing of this context is under way");
}

#[test]
fn an_id_does_not_name_a_later_transfer_at_the_same_place() {
    let (_pair, conn) = joined(Transport::Tcp);
    let list = &conn.core.transfers;
    let end = |transfer: Arc<Transfer>| {
        transfer.op_ended();
        transfer.id
    };
    let first = end(write(&conn));
    assert!(matches!(list.find(first), Ok(Lookup::Ended(Status::Done(_)))));
    // As many as are kept, and it is forgotten.
    (0..KEPT).for_each(|_| _ = end(write(&conn)));
    assert!(matches!(list.find(first), Err(Error::UnknownTransfer(_))));
    let again = write(&conn);
    assert_eq!(index(again.id), index(first), "the place is used again");
    assert!(matches!(list.find(first), Err(Error::UnknownTransfer(_))));
    end(again);
    assert!(matches!(list.find(first), Err(Error::UnknownTransfer(_))));
}

#[test]
fn no_follower_is_told_from_within_one_that_was_told() {
    let (_pair, conn) = joined(Transport::Tcp);
    let all = [(); 4].map(|()| posting(&conn));
    let [first, one, other, of_one] = &all;
    first.lead(one);
    first.lead(other);
    one.lead(of_one);
    [of_one, other, one, first].into_iter().for_each(Transfer::op_ended);
    let ended = conn.core.transfers.inner.lock().kept.clone();
    let in_turn = all.each_ref().map(|transfer| index(transfer.id));
    assert_eq!(ended, in_turn, "the follower of a follower after all that follow the first");
}

#[test]
fn the_memory_of_a_transfer_may_be_deregistered_once_its_end_shows() {
    let (_pair, conn) = joined(Transport::Tcp);
    let memory = [0_u8; 64];
    let span = Span { addr: memory.as_ptr() as usize, len: memory.len() };
    let lease = conn.core.mrs.insert(span, |_| {}).expect("registered");
    let mr = lease.mr().id;
    let plan = Plan { leases: smallvec::smallvec![lease], ..plan(&conn) };
    let transfer = conn.admit(plan).expect("there is room");
    scope(|threads| {
        // The thread that ends it stops here, when everybody can see the end.
        let _list = conn.core.transfers.inner.lock();
        threads.spawn(|| transfer.op_ended());
        wait_until(|| transfer.finished());
        conn.core.mrs.revoke(mr).expect("nothing uses it");
    });
    conn.core.mrs.forget(mr);
}

/// More followers than a thread's stack has room for, if each were told by recursion.
#[test]
fn strong_signals_end_one_after_the_other_however_many_there_are() {
    for is_good in [true, false] {
        let (_pair, conn) = joined(Transport::Tcp);
        let first = write(&conn);
        let followers: Vec<_> = (1..MAX_PENDING).map(|_| strong(&conn)).collect();
        assert!(followers.iter().all(|(_, followed)| *followed == 1));
        if !is_good {
            first.note_error(Error::Closed);
        }
        first.op_ended();
        let is_as_first = |status| match status {
            Status::Done(_) => is_good,
            Status::Failed(e) => !is_good && matches!(e, Error::ContextFailed { context: 0 }),
            Status::Pending => false,
        };
        assert!(followers.iter().all(|(follower, _)| is_as_first(follower.status())));
    }
}
