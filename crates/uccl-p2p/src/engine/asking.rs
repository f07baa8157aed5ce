//! Having the owner of memory copy, where its GPUs reach what ours do not: what is between a GPU's memory
//! here and locked host memory that is the peer's alone.
//!
//! An operation becomes a message with keys made for just that, and the peer's answer is its end. Whatever
//! speaks against it (the peer declines, too much is unanswered, our memory cannot be opened by others)
//! leaves the operation to the lanes.

use std::sync::Arc;

use uccl_fabric::{
    lane::{Completion, OpError, OpKind},
    mem::RemoteSpan,
    region::Rights,
};
use uccl_wire::message::{Answer, AskPiece, Direction, MAX_ASK_PIECES, Place, Source};

use super::{
    connection::{Ask, Connection, Talk, Transfer},
    loans::Grant,
    regions::Mr,
    transfer::Fence,
    work::Work,
};

/// What is shorter is not worth two messages: the peer's and ours take some microseconds, in which copies
/// through a locked buffer (8 to 10 GB/s) move about as much.
const MIN_BYTES: u64 = 64 << 10;
impl Connection {
    /// Asks the peer to copy what it copies better; what is left is for the lanes.
    pub(crate) fn ask_owner(&self, transfer: &Arc<Transfer>, work: Work) -> Work {
        let always = self.core.config.always_ask_owners;
        if !always && work.len_bytes() < MIN_BYTES {
            return work;
        }
        let better = if always {
            vec![true; work.pieces()]
        } else {
            self.lanes[0].owner_copies(work.memory, &work.remote)
        };
        if better.is_empty() {
            return work;
        }
        let (asked, mut rest) = work.partition(&better);
        if !always && asked.len_bytes() < MIN_BYTES {
            rest.append(asked);
            return rest;
        }
        for part in asked.chunks(MAX_ASK_PIECES) {
            if let Err(part) = self.ask(transfer, part) {
                rest.append(part);
            }
        }
        rest
    }

    /// Whether the peer is asked to copy between this memory of its own and a region of ours, if it is much.
    pub(crate) fn asks_owner(&self, mr: &Mr, remote: RemoteSpan) -> bool {
        let always = self.core.config.always_ask_owners;
        let better = || self.lanes[0].owner_copies(mr.kind, &[remote]).contains(&true);
        always || mr.region.backing.is_some() && better()
    }

    /// Asks for one operation, or gives it back.
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
        if !self.core.config.always_ask_owners && !grants.iter().all(offered) {
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

    /// The peer says how an ask of ours ended: it does nothing about it any more.
    pub(super) fn ask_ended(self: &Arc<Self>, ask: Ask, answer: Answer) {
        let Ask { transfer, work, grants } = ask;
        drop(grants);
        let fence = transfer.body.lock().fence;
        match answer {
            Answer::Copied => transfer.complete(Ok(())),
            Answer::Refused(status) => transfer.complete(Err(OpError::Remote(status))),
            Answer::Declined if fence.is_none() => {
                self.post_work(&transfer, work);
                transfer.op_ended();
                self.kick_if_busy();
            }
            Answer::Cancelled | Answer::Declined => {
                transfer.note_error(transfer.fence_error(fence.unwrap_or(Fence::PeerCancel)));
                transfer.op_ended();
            }
        }
    }

    /// Whether the peer has not answered what it was asked for a transfer.
    pub(crate) fn is_asking_for(&self, transfer: &Arc<Transfer>) -> bool {
        self.talk.lock().session.asks.any(|ask| ask.is_of(transfer))
    }

    /// Tells the peer that a transfer wants nothing of it any more; its answers end the asks.
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
