//! A channel: queue pairs that share a completion queue.

mod iwarp;
mod knock;
mod queue;
mod siw;
mod status;
mod unreliable;

use std::{
    collections::VecDeque,
    os::fd::BorrowedFd,
    sync::Arc,
    time::{Duration, Instant},
};

use uccl_wire::{iwarp::IwarpAddress, verbs::VerbsAddress};

pub(super) use self::iwarp::Place;
pub(super) use self::unreliable::Trust;
use self::{
    iwarp::Connections,
    queue::{SendQueue, What, queue_of},
    status::{Failure, classify, hint},
    unreliable::{Plan, RECEIVE, Unreliable},
};
use super::{
    cq::Cq,
    ffi::abi::{Wc, wc_status, wr_opcode},
    pd::Pd,
    qp::{Path, Qp, Room, Service},
    registration,
};
use crate::{
    lane::OpKind,
    rma::rail::{Channel, Ended, Limits, RailError, Request, RequestError},
};

/// What the channels of a rail are like.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) path: Path,
    pub(super) limits: Limits,
    pub(super) queue_pairs: u8,
    /// Requests that each queue pair has room for.
    pub(super) depth: u32,
    /// Whether writes go over queue pairs of their own that are not reliable.
    pub(super) writes_over_uc: bool,
    /// Where it is over iWARP, whose writes are fenced.
    pub(super) iwarp: Option<Place>,
}

/// Places in a queue that a request may take where writes are fenced: its own, and its fence's.
pub(super) const PLACES_WITH_FENCES: u32 = 2;

/// Completions that a queue pair that is not reliable may have at a time.
pub(super) const COMPLETIONS_OF_UC: u32 = unreliable::SENDS + unreliable::RECEIVES;

/// Completions taken at a time.
const BATCH: usize = 32;

/// Polls that find nothing for each at the device's events.
const POLLS_AN_EVENT: u32 = 1024;

/// A queue pair is kept to until it has so much more in flight than another: a batch of short requests is
/// better off with one doorbell than spread.
const STICK_BYTES: u64 = 16 << 10;

/// Queue pairs between two ports.
pub(super) struct VerbsChannel {
    /// Before `cq`: destroyed before it.
    queues: Vec<SendQueue>,
    /// What makes the queue pairs' connections, over iWARP. After them: its identifiers are destroyed later.
    connections: Option<Connections>,
    /// For writes, where those do not go the reliable way.
    unreliable: Option<Unreliable>,
    cq: Arc<Cq>,
    pd: Arc<Pd>,
    shape: Shape,
    trust: Arc<Trust>,
    address: Vec<u8>,
    is_joined: bool,
    /// The queue that was posted to last.
    current: usize,
    /// Probes that wait for room.
    probes: VecDeque<u64>,
    /// What ended outside [`Channel::poll`], and is told by the next.
    untold: Vec<Ended>,
    /// Whether the next completion shows on the descriptor.
    is_armed: bool,
    /// Polls since something ended.
    quiet_polls: u32,
    fault: Option<RailError>,
}

impl VerbsChannel {
    /// Queue pairs that are not reliable are tried as long as the rail's trust in them holds.
    pub(super) fn new(pd: &Arc<Pd>, shape: &Shape, trust: &Arc<Trust>) -> Result<Self, RailError> {
        let queue_pairs = usize::from(shape.queue_pairs);
        let writes_over_uc = shape.writes_over_uc && trust.holds();
        let of_uc = if writes_over_uc { COMPLETIONS_OF_UC as usize * queue_pairs } else { 0 };
        let places = if shape.iwarp.is_some() { PLACES_WITH_FENCES } else { 1 };
        let room = shape.limits.depth * places as usize + of_uc;
        let room = i32::try_from(room).unwrap_or(i32::MAX);
        let cq = Cq::new(pd.context(), room)?;
        let mut queues = Vec::with_capacity(queue_pairs);
        for index in 0..queue_pairs {
            // Nothing is received; but siw's library can make no queue without room.
            let receives = u32::from(shape.iwarp.is_some());
            let room = Room { sends: shape.depth * places, receives };
            let qp = Qp::new(pd, &cq, Service::Reliable, room)?;
            match shape.iwarp {
                Some(_) => qp.to_init_for_manager()?,
                None => qp.to_init(&shape.path)?,
            }
            queues.push(SendQueue::new(qp, index, shape.depth));
        }
        let plan = Plan {
            first: queue_pairs,
            paths: queue_pairs,
            path: shape.path,
            chunk_bytes: shape.limits.chunk_bytes,
            most: shape.limits.depth,
        };
        let unreliable = writes_over_uc
            .then(|| Unreliable::new(pd, &cq, &plan))
            .and_then(|made| trust.made(made));
        let connections = shape.iwarp.map(|place| Connections::new(pd, &cq, place, &shape.path));
        let connections = connections.transpose()?;
        let address = match &connections {
            Some(connections) => connections.address(queue_pairs, 0),
            None => address_of(&shape.path, &queues, unreliable.as_ref()).encode(),
        };
        Ok(Self {
            queues,
            connections,
            unreliable,
            cq,
            pd: Arc::clone(pd),
            shape: *shape,
            trust: Arc::clone(trust),
            address,
            is_joined: false,
            current: 0,
            probes: VecDeque::new(),
            untold: Vec::new(),
            is_armed: false,
            quiet_polls: 0,
            fault: None,
        })
    }

    fn check(&self) -> Result<(), RailError> {
        match &self.fault {
            Some(fault) => Err(fault.clone()),
            None if self.is_joined => Ok(()),
            None => Err(RailError::Lost("the channel is not joined with a peer's".to_owned())),
        }
    }

    fn check_not_joined(&self) -> Result<(), RailError> {
        match self.is_joined {
            false => Ok(()),
            true => {
                Err(RailError::Peer("an address for a channel that is joined already".to_owned()))
            }
        }
    }

    /// Keeps as many queue pairs as the peer has: the end with fewer decides, and the others of ours are given
    /// back.
    fn keep_queues(&mut self, peer: usize) {
        self.queues.truncate(peer);
        self.shape.limits.depth = self.shape.depth as usize * self.queues.len();
    }

    fn connect_by_number(&mut self, peer: &[u8]) -> Result<(), RailError> {
        let peer =
            VerbsAddress::decode(peer).map_err(|error| RailError::Peer(error.to_string()))?;
        if peer.link_layer != self.shape.path.link_layer {
            let (ours, theirs) = (self.shape.path.link_layer, peer.link_layer);
            return Err(RailError::Peer(format!(
                "the address of a port on {theirs:?}; ours is on {ours:?}"
            )));
        }
        self.check_not_joined()?;
        self.keep_queues(peer.reliable.len());
        for (queue, qp) in self.queues.iter().zip(&peer.reliable) {
            queue.qp().join(&self.shape.path, &peer, *qp)?;
        }
        match &mut self.unreliable {
            Some(unreliable) if !peer.unreliable.is_empty() => {
                unreliable.join(&self.shape.path, &peer)?
            }
            // The peer has none: writes go the reliable way.
            _ => self.unreliable = None,
        }
        self.is_joined = true;
        Ok(())
    }

    /// Begins to; what is posted waits until it is done.
    fn connect_by_manager(&mut self, peer: &[u8]) -> Result<(), RailError> {
        let peer =
            IwarpAddress::decode(peer).map_err(|error| RailError::Peer(error.to_string()))?;
        self.check_not_joined()?;
        self.keep_queues(peer.queue_pairs.into());
        let Some(connections) = &mut self.connections else { return Ok(()) };
        if let Some(port) = connections.begin(self.queues.len(), &peer)? {
            self.address = connections.address(self.queues.len(), port);
        }
        for queue in &mut self.queues {
            queue.set_fence(connections.fence(&peer));
        }
        self.is_joined = true;
        Ok(())
    }

    /// Remembers why the channel is of no more use. A device that is gone explains all that follows.
    fn fail(&mut self, why: RailError) {
        self.pd.context().take_events();
        let why = self.pd.context().check_gone().err().unwrap_or(why);
        self.fault.get_or_insert(why);
    }

    /// A device that is removed ends no request: it only says that it is gone.
    fn hear_device(&mut self) -> Result<(), RailError> {
        self.pd.context().take_events();
        self.pd.context().check_gone().inspect_err(|gone| {
            self.fault.get_or_insert_with(|| gone.clone());
        })
    }

    /// Hears the device now and then while nothing ends.
    #[inline]
    fn listen(&mut self, is_idle: bool) -> Result<(), RailError> {
        if !is_idle {
            self.quiet_polls = 0;
            return Ok(());
        }
        self.quiet_polls = self.quiet_polls.wrapping_add(1);
        if self.quiet_polls.is_multiple_of(POLLS_AN_EVENT) { self.hear_device() } else { Ok(()) }
    }

    /// The queue for the next request: that with the least in flight, or the last one if it has little more.
    #[inline]
    fn pick(&mut self) -> Option<&mut SendQueue> {
        let current = self.queues.get(self.current)?;
        if !current.has_room() || current.bytes() > STICK_BYTES {
            let with_room = self.queues.iter().enumerate().filter(|(_, queue)| queue.has_room());
            let (least, queue) = with_room.min_by_key(|(_, queue)| queue.bytes())?;
            if !current.has_room() || current.bytes() > queue.bytes() + STICK_BYTES {
                self.current = least;
            }
        }
        self.queues.get_mut(self.current)
    }

    /// Makes requests for the queues, as far as there is room; says how many.
    fn make(&mut self, requests: &[Request]) -> usize {
        for (done, request) in requests.iter().enumerate() {
            if let Some(result) = self.ends_at_once(request) {
                self.untold.push(Ended { tag: request.tag, result });
                continue;
            }
            let is_taken = match &mut self.unreliable {
                Some(unreliable) if request.kind == OpKind::Write => unreliable.take(request),
                _ => self.make_reliable(request),
            };
            if !is_taken {
                return done;
            }
        }
        requests.len()
    }

    /// Makes a request for a queue; false if there is no room.
    #[inline]
    fn make_reliable(&mut self, request: &Request) -> bool {
        let is_siw = self.shape.iwarp.is_some_and(|place| place.is_software);
        let parts = if is_siw { siw::apart(request) } else { None };
        let Some(queue) = self.pick() else { return false };
        match parts {
            None => queue.make(request),
            Some(_) if queue.room() < 2 => return false,
            Some(parts) => queue.make_in_parts(&parts),
        }
        true
    }

    /// The end of a request that is not for the device. One of no bytes has arrived already; and soft-RoCE
    /// does not keep reads apart from it when packets are lost.
    #[inline]
    fn ends_at_once(&self, request: &Request) -> Option<Result<(), RequestError>> {
        let (len, most) = (request.local.len as u64, self.shape.limits.max_bytes);
        match len {
            0 => Some(Ok(())),
            len if len > most => {
                let why = format!("{len} bytes are more than a request takes, {most}");
                Some(Err(RequestError::Failed(why)))
            }
            _ => None,
        }
    }

    /// # Safety
    /// As for [`Channel::post`], of all requests that were made.
    unsafe fn ring(&mut self) -> Result<(), RailError> {
        if self.connections.as_ref().is_some_and(|connections| !connections.are_up()) {
            // What was made waits for that.
            return Ok(());
        }
        for queue in &mut self.queues {
            // SAFETY: the caller's promise.
            if let Err(error) = unsafe { queue.ring() } {
                self.fail(error.clone());
                return Err(error);
            }
        }
        Ok(())
    }

    /// Posts probes that waited for room.
    fn post_probes(&mut self) -> Result<(), RailError> {
        while let Some(&tag) = self.probes.front() {
            let Some(queue) = self.pick() else { break };
            queue.make_probe(tag);
            self.probes.pop_front();
        }
        // SAFETY: probes have no memory; and what else was made is posted already.
        unsafe { self.ring() }
    }

    /// Keeps up what the ways that are not reliable need. Costs nothing where there are none.
    fn turn(&mut self, is_idle: bool, ended: &mut Vec<Ended>) -> Result<(), RailError> {
        let Some(unreliable) = &mut self.unreliable else { return Ok(()) };
        if let Err(error) = unreliable.turn(Instant::now(), is_idle, ended) {
            self.fail(error.clone());
            return Err(error);
        }
        self.post_stubborn()
    }

    /// Sends the reliable way what was lost again and again.
    fn post_stubborn(&mut self) -> Result<(), RailError> {
        while let Some((item, write)) = self.unreliable.as_ref().and_then(Unreliable::next_stubborn)
        {
            let Some(queue) = self.pick() else { break };
            queue.make_as(What::Piece(item), wr_opcode::RDMA_WRITE, 0, &write);
            if let Some(unreliable) = &mut self.unreliable {
                unreliable.took_stubborn();
            }
        }
        // SAFETY: it is a piece of a write that has not ended, whose memory is its poster's promise.
        unsafe { self.ring() }
    }

    /// Takes the completions there are; whether there were any.
    fn reap(&mut self, ended: &mut Vec<Ended>) -> bool {
        let mut wcs = [Wc::default(); BATCH];
        let mut any = false;
        loop {
            let count = match self.cq.poll(&mut wcs) {
                Ok(count) => count,
                Err(error) => {
                    self.fail(error);
                    return true;
                }
            };
            any |= count > 0;
            for wc in &wcs[..count] {
                match queue_of(wc.wr_id & !RECEIVE) {
                    index if index < self.queues.len() => self.completed(index, wc, ended),
                    index => self.completed_uc(index, wc),
                }
            }
            if count < BATCH {
                return any;
            }
        }
    }

    /// Takes what has happened to the connections, and posts what waited for them.
    fn turn_connections(&mut self) {
        let Some(connections) = &mut self.connections else { return };
        let were_up = connections.are_up();
        let turned = connections.turn(&self.queues);
        let are_up = connections.are_up();
        if let Err(error) = turned {
            self.fail(error);
        } else if are_up && !were_up {
            // SAFETY: whoever made a request promised its memory until it has ended. An error is
            // remembered.
            let _ = unsafe { self.ring() };
        }
    }

    #[inline]
    fn completed(&mut self, index: usize, wc: &Wc, ended: &mut Vec<Ended>) {
        let Self { queues, unreliable, connections, .. } = self;
        let Some(queue) = queues.get_mut(index) else { return };
        let failure =
            (wc.status != wc_status::SUCCESS).then(|| classify(wc, connections.is_some()));
        // A queue pair carries out its requests in order: those before the one that failed succeeded,
        // though nothing may have been heard of them. Where that only says that they were sent, it is not known.
        let told_of_earlier = failure.is_none() || !queue.is_fenced();
        let known = queue.retire(wc.wr_id, |request, is_last| {
            let result = match &failure {
                Some(Failure::Lost) if is_last => return,
                Some(Failure::Request(error)) if is_last => Err(error.clone()),
                _ if !told_of_earlier => return,
                _ => Ok(()),
            };
            match (request.what, &mut *unreliable) {
                (What::Own(tag), _) => ended.push(Ended { tag, result }),
                (What::Piece(item), Some(unreliable)) => {
                    unreliable.piece_ended(item, result, ended)
                }
                (What::Part | What::Piece(_) | What::Unreliable | What::Fence, _) => {}
            }
        });
        // What caused a flush comes first, or (soft-RoCE) a little later: it says more.
        let cause_may_follow = wc.status == wc_status::WR_FLUSH_ERR && !queue.is_empty();
        if !known && failure.is_none() {
            self.fail(RailError::Lost("a completion of no request of ours".to_owned()));
        } else if failure.is_some() && self.fault.is_none() && !cause_may_follow {
            self.fail(RailError::Lost(self.describe(wc)));
        }
    }

    /// Takes what has come, for the next poll to tell; that tells of a fault too, after what had ended before it.
    fn reap_untold(&mut self, is_idle: bool) -> Result<(), RailError> {
        let mut ended = std::mem::take(&mut self.untold);
        self.reap(&mut ended);
        let result = if self.fault.is_none() { self.turn(is_idle, &mut ended) } else { Ok(()) };
        self.untold = ended;
        result
    }

    /// Of a queue pair that is not reliable.
    fn completed_uc(&mut self, index: usize, wc: &Wc) {
        let Some(unreliable) = &mut self.unreliable else {
            return self.fail(RailError::Lost("a completion of no queue pair of ours".to_owned()));
        };
        let is_receive = wc.wr_id & RECEIVE != 0;
        // A receive that ended in error had a message that was refused; the queue pair lives on.
        let is_dead = match is_receive {
            true => wc.status == wc_status::WR_FLUSH_ERR,
            false => wc.status != wc_status::SUCCESS,
        };
        if is_dead {
            let why = self.describe(wc);
            self.fail(RailError::Lost(why));
        } else if is_receive {
            if let Err(error) = unreliable.received(Instant::now(), index, wc) {
                self.trust.give_up(error);
                self.fail(RailError::Lost(error.to_string()));
            }
        } else if !unreliable.sent(index, wc.wr_id) {
            self.fail(RailError::Lost("a completion of no request of ours".to_owned()));
        }
    }

    fn describe(&self, wc: &Wc) -> String {
        // SAFETY: it returns a constant, for any number.
        let text = unsafe { (self.pd.verbs().wc_status_str)(wc.status) };
        let text = if text.is_null() {
            "unknown".into()
        } else {
            // SAFETY: not null, a string constant with an end, in a library that stays loaded.
            unsafe { std::ffi::CStr::from_ptr(text) }.to_string_lossy()
        };
        let (device, vendor) = (self.pd.context().name(), wc.vendor_err);
        let hint = hint(wc, self.connections.is_some());
        format!("{device} says {text} (status {}, vendor {vendor:#x}){hint}", wc.status)
    }
}

impl Drop for VerbsChannel {
    fn drop(&mut self) {
        // iWARP's connections end in good order, so that the peer's end is told.
        if self.connections.is_some() || !self.is_joined {
            return;
        }
        for queue in &self.queues {
            // Soft-RoCE sends again what nobody answers for as long as it takes to destroy a queue pair, which waits
            // for that. Where this fails, the device has ended it already.
            let _ = queue.qp().stop();
        }
    }
}

fn address_of(path: &Path, queues: &[SendQueue], uc: Option<&Unreliable>) -> VerbsAddress {
    VerbsAddress {
        link_layer: path.link_layer,
        mtu: path.mtu,
        lid: path.lid,
        gid: path.gid,
        reads_answered: path.reads_answered,
        receives: uc.map_or(0, |_| unreliable::RECEIVES),
        reliable: queues.iter().map(|queue| queue.qp().name()).collect(),
        unreliable: uc.map(Unreliable::names).unwrap_or_default(),
    }
}

impl Channel for VerbsChannel {
    fn address(&self) -> &[u8] {
        &self.address
    }

    fn connect(&mut self, peer: &[u8]) -> Result<(), RailError> {
        match self.connections {
            Some(_) => self.connect_by_manager(peer),
            None => self.connect_by_number(peer),
        }
    }

    fn limits(&self) -> Limits {
        self.shape.limits
    }

    fn probe(&mut self, tag: u64) -> Result<(), RailError> {
        self.check()?;
        self.probes.push_back(tag);
        self.post_probes()
    }

    unsafe fn post(&mut self, requests: &[Request]) -> Result<usize, RailError> {
        self.check()?;
        let made = self.make(requests);
        // SAFETY: the caller's promise; nothing was made before that is not posted.
        unsafe { self.ring() }?;
        if self.unreliable.is_some() {
            // First what has come: by the clock alone a peer is silent who answered long ago.
            self.reap_untold(false)?;
        }
        Ok(made)
    }

    fn poll(&mut self, ended: &mut Vec<Ended>) -> Result<(), RailError> {
        ended.append(&mut self.untold);
        self.turn_connections();
        let is_idle = !self.reap(ended);
        if let Some(fault) = &self.fault {
            return Err(fault.clone());
        }
        self.listen(is_idle)?;
        self.turn(is_idle, ended)?;
        if self.probes.is_empty() { Ok(()) } else { self.post_probes() }
    }

    fn import(&mut self, key: &[u8]) -> Result<u64, RailError> {
        registration::import(key)
    }

    fn arm(&mut self) -> Result<bool, RailError> {
        self.hear_device()?;
        if self.is_armed && self.cq.take_event() {
            self.is_armed = false;
        }
        if !self.is_armed {
            self.cq.request_notify()?;
            self.is_armed = true;
        }
        self.turn_connections();
        // What came before the device was told to notify shows nowhere else.
        self.reap_untold(true)?;
        Ok(self.untold.is_empty() && self.fault.is_none())
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        let connections = self.connections.as_ref();
        Some(connections.map_or_else(|| self.cq.fd(), Connections::fd))
    }

    fn wake_in(&self, now: Instant) -> Option<Duration> {
        let at = self.unreliable.as_ref()?.next_timeout()?;
        Some(at.saturating_duration_since(now))
    }
}
