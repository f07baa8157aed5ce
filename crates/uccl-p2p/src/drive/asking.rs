//! Asks the owner of memory to copy where its GPUs reach memory that ours do not: between a GPU's
//! memory here and locked host memory of the peer.
//!
//! An operation becomes a message with keys made only for it, and the peer's answer ends it. If
//! something speaks against it (the peer declines, too much is unanswered, our memory cannot be
//! opened by others), the operation is left to the lanes.

use std::sync::Arc;

use uccl_device::MemoryKind;
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

/// Less is not worth two messages: the peer's and ours take some microseconds, in which copies
/// through a locked buffer (8 to 10 GB/s) move about as much.
const MIN_BYTES: u64 = 64 << 10;
impl Connection {
    /// Asks the peer to make the copies that it makes better. Returns the work that is left for the
    /// lanes.
    pub(crate) fn ask_owner(&self, transfer: &Arc<Transfer>, work: Work) -> Work {
        if !self.asks_about(&work) {
            return work;
        }
        let always = self.core.config.ask_owners;
        let better = if always {
            vec![true; work.pieces()]
        } else {
            self.owner_copies(work.memory, &work.remote)
        };
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

    /// Whether the peer may be asked to make some of these copies.
    pub(super) fn asks_about(&self, work: &Work) -> bool {
        let better = || !self.owner_copies(work.memory, &work.remote).is_empty();
        self.core.config.ask_owners || work.len_bytes() >= MIN_BYTES && better()
    }

    /// Whether a long copy between this memory of the peer's and a region of ours is left to the
    /// peer.
    pub(crate) fn asks_owner(&self, mr: &Mr, remote: RemoteSpan) -> bool {
        let always = self.core.config.ask_owners;
        let better = || self.owner_copies(mr.kind, &[remote]).contains(&true);
        always || mr.region.backing.is_some() && better()
    }

    /// Which pieces the peer copies better. Empty if the peer is on another host or copies none of
    /// them better.
    fn owner_copies(&self, ours: MemoryKind, remote: &[RemoteSpan]) -> Vec<bool> {
        let host = self.links.host.as_ref();
        host.map_or_else(Vec::new, |host| host.owner_copies(ours, remote))
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

    /// Handles the peer's answer to an ask: the peer is done with it.
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
