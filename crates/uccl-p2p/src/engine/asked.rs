//! Copies that we make for the peer, because our GPUs reach our locked host memory and the peer's do not.
//!
//! Each becomes a transfer that nobody here has asked for. What the peer may touch is decided as ever, by the
//! keys that it knows; the memory cannot be deregistered meanwhile without that being ended.

use std::sync::{Arc, atomic::Ordering};

use smallvec::{SmallVec, smallvec};
use uccl_device::MemoryKind;
use uccl_fabric::{
    lane::{OpKind, RemoteSpans, Spans},
    mem::{Access, RemoteSpan},
};
use uccl_proto::asked::CopyEnd;
use uccl_wire::message::{Answer, AskPieces, Direction};

use super::{
    connection::{Connection, Transfer},
    transfer::{After, Fence, Kind, Plan},
    work::Work,
};
use crate::error::Error;

impl Connection {
    /// The peer asks for a copy.
    pub(super) fn begin_copy(
        self: &Arc<Self>,
        id: u64,
        direction: Direction,
        pieces: AskPieces<'_>,
    ) {
        match self.admit_ask(id, direction, pieces).and_then(|work| self.begin_asked(id, work)) {
            Ok(transfer) => {
                transfer.op_ended();
                self.kick_if_busy();
            }
            Err(answer) => self.tell(|session, out| session.asked.answer(id, answer, out)),
        }
    }

    /// What an ask comes to, if the memory is the peer's to touch and we can do it.
    fn admit_ask(
        &self,
        id: u64,
        direction: Direction,
        pieces: AskPieces<'_>,
    ) -> Result<Work, Answer> {
        let (mut work, regions) = self.locate(direction, pieces)?;
        if self.talk.lock().session.asked.add(id, regions) {
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
        self.talk.lock().session.asked.begun(id, Arc::clone(&transfer));
        self.post_work(&transfer, work);
        Ok(transfer)
    }

    /// A copy for the peer has ended: the peer is told.
    pub(crate) fn copy_ended(&self, id: u64, error: Option<&Error>, fence: Option<Fence>) {
        let end = match error {
            None => CopyEnd::Copied,
            Some(_) if fence.is_some() => CopyEnd::Fenced,
            Some(e) => {
                tracing::debug!(conn = %self.id, "cannot copy for the peer: {e}");
                CopyEnd::Failed
            }
        };
        if end == CopyEnd::Copied {
            self.core.counters.copied_for_peers.fetch_add(1, Ordering::Relaxed);
        }
        self.tell(|session, out| session.asked.ended(id, end, out));
    }

    /// Ends copies for the peer that are about a region which was revoked; whether there are any left.
    pub(crate) fn end_copies(self: &Arc<Self>, slot: u32) -> bool {
        let to_end = self.talk.lock().session.asked.revoke(slot);
        let are_left = to_end.is_some();
        for transfer in to_end.unwrap_or_default() {
            // Once begun, workers carry a fence on.
            if !transfer.fencing.load(Ordering::Acquire) {
                self.fence(&transfer, Fence::PeerCancel);
            }
        }
        are_left
    }
}
