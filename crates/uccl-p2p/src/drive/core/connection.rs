//! Connections: lanes to one peer, and the unfinished work on them.

pub(crate) mod attached_lane;
pub(crate) mod care;
pub(crate) mod deferred_transfers;
mod end;
pub(crate) mod loans;
pub(crate) mod talk;
pub(crate) mod transfer;
pub(crate) mod transfers;

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::*, fence},
    },
};

use parking_lot::Mutex;
use uccl_fabric::lane::{LaneError, Moves};
use uccl_proto::assembler::fragments;

use self::{
    care::{Claim, LaneCare},
    deferred_transfers::DeferredTransfers,
    end::End,
    talk::Talk,
    transfer::{Plan, Transfer},
    transfers::{Earlier, Room},
};
use super::Core;
use crate::{
    drive::{
        contexts::FailedContexts, gpu_signal::GpuSignal, lane_set::LaneSet, links::Links,
        lookup_cache::LookupCache, seats::Seat,
    },
    error::{Error, Result},
    ids::ConnId,
    types::{Acceptance, ConnInfo},
};

/// The peer at the other end.
pub(crate) struct Peer {
    /// Its name in errors.
    pub(crate) name: Arc<str>,
    pub(crate) addr: SocketAddr,
    pub(crate) gpu_index: u32,
    pub(crate) instance: u64,
    pub(crate) same_host: bool,
    /// It changes words for signals that come with writes. Older versions do not know such writes.
    pub(crate) takes_signals: bool,
    /// It answers look-ups of its published regions. Older versions do not know look-ups.
    pub(crate) publishes: bool,
}

/// Lanes to one peer.
pub(crate) struct Connection {
    pub(crate) id: ConnId,
    pub(crate) core: Arc<Core>,
    pub(crate) peer: Peer,
    pub(crate) lanes: LaneSet,
    /// The connection for `accept`, kept here until its rails have been tried.
    pub(crate) accepting: Mutex<Option<Acceptance>>,
    pub(crate) care: LaneCare,
    /// The protocol session. It stays locked while a message is sent, so that messages are sent in
    /// the order in which they were encoded.
    pub(crate) talk: Mutex<Talk>,
    pub(crate) deferred: DeferredTransfers,
    /// Contexts in which a write has failed.
    pub(crate) failed_contexts: FailedContexts,
    pub(in crate::drive) gpu_signal: GpuSignal,
    /// Regions of the peer's that were looked up.
    pub(crate) looked_up: LookupCache,
    pub(in crate::drive) end: End,
    pub(crate) pending: AtomicUsize,
    /// Where the peer has opened the connection: one seat for each of its streams.
    _seats: Vec<Seat>,
}

/// How a lane other than the rail lane moves data, by the name of its link.
fn moves_over(link: &str) -> Moves {
    match link {
        "tcp" => Moves::Tcp,
        "shm" | "fifo" => Moves::Staged,
        _ => Moves::Direct,
    }
}

impl Connection {
    /// A connection that consists of these lanes.
    pub(crate) fn new(id: ConnId, core: Arc<Core>, peer: Peer, links: Links) -> Self {
        let lanes = LaneSet::new(links);
        Self {
            accepting: Mutex::default(),
            id,
            core,
            peer,
            talk: Mutex::new(Talk::new(lanes.all.len())),
            lanes,
            care: LaneCare::default(),
            deferred: DeferredTransfers::default(),
            failed_contexts: FailedContexts::default(),
            gpu_signal: GpuSignal::default(),
            looked_up: LookupCache::default(),
            end: End::default(),
            pending: AtomicUsize::new(0),
            _seats: Vec::new(),
        }
    }

    /// The same connection, which keeps these seats until nothing is left of it.
    pub(crate) fn sitting_on(self, seats: Vec<Seat>) -> Self {
        Self { _seats: seats, ..self }
    }

    pub(crate) fn info(&self) -> ConnInfo {
        let caps = self.lanes.all[0].caps();
        let rails = self.lanes.rails_up().map(|rails| (rails.link(), rails.paths_up()));
        let moves = match self.lanes.rails_up() {
            Some(rails) => rails.moves(),
            None => moves_over(caps.link),
        };
        let (link, lanes) =
            rails.unwrap_or_else(|| (caps.link, self.lanes.living_streams().count()));
        ConnInfo {
            instance: self.peer.instance,
            addr: self.peer.addr,
            gpu_index: self.peer.gpu_index,
            peer: self.peer.name.to_string(),
            same_host: self.peer.same_host,
            path: link.to_owned(),
            moves,
            lanes,
            checksum: caps.checksum && rails.is_none(),
        }
    }

    /// The same as [`Self::lost_error`], for when no error has been noted yet: `reason` is the
    /// observed failure.
    pub(crate) fn lost_to(&self, reason: impl ToString) -> Error {
        Error::ConnectionLost { peer: Arc::clone(&self.peer.name), reason: reason.to_string() }
    }

    /// Whether it has failed or was closed. Its lanes may still touch memory.
    pub(crate) fn is_failed(&self) -> bool {
        self.end.has_begun()
    }

    /// Keeps workers off while the caller makes progress itself.
    pub(crate) fn claim(&self) -> Claim<'_> {
        self.care.claim(&self.core.workers)
    }

    /// Whether the connection survives when this lane dies with this error.
    pub(crate) fn survives(&self, lane: usize, e: &LaneError) -> bool {
        lane > 0 && !matches!(e, LaneError::Closed | LaneError::Protocol(_))
    }

    pub(in crate::drive) fn unfinished(self: &Arc<Self>) -> Vec<Arc<Transfer>> {
        self.core.transfers.unfinished(|transfer| Arc::ptr_eq(&transfer.conn, self))
    }

    /// Makes a transfer on this connection, unless too many are unfinished.
    pub(crate) fn admit(&self, plan: Plan) -> Result<Arc<Transfer>> {
        let transfer = self.core.transfers.insert(plan)?;
        self.admitted(&transfer);
        Ok(transfer)
    }

    /// Makes a transfer on this connection for which there is room.
    pub(crate) fn admit_in(&self, room: Room<'_>, plan: Plan) -> Arc<Transfer> {
        let transfer = self.core.transfers.insert_in(room, plan);
        self.admitted(&transfer);
        transfer
    }

    /// Makes a transfer with a strong signal, as [`admit`](Self::admit) does. It has to
    /// [follow](Self::follow) the writes that are returned.
    pub(crate) fn admit_strong(&self, plan: Plan) -> Result<(Arc<Transfer>, Earlier)> {
        let (transfer, earlier) = self.core.transfers.insert_strong(plan)?;
        self.admitted(&transfer);
        Ok((transfer, earlier))
    }

    fn admitted(&self, transfer: &Transfer) {
        if self.pending.fetch_add(1, AcqRel) == 0 {
            self.talk.lock().session.liveness.rest(0);
        }
        if transfer.kind.is_callers() {
            self.core.counters.posted.fetch_add(1, Relaxed);
        }
    }

    /// Notes that a transfer has ended.
    pub(in crate::drive) fn transfer_ended(&self, transfer: &Transfer, is_done: bool) {
        self.pending.fetch_sub(1, AcqRel);
        if transfer.kind.is_callers() {
            let counters = &self.core.counters;
            match is_done {
                true => counters.ended_well(transfer.kind.op(), transfer.bytes.load(Relaxed)),
                false => _ = counters.failed.fetch_add(1, Relaxed),
            }
        }
        self.core.transfers.ended(transfer);
    }

    /// Sends a message that consists of these parts; the first part begins with the message's
    /// prefix. A message longer than the lane takes is cut into fragments. The caller must hold the
    /// session's lock: it keeps the fragments together and the messages in order.
    pub(crate) fn send_message(&self, parts: &[&[u8]]) {
        let lane = self.lanes.messages();
        let max = lane.caps().max_message;
        let len: usize = parts.iter().map(|part| part.len()).sum();
        let sent =
            if len <= max { lane.send(parts) } else { self.send_fragments(&parts.concat(), max) };
        if sent.is_err() {
            // The lane is dead: the next thread that makes progress ends the connection.
            self.kick();
        } else if self.lanes.all.len() > 1 && lane.has_work() {
            // A caller that makes progress on another lane does not look after this one.
            self.kick_lane(0);
            self.care.ring_sleepers();
        }
    }

    fn send_fragments(&self, message: &[u8], max: usize) -> Result<(), LaneError> {
        fragments(message, max)
            .try_for_each(|(head, part)| self.lanes.messages().send(&[&head, part]))
    }

    /// Wakes the workers, to look after all lanes.
    pub(crate) fn kick(&self) {
        self.care.kick(&self.core.workers);
    }

    /// If a lane or a deferred transfer has work to do, wakes the workers and the callers that
    /// sleep on the lanes: the descriptors that they poll may not show that work.
    pub(crate) fn kick_if_busy(&self) {
        if self.deferred.any() || self.lanes.living().any(|(_, lane)| lane.has_work()) {
            self.kick();
            self.care.ring_sleepers();
        }
    }

    /// The same for a caller that mostly comes back to make progress: workers that leave lanes to
    /// callers are not woken, as they look again soon.
    pub(crate) fn kick_if_untended(&self) {
        if self.deferred.any() || self.lanes.living().any(|(_, lane)| lane.has_work()) {
            // A worker that arms a lane now sees the work, or is seen to have armed it.
            fence(SeqCst);
            self.care.kick_some(&self.core.workers, |attached| !attached.looks_soon());
            self.care.ring_sleepers();
        }
    }

    /// Callers stay away for a while: workers that have left lanes to them look after the lanes
    /// again.
    pub(crate) fn leave_to_workers(&self) {
        self.care.leave_to_workers(&self.core.workers);
    }

    /// Wakes the worker of one lane.
    pub(crate) fn kick_lane(&self, lane: usize) {
        self.care.kick_some(&self.core.workers, |attached| attached.lane == lane);
    }

    /// Why it was lost.
    pub(crate) fn lost_error(&self) -> Error {
        self.end.reason().unwrap_or_else(|| self.lost_to("it broke"))
    }

    /// Whether it has ended: nothing touches memory through it any more.
    pub(crate) fn has_ended(&self) -> bool {
        self.end.is_over()
    }

    /// Marks a lane other than the first as lost, and wakes a thread that kills it. May be called
    /// from completions and messages.
    pub(crate) fn condemn(&self, lane: usize, why: impl std::fmt::Display) {
        if !self.lanes.lost.add(lane) || self.is_failed() {
            return;
        }
        tracing::warn!(conn = %self.id, peer = %self.peer.name, "lane {lane} is lost, the others take over: {why}");
        self.kick_lane(lane);
        self.care.ring_sleepers();
    }
}
