//! A channel: an endpoint of its own, with its own address vector and completion queue, so that dropping it ends
//! all that came through it.

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
use uccl_wire::libfabric::{FabricAddress, FabricKey};

use super::{
    domain::Domain,
    endpoint::{Endpoint, Posting},
    failure::{Failure, Report, judge},
    memory::{Lent, Region, map_raw_key, unmap_key},
    providers,
    queue::{FailedEntry, Queue, READ_AT_ONCE, Read},
    raw,
    slots::Slots,
};
use crate::{
    lane::OpKind,
    mem::Span,
    region::Rights,
    rma::rail::{
        Channel, Ended, Limits, MAX_ADDRESS, RailError, Registration, RemoteKey, Request,
        RequestError,
    },
};

/// What longer requests are cut into.
const CHUNK: u64 = 1 << 20;
/// Enough in flight for a network of 400 Gbit/s and more latency than it has, and for the sockets of a host.
const WINDOW: u64 = 8 << 20;
/// Room for probes, beside the requests.
const PROBES: usize = 4;
/// Completions that are taken in one poll, before others get their turn, in reads of [`READ_AT_ONCE`].
const READS: usize = 16;
/// Reads before a queue is closed.
const LAST_READS: usize = 1024;
/// Most raw keys of a peer's that are kept.
const MAX_RAW_KEYS: usize = 1 << 16;
/// How long a drop waits for requests that the peer carries out, where it does.
const DRAIN: Duration = Duration::from_secs(1);
/// How soon to look again when the provider had no room.
const RETRY: Duration = Duration::from_millis(1);
/// How soon to look where nothing can be watched.
const LOOK_BUSY: Duration = Duration::from_micros(100);
const LOOK_IDLE: Duration = Duration::from_millis(1);
/// How soon to look where there is a descriptor: channels of a rail share what drives them in some providers
/// (`tcp` from 1.18, and so `tcp;ofi_rxm`), and once in a while a thread takes another channel's event without the
/// descriptor of that showing it.
const NET_BUSY: Duration = Duration::from_millis(20);
const NET_IDLE: Duration = Duration::from_millis(250);

pub(super) struct LibfabricChannel {
    endpoint: Endpoint,
    queue: Queue,
    slots: Slots,
    scratch: Scratch,
    address: Vec<u8>,
    peer: Option<Peer>,
    /// Requests that were taken, and that the provider had no room for, in order.
    waiting: VecDeque<(u32, Request)>,
    /// Probes that wait for a slot.
    probes: VecDeque<u64>,
    /// What has ended and was not told yet.
    early: Vec<Ended>,
    lent: HashMap<u64, Arc<Lent>>,
    raw_keys: HashMap<Vec<u8>, u64>,
    limits: Limits,
    /// When a request ended last, or the first of those in flight was posted.
    heard: Instant,
    dead: Option<RailError>,
    domain: Arc<Domain>,
}

// SAFETY: one thread at a time calls a channel, and the library's objects belong to none. The pointers in it are
// to objects and memory of its own.
unsafe impl Send for LibfabricChannel {}

/// The peer's end.
struct Peer {
    address: u64,
    probe_addr: u64,
    probe_key: u64,
}

/// Two words: peers write to the first to find out whether the way works, and we send the second.
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
    pub(super) fn open(domain: Arc<Domain>) -> Result<Self, RailError> {
        let limits = limits(&domain);
        let slots = Slots::new(limits.depth + PROBES);
        let completions = domain.settings.cq_size.unwrap_or(2 * (limits.depth + PROBES));
        let serial = domain.serialize();
        let queue = Queue::open(&domain, completions)?;
        let endpoint = Endpoint::open(&domain, &queue)?;
        let scratch = Scratch::new(&domain, &endpoint)?;
        let address = address_of(&domain, &endpoint, &scratch)?;
        drop(serial);
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
            lent: HashMap::new(),
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

    /// Takes a request: it goes to the provider now, or waits for its turn.
    fn accept(&mut self, request: Request, more: bool) -> Result<(), RailError> {
        if self.slots.busy() == 0 {
            self.heard = Instant::now();
        }
        let Some(slot) = self.slots.take(request.tag) else {
            return Err(
                self.die(RailError::Gone("there are more requests than there is room".into()))
            );
        };
        if !self.waiting.is_empty() || !self.submit(slot, &request, more)? {
            self.waiting.push_back((slot, request));
        }
        Ok(())
    }

    /// Gives a request to the provider, once more after it was driven if it has no room; whether it took it.
    fn submit(&mut self, slot: u32, request: &Request, more: bool) -> Result<bool, RailError> {
        for more in [more, false] {
            let posting = Posting {
                peer: self.peer()?.address,
                descriptor: self.descriptor(request),
                context: self.slots.context(slot),
                more,
            };
            // SAFETY: whoever posted promised that the memory stays valid and registered until the request
            // has ended, and that the local key is its registration's; the slot is this request's till then.
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

    /// What the provider wants beside our memory's address.
    fn descriptor(&self, request: &Request) -> *mut c_void {
        if self.domain.has_mode(raw::FI_MR_ENDPOINT) {
            return ptr::null_mut();
        }
        request.local_key as *mut c_void
    }

    /// Has the provider make progress, and keeps what has ended until it is asked for.
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
                self.early.push(Ended { tag, result });
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
            Failure::Channel(error) => Err(self.die(error)),
        }
    }

    /// Offers the provider again what it had no room for.
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

    /// How long it is until the silence has lasted too long; `None`: it may last.
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

    /// Has the provider take in what has come. `ofi_rxm` up to 2.4 does so once more after it has closed its connections, and
    /// then touches what is freed (libfabric's issue 11828).
    fn empty_queue(&self) {
        let mut entries = [raw::CqEntry { op_context: ptr::null_mut() }; READ_AT_ONCE];
        for _ in 0..LAST_READS {
            if let Ok(Read::Empty) | Err(_) = self.queue.read(&self.domain, &mut entries) {
                return;
            }
        }
    }

    /// Waits for requests to end that the peer carries out: it does not know that we are about to go. One that
    /// does not is left to reach where it was told to.
    fn drain(&mut self) {
        let start = Instant::now();
        while self.slots.busy() > self.waiting.len() && start.elapsed() < DRAIN {
            if self.drive().is_err() {
                return;
            }
            std::thread::yield_now();
        }
        let left = self.slots.busy() - self.waiting.len();
        if left > 0 {
            tracing::warn!(
                left,
                "a channel was dropped whose requests the peer may still carry out"
            );
        }
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

    /// Writes one word to a word that the peer's end keeps for that. Providers differ in what they make of
    /// writes of no length, and a message would need a receiver.
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
            // Providers differ in what they make of no length; nothing has to be moved for it.
            let result = if request.local.len == 0 {
                Ok(())
            } else {
                let len = request.local.len;
                Err(RequestError::Failed(format!("{len} bytes in one request, at most {max} go")))
            };
            self.early.push(Ended { tag: request.tag, result });
        }
        Ok(requests.len())
    }

    fn poll(&mut self, ended: &mut Vec<Ended>) -> Result<(), RailError> {
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

    /// Where the provider ties registrations to endpoints (`FI_MR_ENDPOINT`: `cxi`), makes one of this channel's
    /// endpoint, which ends with the registration or the channel. That was never run.
    fn export(&mut self, registration: &dyn Registration) -> Result<RemoteKey, RailError> {
        if !self.domain.has_mode(raw::FI_MR_ENDPOINT) {
            return Ok(registration.remote_key());
        }
        let id = registration.local_key();
        if let Some(lent) = self.lent.get(&id) {
            return Ok(lent.key.clone());
        }
        let lent = self.domain.lendings.lend(id, &self.domain, self.endpoint.object())?;
        let key = lent.key.clone();
        self.lent.retain(|_, lent| lent.is_live());
        self.lent.insert(id, lent);
        Ok(key)
    }

    fn arm(&mut self) -> Result<bool, RailError> {
        self.alive()?;
        Ok(self.early.is_empty() && self.queue.may_sleep(&self.domain))
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.queue.fd()
    }

    /// Where the provider gives no descriptor (`shm`, `cxi` in most versions), this is how the channel is
    /// served at all: a sleeper looks a thousand times a second while the channel is idle, which costs about 1% of a
    /// CPU and up to 1 ms of the peer's first request, and at every chance while there are requests.
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
        if providers::peer_does_the_work(&self.domain.provider) {
            self.drain();
        }
        self.empty_queue();
        let lent = self.lent.values().map(|lent| lent.end(&self.domain));
        for error in lent.filter_map(Result::err) {
            // Whoever deregisters the memory is told.
            tracing::debug!(%error, "a channel ends before its regions");
        }
        if let Err(error) = self.scratch.region.close(&self.domain) {
            tracing::error!(%error, "two words of memory are kept until the process ends");
            Box::leak(std::mem::take(&mut self.scratch.words));
        }
        let serial = self.domain.serialize();
        for key in self.raw_keys.values() {
            unmap_key(&self.domain, *key);
        }
        if let Err(code) = self.endpoint.close() {
            let why = self.domain.library.words(code);
            tracing::error!(why, "an endpoint was not closed: its requests may still touch memory");
            self.slots.abandon();
            Box::leak(std::mem::take(&mut self.scratch.words));
        }
        if let Err(code) = self.queue.close() {
            tracing::debug!(code, "a completion queue was not closed");
        }
        self.endpoint.close_rest();
        drop(serial);
    }
}
