//! Asks the owner of memory to copy where its GPUs reach memory that ours do not: between a GPU's
//! memory here and locked host memory of the peer.
//!
//! An operation becomes a message with keys made only for it, and the peer's answer ends it. If
//! something speaks against it (the peer declines, too much is unanswered, our memory cannot be
//! opened by others), the operation is left to the lanes.

use std::sync::Arc;

use uccl_fabric::{lane::OpKind, mem::RemoteSpan, region::Rights};
use uccl_wire::message::{AskPiece, Direction, MAX_ASK_PIECES, Place, Source};

use super::{
    core::connection::{
        Connection,
        loans::Grant,
        talk::{Ask, Talk},
        transfer::Transfer,
    },
    work::Work,
};

impl Connection {
    /// Asks the peer to make the copies of the marked pieces. Returns the work that is left for the
    /// lanes.
    pub(crate) fn ask_owner(&self, transfer: &Arc<Transfer>, work: Work, marks: &[bool]) -> Work {
        let (asked, mut rest) = work.partition(marks);
        for part in asked.chunks(MAX_ASK_PIECES) {
            if let Err(part) = self.ask(transfer, part) {
                rest.append(part);
            }
        }
        rest
    }

    /// Asks for one operation, or returns the work if that is not possible.
    fn ask(&self, transfer: &Arc<Transfer>, work: Work) -> Result<(), Work> {
        let (direction, rights) = match work.kind {
            OpKind::Read => (Direction::FromOwner, Rights::WRITE),
            OpKind::Write => (Direction::ToOwner, Rights::READ),
        };
        let mut talk = self.talk.lock();
        let Talk { session, message } = &mut *talk;
        if self.check_open(session).is_err() || !session.asks.admits(work.pieces()) {
            return Err(work);
        }
        let granted = self.grant(&transfer.body.lock().leases, &work.local, rights);
        let Ok((sources, grants)) = granted else { return Err(work) };
        let offered = |grant: &Grant| grant.region.backing.is_some();
        if !self.core.config.ask_owners && !grants.iter().all(offered) {
            return Err(work);
        }
        transfer.expect_ops(1);
        let remote = work.remote.clone();
        let pieces = sources.iter().zip(&remote).map(|(ours, theirs)| piece(theirs, ours));
        let ask = Ask { transfer: Arc::clone(transfer), work, grants };
        message.clear();
        session.asks.ask(direction, pieces, ask, message);
        self.send_message(&[message]);
        Ok(())
    }

    /// Whether the peer has not answered an ask of a transfer.
    pub(crate) fn is_asking_for(&self, transfer: &Arc<Transfer>) -> bool {
        self.talk.lock().session.asks.any(|ask| ask.is_of(transfer))
    }

    /// Withdraws all asks of a transfer. The peer's answers end them.
    pub(crate) fn withdraw_asks(&self, transfer: &Arc<Transfer>) {
        while self.tell(|session, out| session.asks.withdraw_one(|ask| ask.is_of(transfer), out)) {}
    }
}

fn piece(theirs: &RemoteSpan, ours: &Source) -> AskPiece {
    AskPiece {
        owner: Place { addr: theirs.addr, key: theirs.key, slot: theirs.slot },
        asker: Place { addr: ours.addr, key: ours.key, slot: ours.slot },
        len: ours.len,
    }
}
