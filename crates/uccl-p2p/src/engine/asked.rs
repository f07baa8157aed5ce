//! What the peer asks us to copy, because our GPUs reach our locked host memory and the peer's do not.
//!
//! It becomes a transfer that nobody here has asked for. What the peer may touch is decided as ever, by the
//! keys that it knows; the memory cannot be deregistered meanwhile without that being ended.

use std::sync::{Arc, atomic::Ordering};

use smallvec::{SmallVec, smallvec};
use uccl_device::MemoryKind;
use uccl_fabric::{
    lane::{OpKind, RemoteSpans, Spans},
    mem::{Access, RemoteSpan},
};
use uccl_wire::{
    frame::Status,
    message::{self, Answer, AskPieces, Direction, MAX_ASKED_PIECES, MAX_ASKS},
};

use super::{
    connection::Connection,
    plan::Work,
    transfer::{After, Fence, Kind, Plan, Transfer},
};
use crate::error::Error;

/// Something that the peer asked for and we have not answered.
struct Asked {
    id: u64,
    /// Slots of our regions that it is about.
    slots: SmallVec<[u32; 4]>,
    pieces: usize,
    /// What does it, once that has begun.
    transfer: Option<Arc<Transfer>>,
    /// A region that it is about was deregistered.
    revoked: bool,
}

/// What the peer asked for and we have not answered.
#[derive(Default)]
pub(crate) struct AskedFor {
    open: Vec<Asked>,
    pieces: usize,
}

impl AskedFor {
    /// Forgets all, for a connection that has ended.
    pub(crate) fn clear(&mut self) {
        self.open.clear();
        self.pieces = 0;
    }

    fn note(&mut self, id: u64, pieces: &AskPieces<'_>) -> Result<(), String> {
        let count = pieces.iter().len();
        if self.open.len() >= MAX_ASKS || self.pieces + count > MAX_ASKED_PIECES {
            return Err("more unanswered asks than agreed".into());
        }
        if self.open.iter().any(|asked| asked.id == id) {
            return Err(format!("a second ask {id}"));
        }
        let mut slots: SmallVec<[u32; 4]> = pieces.iter().map(|piece| piece.owner.slot).collect();
        slots.sort_unstable();
        slots.dedup();
        self.pieces += count;
        self.open.push(Asked { id, slots, pieces: count, transfer: None, revoked: false });
        Ok(())
    }

    /// Adds the slots of regions that an ask is about; whether some are new.
    fn add(&mut self, id: u64, regions: SmallVec<[u32; 4]>) -> bool {
        let Some(asked) = self.find(id) else { return false };
        let known = asked.slots.len();
        asked.slots.extend(regions);
        asked.slots.sort_unstable();
        asked.slots.dedup();
        asked.slots.len() > known
    }

    fn find(&mut self, id: u64) -> Option<&mut Asked> {
        self.open.iter_mut().find(|asked| asked.id == id)
    }

    fn remove(&mut self, id: u64) -> Option<Asked> {
        let at = self.open.iter().position(|asked| asked.id == id)?;
        let asked = self.open.remove(at);
        self.pieces -= asked.pieces;
        Some(asked)
    }
}

impl Connection {
    /// The peer asks for a copy.
    pub(crate) fn on_ask(
        self: &Arc<Self>,
        id: u64,
        direction: Direction,
        pieces: AskPieces<'_>,
    ) -> Result<(), String> {
        // Before the regions are looked at: who deregisters one looks here after having revoked it.
        self.asked.lock().note(id, &pieces)?;
        match self.admit_ask(id, direction, pieces).and_then(|work| self.begin_asked(id, work)) {
            Ok(transfer) => {
                transfer.op_ended();
                self.kick_if_busy();
            }
            Err(answer) => {
                self.asked.lock().remove(id);
                self.send_answer(id, answer);
            }
        }
        Ok(())
    }

    /// What an ask comes to, if the memory is the peer's to touch and we can do it.
    fn admit_ask(
        &self,
        id: u64,
        direction: Direction,
        pieces: AskPieces<'_>,
    ) -> Result<Work, Answer> {
        let (mut work, regions) = self.locate(direction, pieces)?;
        if self.asked.lock().add(id, regions) {
            // Some have keys that were made for parts of them, and may have gone before that was noted.
            work = self.locate(direction, pieces)?.0;
        }
        let able = || self.lanes[0].copies_as_owner(work.memory, &work.remote);
        if !self.core.config.always_ask_owners && !able() {
            return Err(Answer::Declined);
        }
        Ok(work)
    }

    /// What an ask comes to, and the slots of the regions that it is about.
    fn locate(
        &self,
        direction: Direction,
        pieces: AskPieces<'_>,
    ) -> Result<(Work, SmallVec<[u32; 4]>), Answer> {
        let (access, kind) = match direction {
            Direction::FromOwner => (Access::Read, OpKind::Write),
            Direction::ToOwner => (Access::Write, OpKind::Read),
        };
        let (local, remote) = (Spans::new(), RemoteSpans::new());
        let mut work = Work { kind, memory: MemoryKind::Host, local, remote };
        let mut regions = SmallVec::new();
        for (at, piece) in pieces.iter().enumerate() {
            let (owner, asker, len) = (piece.owner, piece.asker, piece.len);
            let ours = RemoteSpan { addr: owner.addr, len, key: owner.key, slot: owner.slot };
            let admitted = self.core.mrs.table.admit(&ours, access).map_err(Answer::Refused)?;
            if at > 0 && work.memory != admitted.kind {
                return Err(Answer::Declined);
            }
            work.memory = admitted.kind;
            work.local.push(admitted.span);
            work.remote.push(RemoteSpan {
                addr: asker.addr,
                len,
                key: asker.key,
                slot: asker.slot,
            });
            if regions.last() != Some(&admitted.region) {
                regions.push(admitted.region);
            }
        }
        Ok((work, regions))
    }

    fn begin_asked(self: &Arc<Self>, id: u64, work: Work) -> Result<Arc<Transfer>, Answer> {
        let plan = Plan {
            kind: Kind::Asked,
            conn: Arc::clone(self),
            bytes: work.len_bytes(),
            timeout: None,
            // Not leases, which would have a deregistration refused.
            leases: smallvec![],
            after: After::Answer(id),
            targets: smallvec![],
        };
        let transfer = self.admit(plan).map_err(|_| Answer::Declined)?;
        if let Some(asked) = self.asked.lock().find(id) {
            asked.transfer = Some(Arc::clone(&transfer));
        }
        self.post_work(&transfer, work);
        Ok(transfer)
    }

    /// The peer wants an ask no more. It is answered all the same, when nothing of it moves any more.
    pub(crate) fn on_ask_cancel(&self, id: u64) {
        let transfer = self.asked.lock().find(id).and_then(|asked| asked.transfer.clone());
        let Some(transfer) = transfer else { return };
        // Lanes must not be touched from here: a worker carries the fence out.
        transfer.body.lock().fence.get_or_insert(Fence::PeerCancel);
        transfer.fencing.store(true, Ordering::Release);
        self.core.workers.wake_all();
    }

    /// What the peer asked for has ended: the peer is told.
    pub(crate) fn asked_ended(&self, id: u64, error: Option<&Error>, fence: Option<Fence>) {
        let asked = self.asked.lock().remove(id);
        let answer = match error {
            None => {
                self.core.counters.copied_for_peers.fetch_add(1, Ordering::Relaxed);
                Answer::Copied
            }
            Some(_) if asked.is_some_and(|asked| asked.revoked) => {
                Answer::Refused(Status::UnknownKey)
            }
            Some(_) if fence.is_some() => Answer::Cancelled,
            // The peer tries it on its own, and then has the reason from its own lane.
            Some(e) => {
                tracing::debug!(conn = %self.id, "cannot copy for the peer: {e}");
                Answer::Declined
            }
        };
        self.send_answer(id, answer);
    }

    /// Ends what the peer asked for about a region that was revoked; whether there is any left.
    pub(crate) fn end_asked(self: &Arc<Self>, slot: u32) -> bool {
        let mut left = false;
        let mut to_end: SmallVec<[Arc<Transfer>; 4]> = SmallVec::new();
        for asked in self.asked.lock().open.iter_mut().filter(|a| a.slots.contains(&slot)) {
            left = true;
            asked.revoked = true;
            to_end.extend(asked.transfer.clone());
        }
        for transfer in to_end {
            // Once begun, workers carry a fence on.
            if !transfer.fencing.load(Ordering::Acquire) {
                self.fence(&transfer, Fence::PeerCancel);
            }
        }
        left
    }

    fn send_answer(&self, id: u64, answer: Answer) {
        let mut guard = self.outbox.lock();
        let outbox = &mut *guard;
        outbox.scratch.clear();
        message::answer(id, answer, &mut outbox.scratch);
        self.send_message(&[&outbox.scratch]);
    }
}

#[cfg(test)]
mod tests {
    use uccl_wire::message::{AskPiece, MAX_ASK_PIECES, Message, Place};

    use super::*;

    fn note(asked: &mut AskedFor, id: u64, count: usize) -> Result<(), String> {
        let place = |slot| Place { addr: 0, key: 0, slot };
        let piece = |i| AskPiece { owner: place(i as u32 % 3), asker: place(9), len: 1 };
        let mut bytes = Vec::new();
        message::ask(id, Direction::ToOwner, (0..count).map(piece), &mut bytes);
        match Message::decode(&bytes) {
            Ok(Message::Ask { pieces, .. }) => asked.note(id, &pieces),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_peer_asks_no_more_than_agreed() {
        let mut asked = AskedFor::default();
        for id in 0..MAX_ASKS as u64 {
            assert_eq!(note(&mut asked, id, 4), Ok(()));
        }
        assert!(note(&mut asked, 5000, 1).is_err());
        let first = asked.remove(0).expect("it was noted");
        assert_eq!((first.pieces, &first.slots[..]), (4, &[0, 1, 2][..]));
        assert!(note(&mut asked, 1, 1).is_err(), "the same number again");
        assert_eq!(note(&mut asked, 5000, 1), Ok(()));
        asked.clear();
        let most = (MAX_ASKED_PIECES / MAX_ASK_PIECES) as u64;
        for id in 0..most {
            assert_eq!(note(&mut asked, id, MAX_ASK_PIECES), Ok(()));
        }
        assert!(note(&mut asked, most, 1).is_err());
        asked.remove(7).expect("it was noted");
        assert_eq!(note(&mut asked, most, MAX_ASK_PIECES), Ok(()));
    }
}
