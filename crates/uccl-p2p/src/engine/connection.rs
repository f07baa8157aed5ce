//! Connections: lanes to one peer, and what is outstanding on them.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::*},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use uccl_fabric::{
    lane::{Lane, LaneError, MessageSink, Moves, OpName},
    rma::RmaLane,
};
use uccl_proto::assembler::fragments;

use super::{
    attached,
    claims::{Claims, Left},
    core,
    deferred::Deferred,
    fates::{self, Lanes},
    loans,
    park::Parker,
    talk,
    transfer::{self, After, Carrier, Fence, Kind, Plan},
    workers,
};
use crate::{
    error::{Error, Result},
    ids::ConnId,
    types::{Accepted, ConnInfo},
};

/// What is generic over the connections that it serves.
pub(crate) type Transfer = transfer::Transfer<Connection>;
pub(crate) type Hold = transfer::Hold<Connection>;
pub(crate) type Found = transfer::Found<Connection>;
pub(crate) type Talk = talk::Talk<Connection>;
pub(crate) type Session = uccl_proto::Session<talk::Kept<Connection>>;
pub(crate) type Sent = talk::Sent<Connection>;
pub(crate) type Ask = talk::Ask<Connection>;
pub(crate) type Piece = talk::Piece<Connection>;
pub(crate) type Lent = loans::Lent<Connection>;
pub(crate) type Core = core::Core<Connection>;
pub(crate) type Workers = workers::Workers<Connection>;
pub(crate) type Attached = attached::Attached<Connection>;

/// The lane over all rails of a connection.
pub(crate) struct RailLane {
    pub(crate) lane: Arc<RmaLane>,
    /// Its place among the connection's lanes.
    pub(crate) index: usize,
}

/// Who is at the other end.
pub(crate) struct Peer {
    /// How errors name it.
    pub(crate) name: Arc<str>,
    pub(crate) addr: SocketAddr,
    pub(crate) gpu_index: u32,
    pub(crate) instance: u64,
    pub(crate) same_host: bool,
}

/// Lanes to one peer.
pub(crate) struct Connection {
    pub(crate) id: ConnId,
    pub(crate) core: Arc<Core>,
    pub(crate) peer: Peer,
    /// The first one carries messages; its death is the connection's.
    pub(crate) lanes: Vec<Arc<dyn Lane>>,
    /// The last of them, if it is over rails.
    pub(crate) rails: Option<RailLane>,
    /// Who is to be told of the connection when its rails have been tried.
    pub(crate) accepting: Mutex<Option<Accepted>>,
    /// Which of the others are lost.
    pub(crate) fates: Lanes,
    pub(crate) attached: Mutex<Vec<Arc<Attached>>>,
    /// What the two ends have said to each other. Messages are sent with it locked, in the order in which it encodes them.
    pub(crate) talk: Mutex<Talk>,
    pub(crate) deferred: Deferred<Self>,
    lost: Mutex<Option<Error>>,
    /// It is at its end.
    failed: AtomicBool,
    /// And no lane touches memory any more.
    ended: AtomicBool,
    pub(crate) pending: AtomicUsize,
    /// Callers that sleep on the lanes.
    sleepers: Mutex<Vec<Arc<Parker>>>,
    pub(crate) claims: Claims,
    /// Lanes of which callers may have taken in what would have woken a worker, one bit each.
    borrowed: AtomicU64,
}

/// How a lane that is not over rails moves data, by the name of its link.
fn moves_over(link: &str) -> Moves {
    match link {
        "tcp" => Moves::Tcp,
        "shm" => Moves::Staged,
        _ => Moves::Direct,
    }
}

/// A caller makes progress itself; workers keep off.
pub(crate) struct Claim<'a>(&'a Connection);

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let left = self.0.claims.end();
        if left == Left::Others {
            // Others may sleep on what this one has taken in: a wake-up, or what it told of.
            self.0.hand_over();
        }
        self.0.return_lanes();
        if left == Left::Workers {
            self.0.leave_to_workers();
        }
    }
}

impl Claim<'_> {
    /// The caller has looked at the lanes.
    pub(crate) fn beat(&self) {
        self.0.claims.beat();
    }

    /// Does something that may take any time, and that is nothing to the lanes: workers look after them meanwhile.
    pub(crate) fn aside<T>(self, act: impl FnOnce() -> T) -> (Self, T) {
        let conn = self.0;
        drop(self);
        let done = act();
        (conn.claim(), done)
    }
}

impl Connection {
    /// With these lanes, the first of which carries messages, and one over rails.
    pub(crate) fn new(
        id: ConnId,
        core: Arc<Core>,
        peer: Peer,
        mut lanes: Vec<Arc<dyn Lane>>,
        rails: Option<Arc<RmaLane>>,
    ) -> Self {
        let index = lanes.len();
        lanes.extend(rails.iter().map(|lane| Arc::clone(lane) as Arc<dyn Lane>));
        Self {
            rails: rails.map(|lane| RailLane { lane, index }),
            accepting: Mutex::default(),
            id,
            core,
            peer,
            fates: Lanes::default(),
            talk: Mutex::new(Talk::new(lanes.len())),
            lanes,
            attached: Mutex::default(),
            deferred: Deferred::default(),
            lost: Mutex::default(),
            failed: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            pending: AtomicUsize::new(0),
            sleepers: Mutex::default(),
            claims: Claims::default(),
            borrowed: AtomicU64::new(0),
        }
    }

    pub(crate) fn info(&self) -> ConnInfo {
        let caps = self.lanes[0].caps();
        let rails = self.rails_up().map(|rails| (rails.lane.link(), rails.lane.paths_up()));
        let moves = match self.rails_up() {
            Some(rails) => rails.lane.moves(),
            None => moves_over(caps.link),
        };
        let (link, lanes) = rails.unwrap_or_else(|| (caps.link, self.streams().count()));
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

    /// As [`Self::lost_error`], with what was seen where nothing was noted yet.
    pub(crate) fn lost_to(&self, reason: impl ToString) -> Error {
        Error::ConnectionLost { peer: Arc::clone(&self.peer.name), reason: reason.to_string() }
    }

    /// Whether it is at its end. Its lanes may still touch memory.
    pub(crate) fn is_failed(&self) -> bool {
        self.failed.load(Acquire)
    }

    /// Keeps workers off while the caller makes progress itself.
    pub(crate) fn claim(&self) -> Claim<'_> {
        self.claims.begin();
        Claim(self)
    }

    /// Does what can be done on every lane without blocking.
    pub(crate) fn progress(self: &Arc<Self>) -> bool {
        let mut moved = false;
        for lane in 0..self.lanes.len() {
            moved |= self.progress_lane(lane);
        }
        moved
    }

    pub(crate) fn progress_lane(self: &Arc<Self>, lane: usize) -> bool {
        if self.fates.lost(lane) {
            return self.end_lane(lane);
        }
        let begun = lane == 0 && self.begin_due();
        match self.lanes[lane].progress(&Sink(self)) {
            Ok(moved) => {
                if moved && !self.is_stream(lane) {
                    self.borrow_lane(lane);
                }
                self.forward_notes();
                return moved | begun;
            }
            Err(_) if self.is_failed() => {}
            Err(e) if self.survives(lane, &e) => self.lose_lane(lane, e),
            Err(e) => self.fail_with(e),
        }
        true
    }

    /// Whether the connection outlives a lane that died of this.
    pub(crate) fn survives(&self, lane: usize, e: &LaneError) -> bool {
        lane > 0 && !matches!(e, LaneError::Closed | LaneError::Protocol(_))
    }

    fn fail_with(self: &Arc<Self>, e: LaneError) {
        let error = match e {
            LaneError::Protocol(reason) => {
                Error::Protocol { peer: Arc::clone(&self.peer.name), reason }
            }
            e => self.lost_to(e),
        };
        self.fail(error);
    }

    /// Ends the connection. When this returns no memory is touched through it any more, and every transfer on it
    /// has ended, or ends with the last [hold](Transfer::hold) on it; unless another thread ends it already.
    /// Must not be called from a completion or a message.
    pub(crate) fn fail(self: &Arc<Self>, e: Error) {
        {
            let mut lost = self.lost.lock();
            if lost.is_some() {
                return;
            }
            *lost = Some(e.clone());
        }
        self.failed.store(true, Release);
        tracing::debug!(conn = %self.id, peer = %self.peer.name, "connection ends: {e}");
        let attached = std::mem::take(&mut *self.attached.lock());
        self.core.workers.detach(&attached);
        // Before lanes are killed: what they had is not to be posted again.
        let orphans = self.talk.lock().session.lanes.close();
        drop(orphans);
        self.accepting.lock().take();
        self.lanes.iter().for_each(|lane| lane.kill());
        let closed = self.talk.lock().session.close();
        let asks = closed.asks.into_iter().flat_map(Ask::lent);
        let lent = asks.chain(closed.sends.into_iter().chain(closed.notifs).flat_map(Sent::lent));
        let lent = lent.collect();
        self.deferred.clear();
        // Before the transfers end, whose memory may be deregistered then.
        self.core.watch_aftermath(self, lent);
        self.core.look_after_aftermaths();
        // Before the transfers are looked at: one that is posted meanwhile is among them, or sees this.
        self.ended.store(true, SeqCst);
        let unfinished = self.unfinished();
        unfinished.iter().for_each(|transfer| transfer.end_with_connection());
        self.core.conn_lost(self, e);
    }

    /// Ends the connection in good order, as [`fail`](Self::fail) does.
    pub(crate) fn close(self: &Arc<Self>, e: Error) {
        self.living().for_each(|(_, lane)| lane.bye());
        self.fail(e);
    }

    /// Waits until a connection that was closed has ended, and every transfer on it. Another thread may be ending
    /// it, and peers that copy for us have as long as a peer has to let a transfer end.
    pub(crate) fn wait_for_end(self: &Arc<Self>) {
        while !self.has_ended() || !self.unfinished().is_empty() {
            self.core.look_after_aftermaths();
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Whether all that is left of these operations is for this process to do.
    pub(crate) fn is_ours(&self, ops: &[(u16, OpName)]) -> bool {
        ops.iter().all(|(lane, op)| {
            self.lanes.get(usize::from(*lane)).is_some_and(|lane| lane.is_ours(*op))
        })
    }

    pub(super) fn unfinished(self: &Arc<Self>) -> Vec<Arc<Transfer>> {
        self.core.transfers.unfinished(|transfer| Arc::ptr_eq(&transfer.conn, self))
    }

    /// Makes a transfer on this connection, unless too many are unfinished.
    pub(crate) fn admit(&self, plan: Plan<Self>) -> Result<Arc<Transfer>> {
        let transfer = self.core.transfers.insert(plan)?;
        if self.pending.fetch_add(1, AcqRel) == 0 {
            self.talk.lock().session.liveness.rest(0);
        }
        if transfer.kind.is_callers() {
            self.core.counters.posted.fetch_add(1, Relaxed);
        }
        Ok(transfer)
    }

    fn count(&self, transfer: &Transfer, ok: bool) {
        if !transfer.kind.is_callers() {
            return;
        }
        let counters = &self.core.counters;
        if ok {
            counters.ended_well(transfer.kind.op(), transfer.bytes.load(Relaxed));
        } else {
            counters.failed.fetch_add(1, Relaxed);
        }
    }

    /// Ends a transfer early, as far as that goes right now; may be called again until it has ended.
    pub(crate) fn fence(self: &Arc<Self>, transfer: &Arc<Transfer>, why: Fence) {
        let ops = {
            let mut body = transfer.body.lock();
            body.fence.get_or_insert(why);
            body.fenced_at.get_or_insert_with(Instant::now);
            body.ops.clone()
        };
        let first = !transfer.fencing.swap(true, AcqRel);
        for (lane, op) in ops {
            let lane = usize::from(lane);
            // What a lost lane had ends with it.
            if !self.fates.lost(lane) {
                self.lanes[lane].cancel(op);
            }
        }
        self.kick_if_busy();
        if transfer.finished() || self.withdraw_deferred(transfer, transfer.fence_error(why)) {
            return;
        }
        self.withdraw_asks(transfer);
        match transfer.kind {
            _ if transfer.notifying.load(Relaxed) => self.withdraw_notif(transfer),
            Kind::Recv => self.withdraw_recv(transfer),
            Kind::Send if first => self.withdraw_send(transfer),
            Kind::Notif if first => self.withdraw_notif(transfer),
            _ => {}
        }
    }

    /// Sends a message made of parts, cut into fragments where it is longer than the lane takes. The
    /// first part begins with the message's prefix. Callers hold the lock of the session, which keeps
    /// fragments together and messages in order.
    pub(crate) fn send_message(&self, parts: &[&[u8]]) {
        let lane = &self.lanes[0];
        let max = lane.caps().max_message;
        let len: usize = parts.iter().map(|part| part.len()).sum();
        let sent =
            if len <= max { lane.send(parts) } else { self.send_fragments(&parts.concat(), max) };
        if sent.is_err() {
            // The lane is dead: whoever makes progress next ends the connection.
            self.kick();
        } else if self.lanes.len() > 1 && lane.has_work() {
            // Who makes progress on another lane does not look after this one.
            self.kick_lane(0);
            self.ring_sleepers();
        }
    }

    fn send_fragments(&self, message: &[u8], max: usize) -> Result<(), LaneError> {
        fragments(message, max).try_for_each(|(head, part)| self.lanes[0].send(&[&head, part]))
    }

    /// Has a worker look after lanes that have something to do.
    pub(crate) fn kick(&self) {
        self.core.workers.kick(&self.attached.lock());
    }

    /// Has somebody look after lanes that have work of their own: a worker, and whoever sleeps on them
    /// without watching for what they need now.
    pub(crate) fn kick_if_busy(&self) {
        if self.deferred.any() || self.living().any(|(_, lane)| lane.has_work()) {
            self.kick();
            self.ring_sleepers();
        }
    }

    /// Notes that a caller may have taken in what would have woken the lane's worker: by arming the lane, or by
    /// looking at rails.
    pub(crate) fn borrow_lane(&self, lane: usize) {
        let bit = fates::bit(lane);
        if self.borrowed.load(Relaxed) & bit == 0 {
            self.borrowed.fetch_or(bit, SeqCst);
        }
    }

    /// A caller leaves off making progress: workers that sleep on what it has borrowed must look for themselves,
    /// and prepare their sleep anew.
    fn return_lanes(&self) {
        if self.borrowed.load(Relaxed) == 0 {
            return;
        }
        let borrowed = self.borrowed.swap(0, SeqCst);
        let attached = self.attached.lock();
        let sleeps = |attached: &&Arc<Attached>| {
            borrowed & fates::bit(attached.lane) != 0 && attached.is_armed()
        };
        let sleeping = attached.iter().filter(sleeps);
        sleeping.for_each(|attached| self.core.workers.kick(std::slice::from_ref(attached)));
    }

    /// Callers stay away for a while: workers that have left lanes to them look after those again.
    pub(crate) fn leave_to_workers(&self) {
        // Before the look: a worker that stays away after it sees this.
        self.claims.desert();
        let attached = self.attached.lock();
        let left = attached.iter().filter(|attached| attached.take_back());
        left.for_each(|attached| self.core.workers.kick(std::slice::from_ref(attached)));
    }

    /// Wakes one of the callers that sleep on the lanes: whoever was awake is not going to look after
    /// what has come.
    pub(crate) fn hand_over(&self) {
        if let Some(sleeper) = self.sleepers.lock().first() {
            sleeper.ring();
        }
    }

    /// Wakes callers that sleep on the lanes.
    pub(crate) fn ring_sleepers(&self) {
        self.sleepers.lock().iter().for_each(|sleeper| sleeper.ring());
    }

    /// Has workers take part in work that can be shared.
    pub(crate) fn call_help(&self) {
        for attached in self.attached.lock().iter() {
            if self.lanes[attached.lane].wants_help() {
                Workers::call_help(&self.core, attached);
            }
        }
    }

    /// Has a worker look after one lane.
    pub(crate) fn kick_lane(&self, lane: usize) {
        let attached = self.attached.lock();
        attached
            .iter()
            .filter(|attached| attached.lane == lane)
            .for_each(|attached| self.core.workers.kick(std::slice::from_ref(attached)));
    }

    /// Takes one lane out of the care of workers.
    pub(crate) fn detach_lane(&self, lane: usize) {
        let gone: Vec<_> = {
            let mut attached = self.attached.lock();
            attached.extract_if(.., |attached| attached.lane == lane).collect()
        };
        self.core.workers.detach(&gone);
    }

    /// Whether callers sleep on the lanes.
    pub(crate) fn has_sleepers(&self) -> bool {
        !self.sleepers.lock().is_empty()
    }

    /// Notes that a caller goes to sleep on the lanes.
    pub(crate) fn sleeper_comes(&self, parker: &Arc<Parker>) {
        self.sleepers.lock().push(Arc::clone(parker));
    }

    /// Notes that it is awake again.
    pub(crate) fn sleeper_goes(&self, parker: &Arc<Parker>) {
        self.sleepers.lock().retain(|other| !Arc::ptr_eq(other, parker));
    }
}

impl Carrier for Connection {
    fn peer(&self) -> &Arc<str> {
        &self.peer.name
    }

    fn lost_error(&self) -> Error {
        self.lost.lock().clone().unwrap_or_else(|| self.lost_to("it broke"))
    }

    fn has_ended(&self) -> bool {
        self.ended.load(SeqCst)
    }

    fn is_up_to_us(&self, transfer: &Arc<Transfer>, ops: &[(u16, OpName)]) -> bool {
        self.is_ours(ops) && !self.is_asking_for(transfer)
    }

    fn go_on(
        self: &Arc<Self>,
        transfer: &Arc<Transfer>,
        after: After,
        verdict: Result<()>,
        fence: Option<Fence>,
    ) {
        match after {
            After::Publish => {}
            After::Notify(payload) if verdict.is_ok() && fence.is_none() => {
                return self.notify_after(transfer, payload);
            }
            After::Notify(_) => {
                let fenced = fence.map_or(Ok(()), |fence| Err(transfer.fence_error(fence)));
                return transfer.publish(verdict.and(fenced));
            }
            After::Fin(seq) => self.finish_receive(seq, verdict.as_ref().err(), fence),
            After::Answer(id) => self.copy_ended(id, verdict.as_ref().err(), fence),
            After::Deliver { id, payload } => {
                self.notif_fetched(id, verdict.is_ok().then_some(payload));
            }
        }
        transfer.publish(verdict);
    }

    fn transfer_ended(&self, transfer: &Transfer, is_done: bool) {
        self.pending.fetch_sub(1, AcqRel);
        self.count(transfer, is_done);
        self.core.transfers.ended(transfer);
    }
}

/// Where a lane's messages go.
struct Sink<'a>(&'a Arc<Connection>);

impl MessageSink for Sink<'_> {
    fn message(&self, bytes: &[u8]) -> Result<(), String> {
        self.0.hear(bytes)
    }
}
