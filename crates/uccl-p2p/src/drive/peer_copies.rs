//! Copies that we make for the peer, because our GPUs reach our locked host memory and the peer's
//! do not.
//!
//! Each copy is a transfer without a caller here. As always, the keys that the peer knows decide
//! which memory it may touch. Deregistering the memory ends the copy first.

use std::sync::{Arc, atomic::Ordering};

use smallvec::{SmallVec, smallvec};
use uccl_device::MemoryKind;
use uccl_fabric::{
    lane::{OpKind, RemoteSpans, Spans},
    mem::{Access, RemoteSpan},
};
use uccl_wire::message::{Answer, AskPieces, Direction};

use super::{
    core::connection::{
        Connection,
        transfer::{After, Fence, Kind, Plan, Transfer},
    },
    work::Work,
};

impl Connection {
    /// Begins a copy that the peer asks for, or refuses it.
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

    /// The work that an ask stands for, if the peer may touch the memory and we can do the copy.
    fn admit_ask(
        &self,
        id: u64,
        direction: Direction,
        pieces: AskPieces<'_>,
    ) -> Result<Work, Answer> {
        let (mut work, regions) = self.locate(direction, pieces)?;
        if self.talk.lock().session.asked.add(id, regions) {
            // Some keys are for parts of regions. Such a region may have been revoked before its
            // slot was noted: check again.
            work = self.locate(direction, pieces)?.0;
        }
        let host = self.lanes.host.as_ref();
        let able = || host.is_some_and(|host| host.copies_as_owner(work.memory, &work.remote));
        if !self.core.config.ask_owners && !able() {
            return Err(Answer::Declined);
        }
        Ok(work)
    }

    /// The work that an ask stands for, and the slots of the regions that it uses.
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
            kind: Kind::PeerCopy,
            context: 0,
            conn: Arc::clone(self),
            bytes: work.len_bytes(),
            timeout: None,
            // No leases: a deregistration would be refused because of them.
            leases: smallvec![],
            after: After::Answer(id),
            targets: smallvec![],
        };
        let transfer = self.admit(plan).map_err(|_| Answer::Declined)?;
        self.talk.lock().session.asked.begun(id, Arc::clone(&transfer));
        let route = self.choose_lanes(&work);
        self.post(&transfer, work, route);
        Ok(transfer)
    }

    /// Ends copies for the peer that use a revoked region. Returns whether any are left.
    pub(crate) fn end_copies(self: &Arc<Self>, slot: u32) -> bool {
        let to_end = self.talk.lock().session.asked.revoke(slot);
        let are_left = to_end.is_some();
        for transfer in to_end.unwrap_or_default() {
            // Once a fence has begun, workers go on with it.
            if !transfer.fencing.load(Ordering::Acquire) {
                self.fence(&transfer, Fence::PeerCancel);
            }
        }
        are_left
    }
}
