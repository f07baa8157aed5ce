//! The endpoint: what callers hold.

mod address;
mod at_once;
mod stream;
mod transfers;

use std::{
    net::SocketAddr,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use smallvec::{SmallVec, smallvec};
use uccl_device::CpuList;
use uccl_fabric::{alloc, mem::Span};
use uccl_wire::advert::Advert;

pub use self::address::{gpu_index, parse_address, reachable_ip, resolve, told_ip};
use self::{
    address::{listen, listen_locally},
    transfers::{remote_span, settle},
};
pub use crate::types::*;
use crate::{
    config::{Config, take_notices},
    engine::{
        acceptor::Acceptor,
        connect,
        connection::{Connection, Core, Transfer, Workers},
        greeting::Greeting,
        places,
        regions::{Mr, contains, outside},
        transfer::{After, Kind, Plan},
        wait,
    },
    error::{Error, Result},
    ids::{ConnId, MrId, TransferId},
    process::Process,
};

/// How often a call looks for notifications before it looks at the clock.
const LOOKS: u32 = 8;
/// How often a waiting call asks whether to go on.
const SLICE: Duration = Duration::from_millis(50);

/// One process's engine for one GPU (or none). Clones share the engine; it closes with the last, as by
/// [`close`](Self::close). Who has memory that may go needs that call's answer: it says whether peers let go of it.
///
/// It belongs to the process that made it. In a child made by `fork` every call fails with [`Error::Forked`], and
/// [`close`](Self::close) and drop do nothing; the child makes an endpoint of its own. A child that lives keeps its
/// parent's sockets open: on this host peers still see the parent's death at once, over TCP only when
/// something waits for it, by its silence.
#[derive(Clone)]
pub struct Endpoint {
    handle: Arc<Handle>,
}

struct Handle {
    core: Arc<Core>,
    greeting: Arc<Greeting>,
    addr: SocketAddr,
    process: Process,
}

impl Drop for Handle {
    fn drop(&mut self) {
        if !self.process.is_this() {
            // What the parent has must not be let go here: not its memory, nor its sockets, nor its GPUs' or NICs' objects.
            std::mem::forget((Arc::clone(&self.core), Arc::clone(&self.greeting)));
            return;
        }
        if let Err(e) = self.core.end() {
            tracing::warn!("an endpoint is dropped: {e}");
            // What may still be touched stays: memory from `alloc`, payloads, registrations with devices.
            std::mem::forget(Arc::clone(&self.core));
        }
    }
}

impl Endpoint {
    /// Starts an endpoint: listens, and runs its first worker.
    pub fn new(config: Config) -> Result<Self> {
        for notice in take_notices() {
            tracing::warn!("{notice}");
        }
        let near = places::cpus_for_workers(&config);
        Self::start_on(config, near)
    }

    /// With workers on these CPUs, or anywhere.
    pub(crate) fn start_on(config: Config, near: Option<CpuList>) -> Result<Self> {
        let process = Process::this()?;
        let workers = Workers::new(config.num_cpus, near)?;
        let core = Arc::new(Core::new(config, workers)?);
        let (listener, addr) = listen(&core.config)?;
        let (uds, uds_name) = listen_locally();
        let greeting = Arc::new(Greeting::new(addr.port(), uds_name)?);
        let acceptor = Acceptor::new(listener, uds, Arc::clone(&greeting));
        Workers::start(&core, acceptor)?;
        Ok(Self { handle: Arc::new(Handle { core, greeting, addr, process }) })
    }

    /// The engine, for those who only look at what never changes.
    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.handle.core
    }

    /// The engine, in the process that it belongs to.
    fn here(&self) -> Result<&Arc<Core>> {
        self.handle.process.check()?;
        Ok(&self.handle.core)
    }

    /// The settings it runs with.
    pub fn config(&self) -> &Config {
        &self.core().config
    }

    /// The address it listens on; the IP is one that peers can reach (or the bound one).
    pub fn addr(&self) -> SocketAddr {
        self.handle.addr
    }

    /// Random, and so unlike that of any other endpoint: what tells a peer that was restarted from the one before.
    pub fn instance(&self) -> u64 {
        self.core().instance
    }

    /// Connects to the endpoint that listens at `addr`, within `timeout` (by default the
    /// endpoint's; zero waits for ever).
    pub fn connect(
        &self,
        addr: SocketAddr,
        timeout: Option<Duration>,
        interrupt: &mut dyn Interrupt,
    ) -> Result<ConnId> {
        self.connect_to(addr, timeout, false, interrupt)
    }

    /// The same with an endpoint that may not be there yet, as when all processes of a job start at once and know
    /// each other's ports: within `timeout` it is waited for.
    pub fn connect_when_up(
        &self,
        addr: SocketAddr,
        timeout: Option<Duration>,
        interrupt: &mut dyn Interrupt,
    ) -> Result<ConnId> {
        self.connect_to(addr, timeout, true, interrupt)
    }

    fn connect_to(
        &self,
        addr: SocketAddr,
        timeout: Option<Duration>,
        awaited: bool,
        interrupt: &mut dyn Interrupt,
    ) -> Result<ConnId> {
        let timeout = timeout.unwrap_or(self.config().timeout);
        let target = connect::Target { addr, timeout, awaited };
        let conn = connect::connect(self.here()?, &self.handle.greeting, target, interrupt)?;
        Ok(conn.id)
    }

    /// Waits for a peer that connected and hands its connection over.
    pub fn accept(
        &self,
        timeout: Option<Duration>,
        interrupt: &mut dyn Interrupt,
    ) -> Result<Accepted> {
        let core = self.here()?;
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
        let core = self.here()?;
        core.usable()?;
        let mut accepts = core.accepts.lock();
        accepts.passive = true;
        accepts.waiting.clear();
        Ok(())
    }

    /// Closes a connection; its unfinished transfers fail. When this returns nothing of them touches memory of this
    /// endpoint any more, but for those that failed with [`Error::StillTouched`], whose memory must stay allocated. What
    /// had reached the peer may still land in its memory until it knows, and it may reach regions that stay registered.
    pub fn disconnect(&self, conn: ConnId) -> Result<()> {
        let core = self.here()?;
        match core.conn(conn) {
            Ok(open) => {
                let peer = Arc::clone(&open.peer.name);
                open.close(Error::ConnectionLost { peer, reason: "closed here".into() });
                open.wait_for_end();
            }
            Err(Error::UnknownConnection(_)) => return Err(Error::UnknownConnection(conn)),
            Err(_) => {}
        }
        core.forget_conn(conn);
        Ok(())
    }

    /// What is known of a connection, also of one that was lost and not yet disconnected.
    pub fn connection(&self, conn: ConnId) -> Result<ConnInfo> {
        self.here()?.conn_info(conn)
    }

    /// The path that one-sided data to and from this memory of the peer's takes: `mapped` (memory from
    /// [`Self::alloc`] on this host), `cma`, `cuda_ipc` or `shm`; `verbs` or `libfabric`; `tcp`.
    pub fn path(&self, conn: ConnId, advert: &Advert) -> Result<&'static str> {
        let conn = self.here()?.conn(conn)?;
        let all = Span { addr: 0, len: advert.len as usize };
        let remote = remote_span(&conn, 0, all, advert)?;
        let rails = conn.rails_up().map(|rails| rails.lane.link());
        Ok(rails.unwrap_or_else(|| conn.lanes[0].path_to(&remote)))
    }

    /// The same between this memory of the peer's and a region of ours, for long transfers: `owner` where the
    /// peer makes the copy, because GPUs of its own reach its locked host memory and ours do not.
    pub fn path_from(&self, conn: ConnId, mr: MrId, advert: &Advert) -> Result<&'static str> {
        let core = self.here()?;
        let (open, mr) = (core.conn(conn)?, core.mrs.get(mr)?);
        let all = Span { addr: 0, len: advert.len as usize };
        if open.asks_owner(&mr, remote_span(&open, 0, all, advert)?) {
            return Ok("owner");
        }
        self.path(conn, advert)
    }

    /// Whether transfers can be posted on a connection; the error says why not.
    pub fn check_connection(&self, conn: ConnId) -> Result<()> {
        self.here()?.conn(conn).map(drop)
    }

    /// Registers memory.
    ///
    /// # Safety
    /// The `len` bytes at `ptr` must stay allocated until the region is deregistered or the endpoint
    /// closed, and that call has returned `Ok`: peers that hold an advert read and write them at any time.
    pub unsafe fn register(&self, ptr: usize, len: usize) -> Result<MrId> {
        let core = self.here()?;
        core.usable()?;
        core.add_region(Span { addr: ptr, len })
    }

    /// Ends a region: when this returns `Ok`, no peer's access lands in it any more.
    ///
    /// A region that unfinished transfers of this endpoint use is refused. A peer of this host that is
    /// in the middle of an access is waited for, also one whose connection has been given up, at most for
    /// the endpoint's timeout. Then its connection is given up, and [`Error::StillTouched`] says that it may still
    /// touch the memory, which must stay allocated. No new access can begin, and the same call waits again.
    pub fn deregister(&self, mr: MrId) -> Result<()> {
        self.here()?.release_region(mr)
    }

    /// Whether a region's memory is of the allocation still in which it was registered, as far as the driver tells: where
    /// that was freed, something else may be at its address, which peers do not reach by this region.
    pub fn is_same_memory(&self, mr: MrId) -> Result<bool> {
        Ok(self.here()?.mrs.get(mr)?.is_same_memory())
    }

    /// Where a region starts and how long it is.
    pub fn region(&self, mr: MrId) -> Result<(usize, usize)> {
        let mr = self.here()?.mrs.get(mr)?;
        Ok((mr.span.addr, mr.span.len))
    }

    /// The region that `len` bytes at `ptr` lie in: of several, the one that begins last.
    pub fn region_holding(&self, ptr: usize, len: usize) -> Option<MrId> {
        self.here().ok()?.mrs.holding(Span { addr: ptr, len }).map(|mr| mr.id)
    }

    /// Where a region is, what kind of memory it is, and which NIC is nearest to it.
    pub fn region_info(&self, mr: MrId) -> Result<RegionInfo> {
        let mr = self.here()?.mrs.get(mr)?;
        let numa_node = mr.node();
        let nic = mr.nearest_nic(numa_node, self.config().gpu_index);
        let Span { addr, len } = mr.span;
        Ok(RegionInfo { addr, len, kind: mr.kind, numa_node, nic })
    }

    /// The CPUs that worker threads keep to, near to the GPU; `None` if they run wherever the process may,
    /// or have not begun yet.
    pub fn worker_cpus(&self) -> Option<CpuList> {
        self.core().workers.cpus().cloned()
    }

    /// What lets a peer read and write `len` bytes at `ptr` of a region.
    ///
    /// It names these bytes and holds the key of the region: an honest peer keeps to them, and the owner keeps
    /// whoever holds it to the region. What a peer must not reach belongs into a region of its own; regions may overlap.
    pub fn advertise(&self, mr: MrId, ptr: usize, len: usize) -> Result<Advert> {
        let core = self.here()?;
        core.usable()?;
        let mr = core.mrs.get(mr)?;
        let span = Span { addr: ptr, len };
        if !contains(mr.span, span) {
            return Err(outside(0, &mr, span));
        }
        Ok(self.advert_of(&mr, span))
    }

    /// What lets a peer read and write each of these pieces; none of them if one is outside its region.
    pub fn advertise_all(&self, iovs: &[Iov]) -> Result<Vec<Advert>> {
        let core = self.here()?;
        core.usable()?;
        let mut adverts = Vec::with_capacity(iovs.len());
        core.mrs.resolve(iovs, false, |_, mr, span| {
            adverts.push(self.advert_of(&mr, span));
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

    /// Sends a message to the peer, at most 64 MiB.
    pub fn send_notif<'a>(
        &self,
        conn: ConnId,
        payload: impl Into<NotifPayload<'a>>,
        timeout: Option<Duration>,
    ) -> Result<TransferId> {
        let conn = self.usable_conn(conn)?;
        let transfer = self.start_notif(&conn, payload.into(), timeout)?;
        self.core().workers.hurry();
        transfer.conn.kick_if_busy();
        Ok(transfer.id)
    }

    /// Sends a message to the peer and waits until it has arrived.
    pub fn run_notif<'a>(
        &self,
        conn: ConnId,
        payload: impl Into<NotifPayload<'a>>,
        timeout: Option<Duration>,
        interrupt: &mut dyn Interrupt,
    ) -> Result<()> {
        let conn = self.usable_conn(conn)?;
        let claim = conn.claim();
        let transfer = self.start_notif(&conn, payload.into(), timeout)?;
        self.finish(claim, &transfer, interrupt).map(drop)
    }

    /// A connection of an endpoint that can be used.
    fn usable_conn(&self, conn: ConnId) -> Result<Arc<Connection>> {
        let core = self.here()?;
        core.usable()?;
        core.conn(conn)
    }

    fn start_notif(
        &self,
        conn: &Arc<Connection>,
        payload: NotifPayload<'_>,
        timeout: Option<Duration>,
    ) -> Result<Arc<Transfer>> {
        let transfer = conn.admit(Plan {
            kind: Kind::Notif,
            conn: Arc::clone(conn),
            bytes: payload.as_ref().len() as u64,
            timeout: self.deadline_of(timeout),
            leases: smallvec![],
            after: After::Publish,
            targets: smallvec![],
        })?;
        let hold = transfer.hold();
        transfer.expect_ops(1);
        let posted = conn.post_notif(&transfer, payload);
        settle(hold, posted)
    }

    /// Takes the notifications that have arrived, in order per connection.
    pub fn take_notifs(&self) -> Result<Vec<Notification>> {
        let core = self.here()?;
        let taken = core.take_notifs();
        if !taken.is_empty() {
            return Ok(taken);
        }
        for conn in core.open_conns() {
            let _claim = conn.claim();
            conn.progress();
        }
        Ok(core.take_notifs())
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
            let core = self.here()?;
            core.usable()?;
            let taken = self.spin_for_notifs(started, until);
            let now = Instant::now();
            if !taken.is_empty() || until.is_some_and(|until| until <= now) {
                return Ok(taken);
            }
            let left = until.map_or(SLICE, |until| until - now).min(SLICE);
            core.open_conns().iter().for_each(|conn| conn.leave_to_workers());
            core.sleep_for_notif(left);
            if interrupt.interrupted() {
                return Err(Error::Interrupted);
            }
        }
    }

    /// Takes what has been delivered, or makes progress for as long as threads spin.
    fn spin_for_notifs(&self, started: Instant, until: Option<Instant>) -> Vec<Notification> {
        let core = self.core();
        let conns = core.open_conns();
        // All the while: workers that see nobody in between would take in what this one waits for.
        let claims: SmallVec<[_; 8]> = conns.iter().map(|conn| conn.claim()).collect();
        loop {
            // Looking costs less than the clock.
            for _ in 0..LOOKS {
                let taken = core.take_notifs();
                if !taken.is_empty() {
                    return taken;
                }
                conns.iter().for_each(|conn| {
                    conn.progress();
                });
            }
            claims.iter().for_each(|claim| claim.beat());
            let now = Instant::now();
            if until.is_some_and(|until| until <= now) || now - started >= self.config().spin {
                return core.take_notifs();
            }
            if now - started >= wait::YIELD_AFTER {
                std::thread::yield_now();
            }
        }
    }

    /// Allocates memory that peers on this host can map; page aligned, zeroed.
    pub fn alloc(&self, len: usize) -> Result<SharedBuf> {
        self.here()?;
        let what = || format!("allocating {len} bytes of shared memory");
        let inner = alloc::SharedBuf::new(len.max(1)).map_err(|e| Error::os(what(), e))?;
        inner.populate().map_err(|e| Error::os(what(), e))?;
        Ok(SharedBuf { inner, len })
    }

    /// Counters.
    pub fn stats(&self) -> Result<Stats> {
        let core = self.here()?;
        let counters = &core.counters;
        Ok(Stats {
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
        })
    }

    /// Fails what is unfinished, revokes every region, closes every connection, stops and joins the workers.
    ///
    /// When this returns `Ok`, no peer's access lands in this endpoint's memory any more. Peers of this host that are in
    /// the middle of an access are waited for, at most for the endpoint's timeout for all together. Then
    /// [`Error::StillTouched`] names the regions that must stay allocated, and the same call waits again. So it does for a
    /// worker that the kernel holds up in the middle of a copy, which has 5 seconds at least, and keeps what it uses.
    pub fn close(&self) -> Result<()> {
        // In a child made by `fork` there is nothing to close.
        self.here().map_or(Ok(()), Core::close)
    }
}
