//! The endpoint: what callers hold.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    sync::{
        Arc,
        atomic::Ordering::{Relaxed, SeqCst},
    },
    time::{Duration, Instant},
};

use serde::Serialize;
use smallvec::{SmallVec, smallvec};
use uccl_device::{
    CpuList, MemoryKind, NearNic,
    cuda::{Event, Gpus, Signal, Stream},
};
use uccl_fabric::{
    alloc,
    fdpass::FdListener,
    lane::{OpKind, Operation, Posted},
    mem::{RemoteSpan, Span},
    tcp,
};
use uccl_wire::{advert::Advert, message::MAX_IOVS};

use crate::{
    config::Config,
    engine::{
        acceptor::Acceptor,
        connect,
        connection::Connection,
        core::Core,
        deadline,
        deferred::{Mark, Start},
        greeting::Greeting,
        now::Now,
        places,
        plan::Pieces,
        regions::{Lease, Mr, contains, outside},
        transfer::{After, Fence, Found, Kind, Plan, Transfer},
        wait,
        worker::Workers,
    },
    error::{Error, Result},
    ids::{ConnId, MrId, TransferId},
};

/// How long a cancel waits for the peer to confirm that nothing more lands, before it cuts the connection.
const CANCEL_PATIENCE: Duration = Duration::from_secs(2);
/// How long a call waits for a GPU's copy before it makes a transfer of it.
const MOMENT: Duration = Duration::from_millis(1);
/// How often a call looks for notifications before it looks at the clock.
const LOOKS: u32 = 8;
/// How often a waiting call asks whether to go on.
const SLICE: Duration = Duration::from_millis(50);

/// What a waiting call asks now and then (at least every 50 ms): go on, or stop?
pub trait Interrupt {
    /// True stops the waiting call with [`Error::Interrupted`].
    fn interrupted(&mut self) -> bool;
}

/// Nothing interrupts.
pub struct Uninterrupted;

impl Interrupt for Uninterrupted {
    fn interrupted(&mut self) -> bool {
        false
    }
}

/// What a transfer does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Op {
    /// From the peer's advertised memory into ours.
    Read,
    /// From the peer's matching send into ours.
    Recv,
    /// From ours to the peer's matching recv.
    Send,
    /// From ours into the peer's advertised memory.
    Write,
}

/// A piece of local memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Iov {
    /// The region it lies in.
    pub mr: MrId,
    /// Its address.
    pub ptr: usize,
    /// Its length in bytes.
    pub len: usize,
}

/// What is asked of a connection: n iovs moved as one.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Over which connection.
    pub conn: ConnId,
    /// What to do.
    pub op: Op,
    /// Local memory, one piece an iov.
    pub iovs: &'a [Iov],
    /// The peer's memory, one advert an iov; empty for send and recv.
    pub adverts: &'a [Advert],
    /// Delivered to the peer after the data, if given (read, write and send).
    pub notif: Option<&'a [u8]>,
    /// Deadline from now; `None` takes the endpoint's, zero waits for ever.
    pub timeout: Option<Duration>,
    /// The transfer begins after what is on this stream when it is posted. `None`: the caller has waited for
    /// whatever makes or uses the memory.
    pub after: Option<CudaStream>,
}

/// A CUDA stream, as frameworks name theirs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CudaStream {
    device: u32,
    handle: u64,
}

impl CudaStream {
    /// The stream with this handle (`cudaStream_t` as a number; 0 is the default stream) on the GPU of this
    /// ordinal.
    ///
    /// # Safety
    /// There is such a stream until the calls that it is given to have returned.
    #[must_use]
    pub unsafe fn new(device: u32, handle: u64) -> Self {
        Self { device, handle }
    }

    fn borrow(self) -> Result<Stream> {
        let context = Gpus::get().device(self.device).and_then(|device| device.context());
        let context = context.map_err(|e| Error::Invalid(format!("stream: {e}")))?;
        // SAFETY: the promise made to `new`.
        Ok(unsafe { Stream::borrow(context, self.handle) })
    }

    /// An event that happens when what is on the stream now has been done.
    fn mark(self) -> Result<Box<dyn Mark>> {
        let stream = self.borrow()?;
        let event = Event::new(stream.context());
        let event = event.and_then(|event| event.record(&stream).map(|()| event));
        match event {
            Ok(event) => Ok(Box::new(event)),
            Err(e) => Err(Error::Invalid(format!("stream: {e}"))),
        }
    }
}

/// Where a transfer stands.
#[derive(Clone, Debug)]
pub enum Status {
    /// Not finished.
    Pending,
    /// Finished well.
    Done(Outcome),
    /// Finished badly. Asked again, the answer is the same.
    Failed(Error),
}

/// What a finished transfer did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Outcome {
    /// Bytes moved (for a recv: bytes received, which may be fewer than its capacity).
    pub bytes: u64,
    /// Whether every byte was covered by a checksum.
    pub checksummed: bool,
}

/// A connection that accept returned.
#[derive(Clone, Debug)]
pub struct Accepted {
    /// Its name here.
    pub conn: ConnId,
    /// Where the peer connected from.
    pub ip: IpAddr,
    /// The peer's GPU.
    pub gpu_index: u32,
}

/// A message that a peer sent, delivered after the data it follows.
#[derive(Clone, Debug)]
pub struct Notification {
    /// The connection it came over.
    pub conn: ConnId,
    /// What it says.
    pub payload: Vec<u8>,
}

/// What is known of a connection.
#[derive(Clone, Debug, Serialize)]
pub struct ConnInfo {
    /// The peer's address.
    pub addr: SocketAddr,
    /// The peer's GPU.
    pub gpu_index: u32,
    /// How the peer is named in errors.
    pub peer: String,
    /// Whether the peer is on this host.
    pub same_host: bool,
    /// The path one-sided data takes: `cma`, `shm`, `tcp` (and `mapped` for memory from alloc).
    pub path: String,
    /// Number of lanes that live.
    pub lanes: usize,
    /// Whether stream data carries checksums.
    pub checksum: bool,
}

/// What is known of a region.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct RegionInfo {
    /// Where it starts.
    pub addr: usize,
    /// How long it is, in bytes.
    pub len: usize,
    /// What kind of memory it is.
    pub kind: MemoryKind,
    /// The NUMA node that host memory was on when it was registered: its first page, on a machine with
    /// several nodes, where the kernel tells.
    pub numa_node: Option<u32>,
    /// The NIC nearest to it that can be used: that of its GPU, or of its node; where neither is known, that
    /// of the endpoint's GPU. `None` where no NIC is up. NICs are looked at once in a process.
    pub nic: Option<NearNic>,
}

/// Counters of an endpoint since it was made.
#[derive(Clone, Debug, Default, Serialize)]
#[non_exhaustive]
pub struct Stats {
    /// Open connections.
    pub connections: u64,
    /// Registered regions.
    pub regions: u64,
    /// Transfers posted here.
    pub transfers_posted: u64,
    /// Transfers finished well.
    pub transfers_done: u64,
    /// Transfers failed.
    pub transfers_failed: u64,
    /// Payload bytes sent by this endpoint's transfers (write, send).
    pub bytes_sent: u64,
    /// Payload bytes received by this endpoint's transfers (read, recv).
    pub bytes_received: u64,
    /// Notifications sent.
    pub notifs_sent: u64,
    /// Notifications received.
    pub notifs_received: u64,
    /// Accesses by peers that were refused.
    pub refused_accesses: u64,
    /// Handshakes that were refused.
    pub refused_handshakes: u64,
    /// Lanes that died while their connection went on.
    pub lanes_lost: u64,
    /// Copies between our locked host memory and peers' GPU memory that we made because they asked.
    pub copied_for_peers: u64,
}

/// Memory that peers on this host can map, so that a transfer is one user-space copy.
///
/// Freed when the last clone is dropped; regions over it keep it alive.
#[derive(Clone)]
pub struct SharedBuf {
    inner: Arc<alloc::SharedBuf>,
    len: usize,
}

impl SharedBuf {
    /// Where it starts.
    pub fn as_ptr(&self) -> *mut u8 {
        self.inner.as_ptr()
    }

    /// How long it is, in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// One process's engine for one GPU (or none). Clones share the engine; it closes with the last.
#[derive(Clone)]
pub struct Endpoint {
    handle: Arc<Handle>,
}

struct Handle {
    core: Arc<Core>,
    greeting: Arc<Greeting>,
    addr: SocketAddr,
}

impl Drop for Handle {
    fn drop(&mut self) {
        close(&self.core);
    }
}

impl Endpoint {
    /// Starts an endpoint: listens, and runs its first worker.
    pub fn new(config: Config) -> Result<Self> {
        let near = places::cpus_for_workers(&config);
        Self::start_on(config, near)
    }

    /// With workers on these CPUs, or anywhere.
    pub(crate) fn start_on(config: Config, near: Option<CpuList>) -> Result<Self> {
        let workers = Workers::new(config.num_cpus, near)?;
        let core = Arc::new(Core::new(config, workers)?);
        let (listener, addr) = listen(&core.config)?;
        let (uds, uds_name) = listen_locally();
        let greeting = Arc::new(Greeting::new(addr.port(), uds_name)?);
        let acceptor = Acceptor::new(listener, uds, Arc::clone(&greeting));
        Workers::start(&core, acceptor)?;
        Ok(Self { handle: Arc::new(Handle { core, greeting, addr }) })
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.handle.core
    }

    /// The settings it runs with.
    pub fn config(&self) -> &Config {
        &self.core().config
    }

    /// The address it listens on; the IP is one that peers can reach (or the bound one).
    pub fn addr(&self) -> SocketAddr {
        self.handle.addr
    }

    /// Connects to the endpoint that listens at `addr`, within `timeout` (by default the
    /// endpoint's; zero waits for ever).
    pub fn connect(
        &self,
        addr: SocketAddr,
        timeout: Option<Duration>,
        interrupt: &mut dyn Interrupt,
    ) -> Result<ConnId> {
        let timeout = timeout.unwrap_or(self.config().timeout);
        let conn = connect::connect(self.core(), &self.handle.greeting, addr, timeout, interrupt)?;
        Ok(conn.id)
    }

    /// Waits for a peer that connected and hands its connection over.
    pub fn accept(
        &self,
        timeout: Option<Duration>,
        interrupt: &mut dyn Interrupt,
    ) -> Result<Accepted> {
        let core = self.core();
        let timeout = timeout.unwrap_or(self.config().transfer_timeout);
        let until = (!timeout.is_zero()).then(|| Instant::now() + timeout);
        loop {
            core.usable()?;
            let mut accepts = core.accepts.lock();
            if let Some(accepted) = accepts.waiting.pop_front() {
                return Ok(accepted);
            }
            let left = until.map_or(SLICE, |until| until.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Err(Error::Timeout(timeout));
            }
            core.accepted.wait_for(&mut accepts, left.min(SLICE));
            drop(accepts);
            if interrupt.interrupted() {
                return Err(Error::Interrupted);
            }
        }
    }

    /// From now on connections are taken as they come; accept will not return them.
    pub fn start_passive_accept(&self) -> Result<()> {
        self.core().usable()?;
        let mut accepts = self.core().accepts.lock();
        accepts.passive = true;
        accepts.waiting.clear();
        Ok(())
    }

    /// Closes a connection; its unfinished transfers fail.
    pub fn disconnect(&self, conn: ConnId) -> Result<()> {
        match self.core().conn(conn) {
            Ok(open) => {
                let peer = Arc::clone(&open.peer.name);
                open.close(Error::ConnectionLost { peer, reason: "closed here".into() });
            }
            Err(Error::UnknownConnection(_)) => return Err(Error::UnknownConnection(conn)),
            Err(_) => {}
        }
        self.core().forget_conn(conn);
        Ok(())
    }

    /// What is known of a connection, also of one that was lost and not yet disconnected.
    pub fn connection(&self, conn: ConnId) -> Result<ConnInfo> {
        self.core().conn_info(conn)
    }

    /// The path that one-sided data to and from this memory of the peer's takes: `mapped` (memory from
    /// [`Self::alloc`] on this host), `cma`, `shm` or `tcp`.
    pub fn path(&self, conn: ConnId, advert: &Advert) -> Result<&'static str> {
        let conn = self.core().conn(conn)?;
        let all = Span { addr: 0, len: advert.len as usize };
        let remote = remote_span(&conn, 0, all, advert)?;
        Ok(conn.lanes[0].path_to(&remote))
    }

    /// The same between this memory of the peer's and a region of ours, for long transfers: `owner` where the
    /// peer makes the copy, because GPUs of its own reach its locked host memory and ours do not.
    pub fn path_from(&self, conn: ConnId, mr: MrId, advert: &Advert) -> Result<&'static str> {
        let (open, mr) = (self.core().conn(conn)?, self.core().mrs.get(mr)?);
        let all = Span { addr: 0, len: advert.len as usize };
        if open.asks_owner(&mr, remote_span(&open, 0, all, advert)?) {
            return Ok("owner");
        }
        self.path(conn, advert)
    }

    /// Whether transfers can be posted on a connection; the error says why not.
    pub fn check_connection(&self, conn: ConnId) -> Result<()> {
        self.core().conn(conn).map(drop)
    }

    /// Registers memory.
    ///
    /// # Safety
    /// The `len` bytes at `ptr` must stay allocated until the region is deregistered or the endpoint
    /// closed: peers that hold an advert read and write them at any time.
    pub unsafe fn register(&self, ptr: usize, len: usize) -> Result<MrId> {
        self.core().usable()?;
        Ok(self.core().add_region(Span { addr: ptr, len })?.id)
    }

    /// Ends a region: when this returns `Ok`, no peer's access lands in it any more.
    ///
    /// A region that unfinished transfers of this endpoint use is refused. A peer of this host that is
    /// in the middle of an access is waited for, also one whose connection has been given up, at most for
    /// the endpoint's timeout. Then its connection is given up, and so is the wait: the error says that the
    /// peer may still touch the memory, which must stay allocated until the peer has ended.
    pub fn deregister(&self, mr: MrId) -> Result<()> {
        let core = self.core();
        let mr = core.mrs.remove(mr)?;
        let region = &mr.region;
        let revoked = core
            .mrs
            .table
            .revoke(region.slot, region.key)
            .map_err(|e| Error::Invalid(format!("cannot revoke {}: {e}", mr.id)))?;
        let started = Instant::now();
        let touched = || {
            let mut conns = core.open_conns().into_iter();
            let conn = conns.find(|conn| {
                let asked = conn.end_asked(region.slot);
                asked || conn.lanes.iter().any(|lane| lane.touched_by_peer(region.slot))
            });
            // In this order: a connection that ends is here before it is no longer there.
            match conn {
                Some(conn) => Some((Arc::clone(&conn.peer.name), Some(conn))),
                None => core.toucher_left(region.slot).map(|peer| (peer, None)),
            }
        };
        while let Some((peer, conn)) = touched() {
            let timeout = core.config.timeout;
            if !timeout.is_zero() && started.elapsed() > timeout {
                let error = Error::ConnectionLost {
                    peer,
                    reason: format!(
                        "it is stuck in the middle of an access to {}, whose memory it may still touch",
                        mr.id
                    ),
                };
                if let Some(conn) = conn {
                    conn.fail(error.clone());
                }
                // The slot is never used again: a peer that wakes up finds the region gone.
                std::mem::forget(revoked);
                return Err(error);
            }
            std::thread::yield_now();
        }
        drop(revoked);
        core.let_go_of_memory(&mr);
        Ok(())
    }

    /// Where a region starts and how long it is.
    pub fn region(&self, mr: MrId) -> Result<(usize, usize)> {
        let mr = self.core().mrs.get(mr)?;
        Ok((mr.span.addr, mr.span.len))
    }

    /// Where a region is, what kind of memory it is, and which NIC is nearest to it.
    pub fn region_info(&self, mr: MrId) -> Result<RegionInfo> {
        let mr = self.core().mrs.get(mr)?;
        let nic = mr.nearest_nic(self.config().gpu_index);
        let Span { addr, len } = mr.span;
        Ok(RegionInfo { addr, len, kind: mr.kind, numa_node: mr.node, nic })
    }

    /// The CPUs that worker threads keep to, near to the GPU; `None` if they run wherever the process may,
    /// or have not begun yet.
    pub fn worker_cpus(&self) -> Option<CpuList> {
        self.core().workers.cpus().cloned()
    }

    /// What lets a peer read and write `len` bytes at `ptr` of a region.
    pub fn advertise(&self, mr: MrId, ptr: usize, len: usize) -> Result<Advert> {
        self.core().usable()?;
        let mr = self.core().mrs.get(mr)?;
        let span = Span { addr: ptr, len };
        if !contains(mr.span, span) {
            return Err(outside(0, &mr, span));
        }
        Ok(self.advert_of(&mr, span))
    }

    /// What lets a peer read and write each of these pieces; none of them if one is outside its region.
    pub fn advertise_all(&self, iovs: &[Iov]) -> Result<Vec<Advert>> {
        self.core().usable()?;
        let mut adverts = Vec::with_capacity(iovs.len());
        self.core().mrs.resolve(iovs, false, |_, mr, span| {
            adverts.push(self.advert_of(mr, span));
            Ok(())
        })?;
        Ok(adverts)
    }

    fn advert_of(&self, mr: &Mr, span: Span) -> Advert {
        Advert {
            addr: span.addr as u64,
            len: span.len as u64,
            key: mr.region.key,
            slot: mr.region.slot,
            instance: self.core().instance as u32,
        }
    }

    /// Starts a transfer.
    pub fn post(&self, request: &Request<'_>) -> Result<TransferId> {
        self.post_behind(request, request.after.map(CudaStream::mark).transpose()?)
    }

    /// Starts a transfer when a mark is reached.
    pub(crate) fn post_behind(
        &self,
        request: &Request<'_>,
        after: Option<Box<dyn Mark>>,
    ) -> Result<TransferId> {
        let transfer = self.start(request, after)?;
        self.core().workers.hurry();
        transfer.conn.kick_if_busy();
        Ok(transfer.id)
    }

    /// Starts a transfer and waits for its end. Interrupted, it cancels the transfer first.
    pub fn run(&self, request: &Request<'_>, interrupt: &mut dyn Interrupt) -> Result<Outcome> {
        if let Some(outcome) = self.run_now(request)? {
            return Ok(outcome);
        }
        let transfer = match self.start_now(request)? {
            Some(Begun::Done(outcome)) => return Ok(outcome),
            Some(Begun::Under(transfer)) => transfer,
            None => self.start(request, request.after.map(CudaStream::mark).transpose()?)?,
        };
        self.finish(&transfer, interrupt)
    }

    fn finish(&self, transfer: &Arc<Transfer>, interrupt: &mut dyn Interrupt) -> Result<Outcome> {
        let waited = wait::wait(transfer, None, interrupt);
        if waited.is_err() {
            self.cancel(transfer.id)?;
            waited?;
        }
        match transfer.status() {
            Status::Done(outcome) => Ok(outcome),
            Status::Failed(e) => Err(e),
            Status::Pending => Err(Error::Closed),
        }
    }

    /// The way with the least on it: one short piece to or from a process of this host, on this thread.
    fn run_now(&self, request: &Request<'_>) -> Result<Option<Outcome>> {
        let Some((kind, iov, advert)) = single(request) else { return Ok(None) };
        let core = self.core();
        core.usable()?;
        let conn = core.conn(request.conn)?;
        let mr = core.mrs.get(iov.mr)?;
        let local = Span { addr: iov.ptr, len: iov.len };
        if !contains(mr.span, local) {
            return Err(outside(0, &mr, local));
        }
        if !mr.kind.is_host_accessible() {
            return Ok(None);
        }
        let remote = remote_span(&conn, 0, local, advert)?;
        let lease = Lease::of(&mr);
        // SAFETY: inside a region, which the lease keeps registered.
        let result = unsafe { conn.lanes[0].try_now(kind, local, &remote) };
        drop(lease);
        match result {
            Some(Ok(())) => Ok(Some(self.count_now(kind, local))),
            // The owner refuses in its own words, over the slower way.
            None | Some(Err(_)) => Ok(None),
        }
    }

    /// Begins one piece that a GPU copies, and waits a moment: most end before a transfer could be made.
    fn start_now(&self, request: &Request<'_>) -> Result<Option<Begun>> {
        let Some((kind, iov, advert)) = single(request) else { return Ok(None) };
        let core = self.core();
        let conn = core.conn(request.conn)?;
        let mr = core.mrs.get(iov.mr)?;
        let local = Span { addr: iov.ptr, len: iov.len };
        let [lane] = &conn.lanes[..] else { return Ok(None) };
        if !contains(mr.span, local) || local.len == 0 {
            return Ok(None);
        }
        let remote = remote_span(&conn, 0, local, advert)?;
        if !lane.is_copied_by_gpu(mr.kind, &remote) {
            return Ok(None);
        }
        let lease = Lease::of(&mr);
        let now = Arc::new(Now::default());
        let done = Arc::clone(&now) as _;
        let (local_spans, remote_spans) = (smallvec![local], smallvec![remote]);
        let (memory, spans) = (mr.kind, (local_spans, remote_spans));
        let op = Operation { kind, local: spans.0, memory, remote: spans.1, done };
        // SAFETY: inside a region, which the lease keeps registered: until the operation has ended, or the
        // transfer that it becomes.
        let name = match unsafe { lane.post(op) } {
            Ok(Posted::Pending(name)) => name,
            Ok(Posted::Done(Ok(()))) => return Ok(Some(Begun::Done(self.count_now(kind, local)))),
            // Why not is said on the slower way.
            Ok(Posted::Done(Err(_))) | Err(_) => return Ok(None),
        };
        let _claim = conn.claim();
        let begun = Instant::now();
        while !now.has_ended() && begun.elapsed() < MOMENT {
            (0..LOOKS).take_while(|_| !now.has_ended()).for_each(|_| lane.progress_copies());
        }
        match now.has_ended().then(|| now.result()).flatten() {
            Some(Ok(())) => return Ok(Some(Begun::Done(self.count_now(kind, local)))),
            Some(Err(_)) => return Ok(None),
            None => {}
        }
        let transfer = core.transfers.insert(Plan {
            kind: request.op.into(),
            conn: Arc::clone(&conn),
            bytes: local.len as u64,
            timeout: self.deadline_of(request.timeout),
            leases: smallvec![Lease::of(&mr)],
            after: After::Publish,
            targets: SmallVec::new(),
        });
        let transfer = match transfer {
            Ok(transfer) => transfer,
            Err(e) => {
                // Its memory is let go only after its end, which comes without anybody's help.
                while !now.has_ended() {
                    lane.progress_copies();
                }
                return Err(e);
            }
        };
        drop(lease);
        conn.transfer_began();
        core.counters.posted.fetch_add(1, Relaxed);
        transfer.expect_ops(1);
        transfer.body.lock().ops.push((0, name));
        now.become_transfer(&transfer);
        settle(&transfer, Ok(())).map(|transfer| Some(Begun::Under(transfer)))
    }

    /// Counts a transfer that was made on the spot.
    fn count_now(&self, kind: OpKind, local: Span) -> Outcome {
        let counters = &self.core().counters;
        counters.posted.fetch_add(1, Relaxed);
        counters.done.fetch_add(1, Relaxed);
        let moved = match kind {
            OpKind::Read => &counters.bytes_received,
            OpKind::Write => &counters.bytes_sent,
        };
        moved.fetch_add(local.len as u64, Relaxed);
        Outcome { bytes: local.len as u64, checksummed: false }
    }

    /// Where a transfer stands. Looking at one that is unfinished moves it along.
    pub fn poll(&self, transfer: TransferId) -> Result<Status> {
        match self.core().transfers.find(transfer)? {
            Found::Ended(status) => Ok(status),
            Found::Live(transfer) => {
                if !transfer.finished() {
                    let _claim = transfer.conn.claim();
                    transfer.conn.progress();
                }
                Ok(transfer.status())
            }
        }
    }

    /// Waits for a transfer's end, at most `timeout`; the transfer goes on if that passes.
    pub fn wait(
        &self,
        transfer: TransferId,
        timeout: Option<Duration>,
        interrupt: &mut dyn Interrupt,
    ) -> Result<Status> {
        match self.core().transfers.find(transfer)? {
            Found::Ended(status) => Ok(status),
            Found::Live(transfer) => {
                let until = timeout.map(|timeout| Instant::now() + timeout);
                wait::wait(&transfer, until, interrupt)?;
                Ok(transfer.status())
            }
        }
    }

    /// Has what is enqueued on a stream from now on wait until the transfer has ended, well or badly, without
    /// holding up the caller. At a transfer's deadline, which ends it, the stream goes on at the latest.
    pub fn hold_stream(&self, transfer: TransferId, stream: CudaStream) -> Result<()> {
        let Found::Live(transfer) = self.core().transfers.find(transfer)? else { return Ok(()) };
        let stream = stream.borrow()?;
        let signal = Signal::new(stream.context());
        let held = signal.and_then(|signal| signal.hold(&stream).map(|()| signal));
        transfer.keep(held.map_err(|e| Error::Invalid(format!("stream: {e}")))?);
        Ok(())
    }

    /// Ends a transfer. When this returns, no byte of it lands in either side's memory any more; the
    /// status says whether it had finished before. A peer that does not confirm that in time is given
    /// up with its connection: then the status is a failure that says so.
    pub fn cancel(&self, transfer: TransferId) -> Result<Status> {
        let transfer = match self.core().transfers.find(transfer)? {
            Found::Ended(status) => return Ok(status),
            Found::Live(transfer) => transfer,
        };
        let timeout = self.config().timeout;
        let patience =
            if timeout.is_zero() { CANCEL_PATIENCE } else { CANCEL_PATIENCE.min(timeout) };
        let started = Instant::now();
        while !transfer.finished() {
            transfer.conn.fence(&transfer, Fence::Cancel);
            let soon = Instant::now() + Duration::from_millis(5);
            if wait::wait(&transfer, Some(soon), &mut Uninterrupted)? {
                break;
            }
            if started.elapsed() > patience {
                deadline::give_up_peer(&transfer, "it did not confirm the end of a transfer");
            }
        }
        Ok(transfer.status())
    }

    /// Sends a message to the peer, at most 64 MiB.
    pub fn send_notif(
        &self,
        conn: ConnId,
        payload: &[u8],
        timeout: Option<Duration>,
    ) -> Result<TransferId> {
        let transfer = self.start_notif(conn, payload, timeout)?;
        self.core().workers.hurry();
        transfer.conn.kick_if_busy();
        Ok(transfer.id)
    }

    /// Sends a message to the peer and waits until it has arrived.
    pub fn run_notif(
        &self,
        conn: ConnId,
        payload: &[u8],
        timeout: Option<Duration>,
        interrupt: &mut dyn Interrupt,
    ) -> Result<()> {
        let transfer = self.start_notif(conn, payload, timeout)?;
        self.finish(&transfer, interrupt).map(drop)
    }

    fn start_notif(
        &self,
        conn: ConnId,
        payload: &[u8],
        timeout: Option<Duration>,
    ) -> Result<Arc<Transfer>> {
        let core = self.core();
        core.usable()?;
        let conn = core.conn(conn)?;
        let transfer = core.transfers.insert(Plan {
            kind: Kind::Notif,
            conn: Arc::clone(&conn),
            bytes: payload.len() as u64,
            timeout: self.deadline_of(timeout),
            leases: smallvec![],
            after: After::Publish,
            targets: smallvec![],
        })?;
        conn.transfer_began();
        core.counters.posted.fetch_add(1, Relaxed);
        transfer.expect_ops(1);
        let posted = conn.post_notif(&transfer, payload.into());
        settle(&transfer, posted)
    }

    /// Takes the notifications that have arrived, in order per connection.
    pub fn take_notifs(&self) -> Vec<Notification> {
        let taken = self.core().take_notifs();
        if !taken.is_empty() {
            return taken;
        }
        for conn in self.core().open_conns() {
            let _claim = conn.claim();
            conn.progress();
        }
        self.core().take_notifs()
    }

    /// Waits until notifications are there or `timeout` has passed, and takes them.
    pub fn wait_notifs(
        &self,
        timeout: Option<Duration>,
        interrupt: &mut dyn Interrupt,
    ) -> Result<Vec<Notification>> {
        let started = Instant::now();
        let until = timeout.map(|timeout| started + timeout);
        loop {
            self.core().usable()?;
            // Looking costs less than the clock.
            let taken = (0..LOOKS).map(|_| self.take_notifs()).find(|taken| !taken.is_empty());
            let taken = taken.unwrap_or_default();
            if !taken.is_empty() {
                return Ok(taken);
            }
            let now = Instant::now();
            if until.is_some_and(|until| until <= now) {
                return Ok(taken);
            }
            if now - started < self.config().spin {
                if now - started >= wait::YIELD_AFTER {
                    std::thread::yield_now();
                }
                continue;
            }
            let left = until.map_or(SLICE, |until| until - now).min(SLICE);
            self.core().sleep_for_notif(left);
            if interrupt.interrupted() {
                return Err(Error::Interrupted);
            }
        }
    }

    /// Allocates memory that peers on this host can map; page aligned, zeroed.
    pub fn alloc(&self, len: usize) -> Result<SharedBuf> {
        let what = || format!("allocating {len} bytes of shared memory");
        let inner = alloc::SharedBuf::new(len.max(1)).map_err(|e| Error::os(what(), e))?;
        inner.populate().map_err(|e| Error::os(what(), e))?;
        Ok(SharedBuf { inner, len })
    }

    /// Counters.
    pub fn stats(&self) -> Stats {
        let core = self.core();
        let counters = &core.counters;
        Stats {
            connections: core.open_conns().len() as u64,
            regions: core.mrs.len() as u64,
            transfers_posted: counters.posted.load(Relaxed),
            transfers_done: counters.done.load(Relaxed),
            transfers_failed: counters.failed.load(Relaxed),
            bytes_sent: counters.bytes_sent.load(Relaxed),
            bytes_received: counters.bytes_received.load(Relaxed),
            notifs_sent: counters.notifs_sent.load(Relaxed),
            notifs_received: counters.notifs_received.load(Relaxed),
            refused_accesses: core.mrs.table.refused(),
            refused_handshakes: counters.refused_handshakes.load(Relaxed),
            lanes_lost: counters.lanes_lost.load(Relaxed),
            copied_for_peers: counters.copied_for_peers.load(Relaxed),
        }
    }

    /// Fails what is unfinished, closes every connection, stops and joins the workers. Idempotent.
    pub fn close(&self) {
        close(self.core());
    }

    fn deadline_of(&self, timeout: Option<Duration>) -> Option<Duration> {
        Some(timeout.unwrap_or(self.config().transfer_timeout)).filter(|timeout| !timeout.is_zero())
    }

    /// Checks a request, and posts it. Every refusal happens before a byte moves.
    fn start(&self, request: &Request<'_>, after: Option<Box<dyn Mark>>) -> Result<Arc<Transfer>> {
        let core = self.core();
        core.usable()?;
        let conn = core.conn(request.conn)?;
        check_shape(request)?;
        let Checked { leases, spans, pieces, bytes } = self.check(request, &conn)?;
        let transfer = core.transfers.insert(Plan {
            kind: request.op.into(),
            conn: Arc::clone(&conn),
            bytes: if request.op == Op::Recv { 0 } else { bytes },
            timeout: self.deadline_of(request.timeout),
            leases,
            after: request.notif.map_or(After::Publish, |notif| After::Notify(notif.to_vec())),
            targets: if request.op == Op::Recv { spans.clone() } else { SmallVec::new() },
        })?;
        conn.transfer_began();
        core.counters.posted.fetch_add(1, Relaxed);
        let start = match request.op {
            Op::Read | Op::Write => Start::OneSided(request.op, pieces),
            Op::Send => Start::Send(spans),
            Op::Recv => Start::Recv,
        };
        let posted = conn.begin(&transfer, start, after);
        settle(&transfer, posted)
    }

    /// Compares every iov with its region, and with its advert.
    fn check(&self, request: &Request<'_>, conn: &Connection) -> Result<Checked> {
        let Request { op, iovs, adverts, .. } = *request;
        let one_sided = matches!(op, Op::Read | Op::Write);
        let mut checked = Checked::default();
        match one_sided {
            true => checked.pieces.reserve(iovs.len()),
            false => checked.spans.reserve(iovs.len()),
        }
        let mut last = None;
        self.core().mrs.resolve(iovs, op == Op::Recv, |i, mr, span| {
            if last != Some(mr.id) {
                last = Some(mr.id);
                checked.lease(mr);
            }
            checked.bytes += span.len as u64;
            if one_sided {
                checked.pieces.push(span, remote_span(conn, i, span, &adverts[i])?);
            } else {
                checked.spans.push(span);
            }
            Ok(())
        })?;
        Ok(checked)
    }
}

/// What is known of a request that may be posted.
#[derive(Default)]
struct Checked {
    leases: SmallVec<[Lease; 1]>,
    /// Local memory of what is two-sided.
    spans: SmallVec<[Span; 1]>,
    /// Both sides' memory of what is one-sided.
    pieces: Pieces,
    bytes: u64,
}

impl Checked {
    fn lease(&mut self, mr: &Arc<Mr>) {
        // Another lease does no harm: callers that take turns among a few regions get one of each.
        if !self.leases.iter().rev().take(8).any(|lease| lease.mr().id == mr.id) {
            self.leases.push(Lease::of(mr));
        }
    }
}

/// What a call that waits has begun.
enum Begun {
    /// It is over already.
    Done(Outcome),
    Under(Arc<Transfer>),
}

/// One piece read or written, with nothing besides.
fn single<'a>(request: &Request<'a>) -> Option<(OpKind, &'a Iov, &'a Advert)> {
    let ([iov], [advert], None, None) =
        (request.iovs, request.adverts, request.notif, request.after)
    else {
        return None;
    };
    match request.op {
        Op::Read => Some((OpKind::Read, iov, advert)),
        Op::Write => Some((OpKind::Write, iov, advert)),
        Op::Recv | Op::Send => None,
    }
}

/// The post itself is over; if it failed, so does the transfer, at once.
fn settle(transfer: &Arc<Transfer>, posted: Result<()>) -> Result<Arc<Transfer>> {
    if let Err(e) = posted {
        transfer.publish(Err(e.clone()));
        return Err(e);
    }
    transfer.op_ended();
    if transfer.conn.is_failed() && !transfer.finished() {
        transfer.publish(Err(transfer.conn.lost_error()));
    }
    Ok(Arc::clone(transfer))
}

fn check_shape(request: &Request<'_>) -> Result<()> {
    let n = request.iovs.len();
    if n == 0 || n > MAX_IOVS {
        return Err(Error::Invalid(format!("{n} iovs: a transfer has 1 to {MAX_IOVS}")));
    }
    let one_sided = matches!(request.op, Op::Read | Op::Write);
    let adverts = if one_sided { n } else { 0 };
    if request.adverts.len() != adverts {
        return Err(Error::Invalid(format!(
            "{} adverts for {n} iovs of a {:?}: {adverts} are needed",
            request.adverts.len(),
            request.op
        )));
    }
    if request.op == Op::Recv && request.notif.is_some() {
        return Err(Error::Invalid("a receive cannot carry a notification".into()));
    }
    Ok(())
}

fn remote_span(conn: &Connection, iov: usize, local: Span, advert: &Advert) -> Result<RemoteSpan> {
    if advert.instance != conn.peer.instance as u32 {
        return Err(Error::ForeignAdvert { iov });
    }
    if local.len as u64 > advert.len {
        return Err(Error::OutsideAdvert { iov, len: local.len, advertised: advert.len });
    }
    Ok(RemoteSpan { addr: advert.addr, len: local.len as u64, key: advert.key, slot: advert.slot })
}

fn close(core: &Arc<Core>) {
    let first = !core.closed.swap(true, SeqCst);
    for conn in core.open_conns() {
        conn.close(Error::Closed);
        core.forget_conn(conn.id);
    }
    core.accepted.notify_all();
    core.notified.notify_all();
    if first {
        core.workers.stop();
    }
    core.forget_aftermath();
}

/// Opens the listening socket, and says where peers find it.
fn listen(config: &Config) -> Result<(std::net::TcpListener, SocketAddr)> {
    let any = |port| match config.bind {
        Some(ip) => SocketAddr::new(ip, port),
        None => SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), port),
    };
    let well_known = u16::try_from(u32::from(config.base_port) + config.gpu_index).unwrap_or(0);
    let ports = match config.port {
        Some(port) => vec![port],
        None => vec![well_known, 0],
    };
    let mut last = std::io::Error::from(std::io::ErrorKind::AddrInUse);
    for port in ports {
        let opened = tcp::listen(any(port)).or_else(|e| match config.bind {
            // A kernel without IPv6.
            None => tcp::listen(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port)),
            Some(_) => Err(e),
        });
        match opened {
            Ok(listener) => {
                let bound = listener
                    .local_addr()
                    .map_err(|e| Error::os("asking for the listening address", e))?;
                let ip = told_ip(config);
                return Ok((listener, SocketAddr::new(ip, bound.port())));
            }
            Err(e) => last = e,
        }
    }
    let port = config.port.unwrap_or(well_known);
    Err(Error::os(format!("listening on {}", any(port)), last))
}

/// The address that an endpoint with these settings tells its peers: the one that it is bound to, or else one
/// that they reach this host at, on the NIC nearest to its GPU if they reach several equally well.
pub fn told_ip(config: &Config) -> IpAddr {
    let bound = config.bind.filter(|ip| !ip.is_unspecified());
    bound.unwrap_or_else(|| places::address_near(config.gpu_index, reachable_ip()))
}

/// The address that others would reach this host at: the one that the default route leaves from.
pub fn reachable_ip() -> IpAddr {
    let from = |bind: &str, to: &str| {
        let socket = UdpSocket::bind(bind).ok()?;
        // Chooses a route and an address; sends nothing.
        socket.connect(to).ok()?;
        let ip = socket.local_addr().ok()?.ip();
        (!ip.is_unspecified() && !ip.is_loopback()).then_some(ip)
    };
    from("0.0.0.0:0", "192.0.2.1:9")
        .or_else(|| from("[::]:0", "[2001:db8::1]:9"))
        .or_else(first_interface_ip)
        .unwrap_or(Ipv4Addr::LOCALHOST.into())
}

/// An address of an interface that is up, on a host without a default route.
fn first_interface_ip() -> Option<IpAddr> {
    let machine = uccl_device::Topology::of_this_machine().ok()?;
    let up = machine.interfaces.iter().filter(|interface| interface.is_up());
    let link_local = |ip: &IpAddr| matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local());
    let mut ips: Vec<IpAddr> = up.flat_map(|interface| interface.addresses.clone()).collect();
    ips.retain(|ip| !ip.is_loopback() && !link_local(ip));
    ips.sort_by_key(IpAddr::is_ipv6);
    ips.first().copied()
}

/// Listens for processes of this host; without it they use TCP.
fn listen_locally() -> (Option<FdListener>, String) {
    let mut name = [0; 16];
    if getrandom::fill(&mut name).is_err() {
        return (None, String::new());
    }
    let name = format!("uccl-p2p-{:032x}", u128::from_le_bytes(name));
    match FdListener::bind(name.as_bytes()) {
        Ok(listener) => (Some(listener), name),
        Err(e) => {
            tracing::debug!("processes of this host will use TCP: {e}");
            (None, String::new())
        }
    }
}
