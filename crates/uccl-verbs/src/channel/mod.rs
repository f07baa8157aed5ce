//! A channel: queue pairs between two ports, which share a completion queue.

mod queue;
mod status;
mod unreliable;

use std::{
    collections::VecDeque,
    net::Ipv6Addr,
    os::fd::BorrowedFd,
    sync::Arc,
    time::{Duration, Instant},
};

use uccl_device::RdmaGid;
use uccl_fabric::{
    lane::OpKind,
    network::shares_network,
    rail::{Channel, Limits, RailError, Request, RequestEnd, RequestError},
};
use uccl_wire::verbs::VerbsAddress;

pub(super) use self::unreliable::UcSupport;
use self::{
    queue::{RequestOwner, SendQueue, queue_of},
    status::{Failure, classify, hint},
    unreliable::{Plan, RECEIVE, Unreliable},
};
use super::{
    cq::Cq,
    ffi::abi::{Wc, wc_status, wr_opcode},
    gid,
    pd::Pd,
    qp::{Path, Qp, QueueCapacity, Service},
    registration,
};

/// The parameters of a rail's channels.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) path: Path,
    pub(super) limits: Limits,
    pub(super) queue_pairs: u8,
    /// Requests that each queue pair has room for.
    pub(super) depth: u32,
    /// Whether writes go over separate, unreliable queue pairs (UC).
    pub(super) writes_over_uc: bool,
}

/// Most completions of an unreliable queue pair that may wait at a time.
pub(super) const COMPLETIONS_OF_UC: u32 = unreliable::SENDS + unreliable::RECEIVES;

/// How many completions one poll takes at most.
const BATCH: usize = 32;

/// The device's events are checked once in this many polls that find nothing.
const POLLS_AN_EVENT: u32 = 1024;

/// Requests go to the same queue pair until it has this many more bytes in flight than another.
/// Short requests are faster together, with one doorbell, than spread over queue pairs.
const STICK_BYTES: u64 = 16 << 10;

/// Queue pairs between two ports.
pub(super) struct VerbsChannel {
    /// Declared before `cq`, so that they are destroyed before it.
    queues: Vec<SendQueue>,
    /// The unreliable queue pairs for writes, if writes go over those.
    unreliable: Option<Unreliable>,
    cq: Arc<Cq>,
    pd: Arc<Pd>,
    shape: Shape,
    /// GIDs with which to answer the peer.
    others: Vec<RdmaGid>,
    trust: Arc<UcSupport>,
    address: Vec<u8>,
    is_joined: bool,
    /// The index of the queue that was posted to last.
    current: usize,
    /// Probes that wait for room.
    probes: VecDeque<u64>,
    /// Requests that ended outside [`Channel::poll`]. The next poll reports them.
    untold: Vec<RequestEnd>,
    /// Whether the next completion makes the descriptor readable.
    is_armed: bool,
    /// How many polls have found nothing since a completion came last.
    quiet_polls: u32,
    fault: Option<RailError>,
}

impl VerbsChannel {
    /// Makes unreliable queue pairs only while the rail's [`UcSupport`] in them holds.
    /// When it is connected, one of the GIDs in `others` may take the place of its own.
    pub(super) fn new(
        pd: &Arc<Pd>,
        shape: &Shape,
        others: Vec<RdmaGid>,
        trust: &Arc<UcSupport>,
    ) -> Result<Self, RailError> {
        let queue_pairs = usize::from(shape.queue_pairs);
        let writes_over_uc = shape.writes_over_uc && trust.holds();
        let of_uc = if writes_over_uc { COMPLETIONS_OF_UC as usize * queue_pairs } else { 0 };
        let room = shape.limits.depth + of_uc;
        let room = i32::try_from(room).unwrap_or(i32::MAX);
        let cq = Cq::new(pd.context(), room)?;
        let mut queues = Vec::with_capacity(queue_pairs);
        for index in 0..queue_pairs {
            let room = QueueCapacity { sends: shape.depth, receives: 0 };
            let qp = Qp::new(pd, &cq, Service::Reliable, room)?;
            qp.to_init(&shape.path)?;
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
        let address = address_of(&shape.path, &queues, unreliable.as_ref()).encode();
        Ok(Self {
            queues,
            unreliable,
            cq,
            pd: Arc::clone(pd),
            shape: *shape,
            others,
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

    /// Takes the GID that suits the peer's.
    fn answer_from(&mut self, peer: Ipv6Addr) {
        let path = &mut self.shape.path;
        let Some(gid) = gid::towards(&self.others, peer, shares_network) else { return };
        if (path.gid_index, path.gid) != gid::place_of(gid) {
            (path.gid_index, path.gid) = gid::place_of(gid);
            self.address = address_of(path, &self.queues, self.unreliable.as_ref()).encode();
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

    /// Keeps as many queue pairs as the peer has, and destroys the rest. The end with fewer decides
    /// the number.
    fn keep_queues(&mut self, peer: usize) {
        self.queues.truncate(peer);
        self.shape.limits.depth = self.shape.depth as usize * self.queues.len();
    }

    /// Records why the channel has failed. If the device is gone, that is the reason recorded, as
    /// it causes all other failures.
    fn fail(&mut self, why: RailError) {
        self.pd.context().take_events();
        let why = self.pd.context().check_gone().err().unwrap_or(why);
        self.fault.get_or_insert(why);
    }

    /// Checks the device's events. A device that is removed completes no request; only an event
    /// reports its removal.
    fn hear_device(&mut self) -> Result<(), RailError> {
        self.pd.context().take_events();
        self.pd.context().check_gone().inspect_err(|gone| {
            self.fault.get_or_insert_with(|| gone.clone());
        })
    }

    /// Checks the device's events now and then while no completion comes.
    #[inline]
    fn listen(&mut self, is_idle: bool) -> Result<(), RailError> {
        if !is_idle {
            self.quiet_polls = 0;
            return Ok(());
        }
        self.quiet_polls = self.quiet_polls.wrapping_add(1);
        if self.quiet_polls.is_multiple_of(POLLS_AN_EVENT) { self.hear_device() } else { Ok(()) }
    }

    /// The queue for the next request: the one with the fewest bytes in flight, or the last one
    /// used if it has little more.
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

    /// Prepares requests on the queues, as far as there is room. Returns how many it took.
    fn make(&mut self, requests: &[Request]) -> usize {
        for (done, request) in requests.iter().enumerate() {
            if let Some(result) = self.ends_at_once(request) {
                self.untold.push(RequestEnd { tag: request.tag, result });
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

    /// Prepares a request on a reliable queue. False if there is no room.
    #[inline]
    fn make_reliable(&mut self, request: &Request) -> bool {
        let Some(queue) = self.pick() else { return false };
        queue.make(request);
        true
    }

    /// The result of a request that is not given to the device. A request of no bytes succeeds at
    /// once: soft-RoCE can confuse it with a read when packets are lost. A request that is too long
    /// fails.
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
    /// As for [`Channel::post`], for all requests that were prepared and not posted.
    unsafe fn ring(&mut self) -> Result<(), RailError> {
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
        // SAFETY: probes have no memory, and all other prepared requests are posted already.
        unsafe { self.ring() }
    }

    /// Runs the protocol for unreliable queue pairs. Costs nothing if there are none.
    fn turn(&mut self, is_idle: bool, ended: &mut Vec<RequestEnd>) -> Result<(), RailError> {
        let Some(unreliable) = &mut self.unreliable else { return Ok(()) };
        if let Err(error) = unreliable.turn(Instant::now(), is_idle, ended) {
            self.fail(error.clone());
            return Err(error);
        }
        self.post_stubborn()
    }

    /// Posts the pieces that were lost repeatedly to reliable queue pairs.
    fn post_stubborn(&mut self) -> Result<(), RailError> {
        while let Some((item, write)) = self.unreliable.as_ref().and_then(Unreliable::next_stubborn)
        {
            let Some(queue) = self.pick() else { break };
            queue.make_as(RequestOwner::Piece(item), wr_opcode::RDMA_WRITE, 0, &write);
            if let Some(unreliable) = &mut self.unreliable {
                unreliable.took_stubborn();
            }
        }
        // SAFETY: each is a piece of a write that has not ended, and the poster of the write
        // promised that its memory stays valid until then.
        unsafe { self.ring() }
    }

    /// Takes all completions that have come. True if there were any.
    fn reap(&mut self, ended: &mut Vec<RequestEnd>) -> bool {
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

    #[inline]
    fn completed(&mut self, index: usize, wc: &Wc, ended: &mut Vec<RequestEnd>) {
        let Self { queues, unreliable, .. } = self;
        let Some(queue) = queues.get_mut(index) else { return };
        let failure = (wc.status != wc_status::SUCCESS).then(|| classify(wc));
        // A queue pair carries out its requests in order. So those before the failed one succeeded,
        // even if no completion of theirs has come.
        let known = queue.retire(wc.wr_id, |request, is_last| {
            let result = match &failure {
                Some(Failure::Lost) if is_last => return,
                Some(Failure::Request(error)) if is_last => Err(error.clone()),
                _ => Ok(()),
            };
            match (request.what, &mut *unreliable) {
                (RequestOwner::Own(tag), _) => ended.push(RequestEnd { tag, result }),
                (RequestOwner::Piece(item), Some(unreliable)) => {
                    unreliable.piece_ended(item, result, ended)
                }
                (RequestOwner::Piece(_) | RequestOwner::Unreliable, _) => {}
            }
        });
        // The error that caused a flush comes before it or, with soft-RoCE, a little later. It has
        // more information than the flush, so wait for it.
        let cause_may_follow = wc.status == wc_status::WR_FLUSH_ERR && !queue.is_empty();
        if !known && failure.is_none() {
            self.fail(RailError::Lost("a completion of no request of ours".to_owned()));
        } else if failure.is_some() && self.fault.is_none() && !cause_may_follow {
            self.fail(RailError::Lost(self.describe(wc)));
        }
    }

    /// Takes the completions that have come and keeps them for the next poll to report. If there is
    /// a fault, that poll reports it after them.
    fn reap_untold(&mut self, is_idle: bool) -> Result<(), RailError> {
        let mut ended = std::mem::take(&mut self.untold);
        self.reap(&mut ended);
        let result = if self.fault.is_none() { self.turn(is_idle, &mut ended) } else { Ok(()) };
        self.untold = ended;
        result
    }

    /// Handles a completion of an unreliable queue pair.
    fn completed_uc(&mut self, index: usize, wc: &Wc) {
        let Some(unreliable) = &mut self.unreliable else {
            return self.fail(RailError::Lost("a completion of no queue pair of ours".to_owned()));
        };
        let is_receive = wc.wr_id & RECEIVE != 0;
        // A receive fails if its message was refused. Unless it was flushed, the queue pair lives
        // on.
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
        // SAFETY: it returns a string constant, or null, for any number.
        let text = unsafe { (self.pd.verbs().wc_status_str)(wc.status) };
        let text = if text.is_null() {
            "unknown".into()
        } else {
            // SAFETY: not null; a string constant that ends with 0, in a library that stays loaded.
            unsafe { std::ffi::CStr::from_ptr(text) }.to_string_lossy()
        };
        let (device, vendor) = (self.pd.context().name(), wc.vendor_err);
        let hint = hint(wc);
        format!("{device} says {text} (status {}, vendor {vendor:#x}){hint}", wc.status)
    }
}

impl Drop for VerbsChannel {
    fn drop(&mut self) {
        if !self.is_joined {
            return;
        }
        for queue in &self.queues {
            // Soft-RoCE retransmits unanswered packets, and destroying a queue pair waits for that;
            // stopping it first ends the retransmission. If stopping fails, the device has ended
            // the queue pair already.
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
        let peer =
            VerbsAddress::decode(peer).map_err(|error| RailError::Peer(error.to_string()))?;
        if peer.link_layer != self.shape.path.link_layer {
            let (ours, theirs) = (self.shape.path.link_layer, peer.link_layer);
            return Err(RailError::Peer(format!(
                "the address of a port on {theirs:?}; ours is on {ours:?}"
            )));
        }
        self.check_not_joined()?;
        self.answer_from(peer.gid.into());
        self.keep_queues(peer.reliable.len());
        for (queue, qp) in self.queues.iter().zip(&peer.reliable) {
            queue.qp().join(&self.shape.path, &peer, *qp)?;
        }
        match &mut self.unreliable {
            Some(unreliable) if !peer.unreliable.is_empty() => {
                unreliable.join(&self.shape.path, &peer)?
            }
            // The peer has no unreliable queue pairs: writes go over the reliable ones.
            _ => self.unreliable = None,
        }
        self.is_joined = true;
        Ok(())
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
        // SAFETY: the caller's promise; all requests prepared before are posted already.
        unsafe { self.ring() }?;
        if self.unreliable.is_some() {
            // Take completions before looking at the time: otherwise a peer that answered long ago
            // may seem silent.
            self.reap_untold(false)?;
        }
        Ok(made)
    }

    fn poll(&mut self, ended: &mut Vec<RequestEnd>) -> Result<(), RailError> {
        ended.append(&mut self.untold);
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
        // Completions that came before the notification was requested do not make the descriptor
        // readable.
        self.reap_untold(true)?;
        Ok(self.untold.is_empty() && self.fault.is_none())
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.cq.fd())
    }

    fn wake_in(&self, now: Instant) -> Option<Duration> {
        let at = self.unreliable.as_ref()?.next_timeout()?;
        Some(at.saturating_duration_since(now))
    }
}
