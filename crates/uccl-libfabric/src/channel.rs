//! A channel: an endpoint with an address vector and a completion queue of its own, so that
//! dropping the channel ends all its requests.

use std::{
    cell::UnsafeCell,
    collections::{HashMap, VecDeque},
    ffi::c_void,
    os::fd::BorrowedFd,
    ptr,
    sync::Arc,
    time::{Duration, Instant},
};

use uccl_device::MemoryKind;
use uccl_fabric::{
    lane::OpKind,
    mem::Span,
    rail::{
        Channel, Export, Limits, MAX_ADDRESS, RailError, Registration, Request, RequestEnd,
        RequestError,
    },
    region::Rights,
};
use uccl_wire::libfabric::{FabricAddress, FabricKey};

use super::{
    domain::Domain,
    endpoint::{Endpoint, PostArguments},
    failure::{Failure, Report, judge},
    memory::{Borrower, Region, RegionLoans, map_raw_key, unmap_key},
    providers,
    queue::{FailedEntry, Queue, READ_AT_ONCE, Read},
    raw,
    slots::Slots,
};

/// Longer requests are cut into parts of this many bytes.
const CHUNK: u64 = 1 << 20;
/// Most bytes in flight. Enough for a network of 400 Gbit/s with more latency than such networks
/// have, and for the sockets of a host.
const WINDOW: u64 = 8 << 20;
/// Slots for probes, in addition to those for requests.
const PROBES: usize = 4;
/// How many reads of [`READ_AT_ONCE`] completions one poll makes at most, so that other channels
/// get their turn.
const READS: usize = 16;
/// Most raw keys of a peer that are mapped at a time.
const MAX_RAW_KEYS: usize = 1 << 16;
/// How long a drop waits for requests to end, with providers that demand it. A killed lane over
/// rails waits a little longer for its channels, so that the operations of a peer that stands still
/// end with it too.
const DRAIN: Duration = Duration::from_millis(700);
/// How soon to look again when the provider had no room.
const RETRY: Duration = Duration::from_millis(1);
/// How soon to look if the provider has no descriptor to watch.
const LOOK_BUSY: Duration = Duration::from_micros(100);
const LOOK_IDLE: Duration = Duration::from_millis(1);
/// How soon to look even though there is a descriptor. In some providers (`tcp` from 1.18, and so
/// `tcp;ofi_rxm`) the channels of a rail share their progress engine. Once in a while a thread
/// takes an event of another channel, and the descriptor of that channel then does not show it.
const NET_BUSY: Duration = Duration::from_millis(20);
const NET_IDLE: Duration = Duration::from_millis(250);

pub(super) struct LibfabricChannel {
    endpoint: Endpoint,
    queue: Queue,
    slots: Slots,
    scratch: Scratch,
    address: Vec<u8>,
    peer: Option<Peer>,
    /// Requests that we have accepted and the provider had no room for yet, in order.
    waiting: VecDeque<(u32, Request)>,
    /// Probes that wait for a slot.
    probes: VecDeque<u64>,
    /// Ended requests that are not reported yet.
    early: Vec<RequestEnd>,
    /// Makes regions for the endpoint, where the provider ties regions to endpoints.
    borrower: Option<Arc<Borrower>>,
    raw_keys: HashMap<Vec<u8>, u64>,
    limits: Limits,
    /// When a request last ended, or when the first of those in flight was posted.
    heard: Instant,
    dead: Option<RailError>,
    domain: Arc<Domain>,
}

// SAFETY: one thread at a time calls a channel, and the library's objects are not tied to a thread.
// Its pointers point to its own objects and memory.
unsafe impl Send for LibfabricChannel {}

/// The peer's end.
struct Peer {
    address: u64,
    probe_addr: u64,
    probe_key: u64,
}

/// Two words of registered memory. The peer's probes write to the first; our probes send the
/// second.
struct Scratch {
    region: Region,
    words: Box<UnsafeCell<[u64; 2]>>,
}

impl Scratch {
    fn new(domain: &Domain, endpoint: &Endpoint) -> Result<Self, RailError> {
        let words = Box::new(UnsafeCell::new([0; 2]));
        let span = Span { addr: words.get() as usize, len: size_of::<[u64; 2]>() };
        let ep = Some(endpoint.object());
        let region = Region::register(domain, span, MemoryKind::Host, Rights::ALL, ep)?;
        Ok(Self { region, words })
    }

    fn source(&self) -> Span {
        Span { addr: self.words.get() as usize + 8, len: 8 }
    }
}

impl LibfabricChannel {
    pub(super) fn open(domain: Arc<Domain>, lendings: Arc<RegionLoans>) -> Result<Self, RailError> {
        let limits = limits(&domain);
        let slots = Slots::new(limits.depth + PROBES);
        let completions = domain.settings.cq_size.unwrap_or(2 * (limits.depth + PROBES));
        let serial = domain.serialize();
        let queue = Queue::open(&domain, completions)?;
        let endpoint = Endpoint::open(&domain, &queue)?;
        let scratch = Scratch::new(&domain, &endpoint)?;
        let address = address_of(&domain, &endpoint, &scratch)?;
        drop(serial);
        // SAFETY: the channel's drop ends this before it closes the endpoint.
        let borrower = domain.has_mode(raw::FI_MR_ENDPOINT).then(|| unsafe {
            Arc::new(Borrower::new(Arc::clone(&domain), lendings, endpoint.object()))
        });
        Ok(Self {
            endpoint,
            queue,
            slots,
            scratch,
            address,
            peer: None,
            waiting: VecDeque::with_capacity(limits.depth + PROBES),
            probes: VecDeque::new(),
            early: Vec::new(),
            borrower,
            raw_keys: HashMap::new(),
            limits,
            heard: Instant::now(),
            dead: None,
            domain,
        })
    }

    fn alive(&self) -> Result<(), RailError> {
        self.dead.clone().map_or(Ok(()), Err)
    }

    fn die(&mut self, error: RailError) -> RailError {
        tracing::debug!(provider = self.domain.provider, %error, "a channel died");
        self.dead = Some(error.clone());
        error
    }

    fn peer(&self) -> Result<&Peer, RailError> {
        let peer = self.peer.as_ref();
        peer.ok_or_else(|| RailError::Peer("no address yet, and there are requests".into()))
    }

    /// Accepts a request: it goes to the provider now or waits for its turn.
    fn accept(&mut self, request: Request, more: bool) -> Result<(), RailError> {
        if self.slots.busy() == 0 {
            self.heard = Instant::now();
        }
        let Some(slot) = self.slots.take(request.tag, request.kind) else {
            return Err(
                self.die(RailError::Gone("there are more requests than there is room".into()))
            );
        };
        if !self.waiting.is_empty() || !self.submit(slot, &request, more)? {
            self.waiting.push_back((slot, request));
        }
        Ok(())
    }

    /// Gives a request to the provider. If the provider has no room, drives it and tries once more.
    /// True unless there is still no room.
    fn submit(&mut self, slot: u32, request: &Request, more: bool) -> Result<bool, RailError> {
        for more in [more, false] {
            let posting = PostArguments {
                peer: self.peer()?.address,
                descriptor: self.descriptor(request),
                context: self.slots.context(slot),
                more,
            };
            // SAFETY: the caller that posted the request promised that its memory stays valid and
            // registered until it has ended, and that the local key is its registration's. The slot
            // belongs to this request until then.
            match unsafe { self.endpoint.post(&self.domain, request, posting) } {
                Ok(()) => return Ok(true),
                Err(code) if code == -libc::EAGAIN => self.drive()?,
                Err(code) => {
                    let words = self.domain.library.words(code);
                    let failed = FailedEntry {
                        context: posting.context,
                        errno: code.saturating_abs(),
                        provider_errno: 0,
                        words,
                    };
                    self.request_failed(&failed)?;
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// The descriptor of our memory, which the provider wants in addition to its address.
    fn descriptor(&self, request: &Request) -> *mut c_void {
        if self.domain.has_mode(raw::FI_MR_ENDPOINT) {
            return ptr::null_mut();
        }
        request.local_key as *mut c_void
    }

    /// Makes the provider progress, and keeps the completions until they are asked for.
    fn drive(&mut self) -> Result<(), RailError> {
        let mut entries = [raw::CqEntry { op_context: ptr::null_mut() }; READ_AT_ONCE];
        for _ in 0..READS {
            let read = match self.queue.read(&self.domain, &mut entries) {
                Ok(read) => read,
                Err(error) => return Err(self.die(error)),
            };
            match read {
                Read::Empty => return Ok(()),
                Read::Ended(count) => {
                    for entry in entries.iter().take(count) {
                        self.request_ended(entry.op_context, Ok(()));
                    }
                    if count < READ_AT_ONCE {
                        return Ok(());
                    }
                }
                Read::Failed(entry) => self.request_failed(&entry)?,
            }
        }
        Ok(())
    }

    fn request_ended(&mut self, context: *mut c_void, result: Result<(), RequestError>) {
        match self.slots.end(context) {
            Some(tag) => {
                self.heard = Instant::now();
                self.early.push(RequestEnd { tag, result });
            }
            None => tracing::debug!(?context, "the provider ended what is not in flight"),
        }
    }

    fn request_failed(&mut self, entry: &FailedEntry) -> Result<(), RailError> {
        let report = Report {
            errno: entry.errno,
            provider_errno: entry.provider_errno,
            provider: &self.domain.provider,
            words: &entry.words,
        };
        tracing::debug!(?report, "a request failed");
        match judge(report) {
            Failure::Request(error) => {
                self.request_ended(entry.context, Err(error));
                Ok(())
            }
            Failure::Channel(error) => {
                // It has ended, though its result is not known: the channel does not wait for it.
                self.slots.end(entry.context);
                Err(self.die(error))
            }
        }
    }

    /// Gives the provider again the requests and probes that it had no room for.
    fn retry(&mut self) -> Result<(), RailError> {
        while let Some((slot, request)) = self.waiting.pop_front() {
            if !self.submit(slot, &request, false)? {
                self.waiting.push_front((slot, request));
                return Ok(());
            }
        }
        while !self.probes.is_empty() && self.slots.busy() < self.limits.depth + PROBES {
            if let Some(tag) = self.probes.pop_front() {
                self.send_probe(tag)?;
            }
        }
        Ok(())
    }

    fn send_probe(&mut self, tag: u64) -> Result<(), RailError> {
        let peer = self.peer()?;
        let request = Request {
            kind: OpKind::Write,
            local: self.scratch.source(),
            local_key: self.scratch.region.descriptor() as u64,
            remote_addr: peer.probe_addr,
            remote_key: peer.probe_key,
            tag,
        };
        self.accept(request, false)
    }

    /// How long the provider may stay silent until the channel is lost. `None`: without limit.
    fn patience(&self, now: Instant) -> Option<Duration> {
        let limit = self.domain.settings.silence;
        let counts = !limit.is_zero() && self.slots.busy() > 0;
        counts.then(|| limit.saturating_sub(now.saturating_duration_since(self.heard)))
    }

    fn check_silence(&mut self) -> Result<(), RailError> {
        if self.slots.busy() == 0 || self.patience(Instant::now()) != Some(Duration::ZERO) {
            return Ok(());
        }
        let (busy, limit) = (self.slots.busy(), self.domain.settings.silence);
        let why = format!("none of {busy} requests has ended for {} s", limit.as_secs_f32());
        Err(self.die(RailError::Lost(why)))
    }

    /// Waits until `count` of the slots is 0, or for [`DRAIN`]. Returns the last count.
    fn drain(&mut self, count: fn(&Slots) -> usize) -> usize {
        let start = Instant::now();
        loop {
            let left = count(&self.slots);
            if left == 0 || start.elapsed() >= DRAIN {
                return left;
            }
            // A failed request has freed its slot, and the channel keeps the error. The others may
            // still end.
            let _ = self.drive();
            std::thread::yield_now();
        }
    }

    /// Whether the endpoint must stay open, because closing it would crash the process.
    fn must_stay_open(&mut self) -> bool {
        let (provider, version) = (&self.domain.provider, self.domain.library.version());
        if !providers::ends_reads_twice(provider, version) {
            return false;
        }
        let reads = self.drain(Slots::reads);
        if reads > 0 {
            tracing::warn!(
                reads,
                provider = self.domain.provider,
                "the peer of a channel that ends does not answer: the channel's memory (about 90 MB) and sockets are \
                 kept until the process ends, as libfabric before 1.18 crashes where it closes them now"
            );
        }
        reads > 0
    }

    /// Leaves endpoint, queue and all that they touch until the process ends. Nobody drives them
    /// any more: nothing lands in the memory of their requests.
    fn keep(&mut self) {
        self.endpoint.keep();
        self.queue.keep();
        self.slots.abandon();
        Box::leak(std::mem::take(&mut self.scratch.words));
        std::mem::forget(Arc::clone(&self.domain));
    }

    fn close(&mut self) {
        let domain = Arc::clone(&self.domain);
        let _serial = domain.serialize();
        if let Err(code) = self.endpoint.close() {
            let why = domain.library.words(code);
            tracing::error!(why, "an endpoint was not closed: its requests may still touch memory");
            self.slots.abandon();
            Box::leak(std::mem::take(&mut self.scratch.words));
        }
        if let Err(code) = self.queue.close() {
            tracing::debug!(code, "a completion queue was not closed");
        }
        self.endpoint.close_rest();
    }
}

fn limits(domain: &Domain) -> Limits {
    let info = domain.info.first();
    let queue = info.tx().map_or(0, |tx| tx.size);
    let depth = domain.settings.max_inflight;
    let depth = if queue > 0 { depth.min(queue.saturating_sub(PROBES).max(1)) } else { depth };
    let max_bytes = info.ep().map_or(CHUNK, |ep| ep.max_msg_size as u64).max(1);
    Limits { max_bytes, chunk_bytes: CHUNK.min(max_bytes), depth, window_bytes: WINDOW }
}

fn address_of(
    domain: &Domain,
    endpoint: &Endpoint,
    scratch: &Scratch,
) -> Result<Vec<u8>, RailError> {
    let probe = scratch.region.remote_key(domain)?;
    let address = FabricAddress {
        provider: &domain.provider,
        format: domain.info.first().address_format(),
        name: endpoint.name(),
        probe_addr: probe.base,
        probe_key: &probe.key,
    };
    let bytes = address.encode().ok().filter(|bytes| bytes.len() <= MAX_ADDRESS);
    bytes.ok_or_else(|| domain.error("fi_getname", raw::FI_ETOOSMALL))
}

impl Channel for LibfabricChannel {
    fn address(&self) -> &[u8] {
        &self.address
    }

    fn connect(&mut self, peer: &[u8]) -> Result<(), RailError> {
        self.alive()?;
        let told = FabricAddress::decode(peer).map_err(|e| RailError::Peer(e.to_string()))?;
        let (ours, format) = (&self.domain.provider, self.domain.info.first().address_format());
        if told.provider != ours || told.format != format {
            return Err(RailError::Peer(format!(
                "an address of {} in format {}, where {ours} and {format} are spoken",
                told.provider, told.format
            )));
        }
        let probe_key = self.import(told.probe_key)?;
        let serial = self.domain.serialize();
        let address = self.endpoint.insert(&self.domain, told.name)?;
        drop(serial);
        self.peer = Some(Peer { address, probe_addr: told.probe_addr, probe_key });
        Ok(())
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    /// Writes one word to a word that the peer's end keeps for this. Providers differ in how they
    /// treat writes of no length, and a message would need a receiver.
    fn probe(&mut self, tag: u64) -> Result<(), RailError> {
        self.alive()?;
        self.peer()?;
        if self.slots.busy() < self.limits.depth + PROBES {
            return self.send_probe(tag);
        }
        self.probes.push_back(tag);
        Ok(())
    }

    unsafe fn post(&mut self, requests: &[Request]) -> Result<usize, RailError> {
        self.alive()?;
        self.peer()?;
        let room = self.limits.depth.saturating_sub(self.slots.busy());
        let requests = requests.get(..room).unwrap_or(requests);
        let max = self.limits.max_bytes;
        let travels = |request: &Request| (1..=max).contains(&(request.local.len as u64));
        let last = requests.iter().rposition(travels).unwrap_or(0);
        for (at, request) in requests.iter().enumerate() {
            if travels(request) {
                self.accept(*request, at < last)?;
                continue;
            }
            // Providers differ in how they treat requests of no length, and there is nothing to
            // move.
            let result = if request.local.len == 0 {
                Ok(())
            } else {
                let len = request.local.len;
                Err(RequestError::Failed(format!("{len} bytes in one request, at most {max} go")))
            };
            self.early.push(RequestEnd { tag: request.tag, result });
        }
        Ok(requests.len())
    }

    fn poll(&mut self, ended: &mut Vec<RequestEnd>) -> Result<(), RailError> {
        let result = self.alive().and_then(|()| {
            self.drive()?;
            self.retry()?;
            if self.early.is_empty() { self.check_silence() } else { Ok(()) }
        });
        ended.append(&mut self.early);
        result
    }

    fn import(&mut self, key: &[u8]) -> Result<u64, RailError> {
        let key = FabricKey::decode(key).map_err(|e| RailError::Peer(e.to_string()))?;
        let is_raw = self.domain.has_mode(raw::FI_MR_RAW);
        match key {
            FabricKey::Plain(key) if !is_raw => Ok(key),
            FabricKey::Raw { base, bytes } if is_raw => {
                let name = [&base.to_le_bytes()[..], bytes].concat();
                if let Some(known) = self.raw_keys.get(&name) {
                    return Ok(*known);
                }
                if self.raw_keys.len() >= MAX_RAW_KEYS {
                    return Err(RailError::Peer(format!("more than {MAX_RAW_KEYS} raw keys")));
                }
                let serial = self.domain.serialize();
                let mapped = map_raw_key(&self.domain, base, bytes)?;
                drop(serial);
                self.raw_keys.insert(name, mapped);
                Ok(mapped)
            }
            _ => Err(RailError::Peer("a key of the kind that its provider has not".into())),
        }
    }

    /// If the provider ties registrations to endpoints (`FI_MR_ENDPOINT`: `cxi`), a registration
    /// for this channel's endpoint has to be made. It ends with `registration` or with the channel.
    /// That was never run.
    fn export(&mut self, registration: &dyn Registration) -> Export {
        let Some(borrower) = &self.borrower else {
            return Export::Known(registration.remote_key());
        };
        let id = registration.local_key();
        if let Some(key) = borrower.key_of(id) {
            return Export::Known(key);
        }
        let borrower = Arc::clone(borrower);
        Export::ToMake(Box::new(move || borrower.make(id)))
    }

    fn arm(&mut self) -> Result<bool, RailError> {
        self.alive()?;
        Ok(self.early.is_empty() && self.queue.may_sleep(&self.domain))
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.queue.fd()
    }

    /// If the provider gives no descriptor (`shm`, `cxi` in most versions), the channel is served
    /// only because a sleeper wakes to look. While the channel is idle, that happens a thousand
    /// times a second, which costs about 1% of a CPU and up to 1 ms of the peer's first request.
    /// While there are requests, it happens as often as it can.
    fn wake_in(&self, now: Instant) -> Option<Duration> {
        let busy = self.slots.busy() > 0;
        let look = match self.queue.fd() {
            None if busy => Some(LOOK_BUSY),
            None => Some(LOOK_IDLE),
            Some(_) if !self.waiting.is_empty() || !self.probes.is_empty() => Some(RETRY),
            Some(_) if busy => Some(NET_BUSY),
            Some(_) => self.domain.is_manual().then_some(NET_IDLE),
        };
        [look, self.patience(now)].into_iter().flatten().min()
    }
}

impl Drop for LibfabricChannel {
    fn drop(&mut self) {
        for (slot, _) in std::mem::take(&mut self.waiting) {
            self.slots.end(self.slots.context(slot));
        }
        if providers::peer_does_the_work(&self.domain.provider) {
            let left = self.drain(Slots::busy);
            if left > 0 {
                tracing::warn!(
                    left,
                    "a channel was dropped whose requests the peer may still carry out"
                );
            }
        }
        let stays = self.must_stay_open();
        if let Some(borrower) = &self.borrower {
            borrower.end();
        }
        if let Err(error) = self.scratch.region.close(&self.domain) {
            tracing::error!(%error, "two words of memory are kept until the process ends");
            Box::leak(std::mem::take(&mut self.scratch.words));
        }
        let serial = self.domain.serialize();
        for key in self.raw_keys.values() {
            unmap_key(&self.domain, *key);
        }
        drop(serial);
        if stays { self.keep() } else { self.close() }
    }
}
