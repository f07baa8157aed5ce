//! Having the owner of memory copy, where its GPUs reach what ours do not: what is between a GPU's memory
//! here and locked host memory that is the peer's alone.
//!
//! An operation becomes a message with keys made for just that, and the peer's answer is its end. Whatever
//! speaks against it (the peer declines, too much is unanswered, our memory cannot be opened by others)
//! leaves the operation to the lanes.

use std::sync::Arc;

use uccl_fabric::{
    lane::{Completion, OpError, OpKind, RemoteSpans, Spans},
    mem::RemoteSpan,
    region::Rights,
};
use uccl_wire::message::{
    self, Answer, AskPiece, Direction, MAX_ASK_PIECES, MAX_ASKED_PIECES, MAX_ASKS, Place, Source,
};

use super::{
    aftermath::Lent,
    connection::Connection,
    grants::{Grant, Grants},
    numbered::Numbered,
    plan::Work,
    regions::Mr,
    transfer::{Fence, Transfer},
};

/// What is shorter is not worth two messages: the peer's and ours take some microseconds, in which copies
/// through a locked buffer (8 to 10 GB/s) move about as much.
const MIN_BYTES: u64 = 64 << 10;
/// Who has declined so often in a row is not asked any more.
const PATIENCE: u32 = 8;

/// Something that the peer was asked to copy and has not answered.
struct Ask {
    transfer: Arc<Transfer>,
    /// For the lanes, should the peer decline.
    work: Work,
    grants: Grants,
    /// The peer has been told that we want it no more.
    withdrawn: bool,
}

/// What a peer was asked and has not answered.
#[derive(Default)]
pub(crate) struct Asks {
    open: Numbered<Ask>,
    pieces: usize,
    /// How often in a row the peer has declined.
    declined: u32,
}

impl Asks {
    /// Forgets all, for a connection that ends; gives back what the peer may be using.
    pub(crate) fn clear(&mut self) -> Vec<Lent> {
        self.pieces = 0;
        let lent = |Ask { transfer, grants, .. }: Ask| {
            grants.into_iter().filter_map(move |grant| grant.end(&transfer))
        };
        self.open.drain().flat_map(lent).collect()
    }

    fn admits(&self, pieces: usize) -> bool {
        self.open.len() < MAX_ASKS
            && self.pieces + pieces <= MAX_ASKED_PIECES
            && self.declined < PATIENCE
    }

    fn answered(&mut self, id: u64, answer: Answer) -> Option<Ask> {
        let ask = self.open.remove(id)?;
        self.pieces -= ask.work.pieces();
        match answer {
            Answer::Copied => self.declined = 0,
            Answer::Declined => self.declined += 1,
            Answer::Cancelled | Answer::Refused(_) => {}
        }
        Some(ask)
    }
}

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
        let mut guard = self.outbox.lock();
        let outbox = &mut *guard;
        if outbox.open_to_more(self).is_err() || !outbox.asks.admits(work.pieces()) {
            return Err(work);
        }
        let granted = self.grant(&transfer.body.lock().leases, &work.local, rights);
        let Ok((sources, grants)) = granted else { return Err(work) };
        let offered = |grant: &Grant| grant.region.backing.is_some();
        if !self.core.config.always_ask_owners && !grants.iter().all(offered) {
            return Err(work);
        }
        transfer.expect_ops(1);
        let pieces = sources.iter().zip(&work.remote).map(|(ours, theirs)| piece(theirs, ours));
        outbox.scratch.clear();
        message::ask(outbox.asks.open.next(), direction, pieces, &mut outbox.scratch);
        outbox.asks.pieces += work.pieces();
        let transfer = Arc::clone(transfer);
        outbox.asks.open.push(Ask { transfer, work, grants, withdrawn: false });
        self.send_message(&[&outbox.scratch]);
        Ok(())
    }

    /// The peer says how an ask of ours ended: it does nothing about it any more.
    pub(crate) fn on_answer(self: &Arc<Self>, id: u64, answer: Answer) -> Result<(), String> {
        let ask = self.outbox.lock().asks.answered(id, answer);
        let ask = ask.ok_or_else(|| format!("an answer to ask {id}, which is not under way"))?;
        let Ask { transfer, work, grants, .. } = ask;
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
        Ok(())
    }

    /// Whether the peer has not answered what it was asked for a transfer.
    pub(crate) fn is_asking_for(&self, transfer: &Arc<Transfer>) -> bool {
        let mut outbox = self.outbox.lock();
        outbox.asks.open.iter_mut().any(|(_, ask)| Arc::ptr_eq(&ask.transfer, transfer))
    }

    /// Tells the peer that a transfer wants nothing of it any more; its answers end the asks.
    pub(crate) fn withdraw_asks(&self, transfer: &Arc<Transfer>) {
        let mut guard = self.outbox.lock();
        let outbox = &mut *guard;
        for (id, ask) in outbox.asks.open.iter_mut() {
            if !ask.withdrawn && Arc::ptr_eq(&ask.transfer, transfer) {
                ask.withdrawn = true;
                outbox.scratch.clear();
                message::ask_cancel(id, &mut outbox.scratch);
                self.send_message(&[&outbox.scratch]);
            }
        }
    }
}

fn piece(theirs: &RemoteSpan, ours: &Source) -> AskPiece {
    AskPiece {
        owner: Place { addr: theirs.addr, key: theirs.key, slot: theirs.slot },
        asker: Place { addr: ours.addr, key: ours.key, slot: ours.slot },
        len: ours.len,
    }
}

impl Work {
    fn pieces(&self) -> usize {
        self.local.len()
    }

    fn nothing(&self) -> Self {
        let (local, remote) = (Spans::new(), RemoteSpans::new());
        Self { kind: self.kind, memory: self.memory, local, remote }
    }

    fn append(&mut self, mut other: Self) {
        self.local.append(&mut other.local);
        self.remote.append(&mut other.remote);
    }

    /// The pieces that are marked, and the others.
    fn partition(self, marks: &[bool]) -> (Self, Self) {
        let (mut marked, mut others) = (self.nothing(), self.nothing());
        for ((local, remote), mark) in self.local.into_iter().zip(self.remote).zip(marks) {
            let part = if *mark { &mut marked } else { &mut others };
            part.local.push(local);
            part.remote.push(remote);
        }
        (marked, others)
    }

    fn chunks(self, most: usize) -> impl Iterator<Item = Self> {
        let count = self.pieces();
        (0..count).step_by(most).map(move |start| {
            let range = start..count.min(start + most);
            let (local, remote) = (self.local[range.clone()].into(), self.remote[range].into());
            Self { local, remote, ..self.nothing() }
        })
    }
}
