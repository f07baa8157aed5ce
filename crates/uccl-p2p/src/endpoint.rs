//! The endpoint, the handle that callers use.

mod address;
mod at_once;
mod by_address;
mod connect;
mod handle;
mod prepared;
mod reach;
mod run;
mod stream;
mod transfers;
mod words;

use std::{
    io,
    net::SocketAddr,
    sync::{Arc, OnceLock, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use smallvec::{SmallVec, smallvec};
use uccl_device::CpuList;
use uccl_fabric::{alloc, mem::Span, rail::Rail};
use uccl_rma::Rails;
use uccl_wire::advert::Advert;

pub use self::{
    address::{gpu_index, parse_address, parse_ip_address, reachable_ip, resolve, told_ip},
    by_address::AddressTransfer,
    connect::ConnectHandle,
    handle::TransferHandle,
    prepared::PreparedTransfer,
    words::StreamWait,
};
use self::{
    address::{listen, listen_locally},
    transfers::{remote_span, settle},
};
pub use crate::types::*;
use crate::{
    config::{Config, take_notices},
    descriptors,
    drive::{
        acceptor::Acceptor,
        core::{
            Core, Devices,
            connection::{
                Connection,
                transfer::{After, Kind, Plan, Transfer},
            },
            workers::Workers,
        },
        greeting::Greeting,
        places,
        regions::{Mr, contains, outside},
        wait, worker,
    },
    error::{Error, Result},
    ids::{ConnId, MrId, TransferId},
    process::Process,
};

/// How often a call looks for notifications between two looks at the clock.
const LOOKS: u32 = 8;
/// How often a waiting call asks whether it was interrupted.
const SLICE: Duration = Duration::from_millis(50);

/// One process's engine for one GPU (or none). Clones share the engine. When the last clone is
/// dropped, it closes as [`close`](Self::close) does. To free memory that was registered, call
/// `close` yourself: its result says whether peers may still touch the memory.
///
/// It belongs to the process that made it. In a child made by `fork`, every call fails with
/// [`Error::Forked`], and [`close`](Self::close) and drop do nothing; the child has to make its own
/// endpoint. A living child keeps its parent's sockets open. When the parent dies, peers on this
/// host still see it at once; peers over TCP see it only by its silence, when something waits for
/// it.
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
            // A forked child must not release its parent's memory, sockets, and objects of GPUs and
            // NICs.
            std::mem::forget((Arc::clone(&self.core), Arc::clone(&self.greeting)));
            return;
        }
        if let Err(e) = self.core.end() {
            tracing::warn!("an endpoint is dropped: {e}");
            // Leak everything that peers may still touch: memory from `alloc`, payloads,
            // registrations with devices.
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

    /// Starts an endpoint with rails of the caller's, instead of those of this machine. They are
    /// used where the transport asks for rails.
    pub fn with_rails(config: Config, rails: Vec<Arc<dyn Rail>>) -> Result<Self> {
        let endpoint = Self::new(config)?;
        let why_none = Arc::new(OnceLock::from("no rails were given".to_owned()));
        let devices = Devices { rails: Arc::new(Rails::new(rails)), why_none };
        // Nobody else has the endpoint yet, and its devices are opened for the first region or
        // connection.
        if endpoint.core().rails.set(devices).is_err() {
            let busy = io::Error::from(io::ErrorKind::ResourceBusy);
            return Err(Error::os("giving an endpoint its rails", busy));
        }
        Ok(endpoint)
    }

    /// Starts an endpoint with its workers on the CPUs `near`, or anywhere.
    pub(crate) fn start_on(config: Config, near: Option<CpuList>) -> Result<Self> {
        let process = Process::this()?;
        let workers = Workers::new(config.num_cpus, near, worker::run)?;
        let core = Arc::new(Core::new(config, workers)?);
        let (listener, addr) = listen(&core.config)?;
        descriptors::make_room(&listener);
        let (uds, uds_name) = listen_locally();
        let greeting = Arc::new(Greeting::new(addr.port(), uds_name)?);
        let acceptor = Acceptor::new(listener, uds, Arc::clone(&greeting));
        worker::start(&core, acceptor)?;
        Ok(Self { handle: Arc::new(Handle { core, greeting, addr, process }) })
    }

    /// The engine, without a check of the process: for reading values that never change.
    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.handle.core
    }

    /// The engine. Fails in a forked child.
    fn here(&self) -> Result<&Arc<Core>> {
        self.handle.process.check()?;
        Ok(&self.handle.core)
    }

    /// The settings that the endpoint runs with.
    pub fn config(&self) -> &Config {
        &self.core().config
    }

    /// The address it listens on; the IP is one that peers can reach (or the bound one).
    pub fn addr(&self) -> SocketAddr {
        self.handle.addr
    }

    /// A random number that identifies this endpoint. A peer that was restarted has a new one.
    pub fn instance(&self) -> u64 {
        self.core().instance
    }

    /// Closes a connection; its unfinished transfers fail. When this returns, none of them touches
    /// memory of this endpoint any more, except those that failed with [`Error::StillTouched`]:
    /// their memory must stay allocated. Data that already reached the peer may still land in the
    /// peer's memory, until the peer knows of the end. Until then the peer may also reach regions
    /// that stay registered.
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

    /// Information about a connection, including one that was lost and not yet disconnected.
    pub fn connection(&self, conn: ConnId) -> Result<ConnInfo> {
        self.here()?.conn_info(conn)
    }

    /// The path of one-sided transfers to and from this memory of the peer's: `mapped` (memory from
    /// [`Self::alloc`] on this host), `cma`, `cuda_ipc` or `shm`; `verbs` or `libfabric`; `tcp`.
    pub fn path(&self, conn: ConnId, advert: &Advert) -> Result<&'static str> {
        let conn = self.here()?.conn(conn)?;
        let all = Span { addr: 0, len: advert.len as usize };
        let remote = remote_span(&conn, 0, all, advert)?;
        Ok(conn.path_to(&remote))
    }

    /// The path of long one-sided transfers between this memory of the peer's and a local region.
    /// It is `owner` where the peer makes the copy, because its GPUs reach its locked host memory
    /// and ours do not; else as for [`Self::path`].
    pub fn path_from(&self, conn: ConnId, mr: MrId, advert: &Advert) -> Result<&'static str> {
        let core = self.here()?;
        let (open, mr) = (core.conn(conn)?, core.mrs.get(mr)?);
        let all = Span { addr: 0, len: advert.len as usize };
        Ok(open.path_from(&mr, remote_span(&open, 0, all, advert)?))
    }

    /// Whether transfers can be posted on a connection; the error gives the reason why not.
    ///
    /// The answer is this endpoint's present knowledge, without a system call. To find out whether
    /// a quiet peer has ended meanwhile, use [`check_peer`](Self::check_peer).
    pub fn check_connection(&self, conn: ConnId) -> Result<()> {
        self.here()?.conn(conn).map(drop)
    }

    /// Checks a connection as [`check_connection`](Self::check_connection) does, after a look at
    /// its sockets, which shows whether the peer has died or left. Data that such a peer sent
    /// before its end is taken in first, which may take a moment. Over TCP the end shows once the
    /// kernel has delivered it. The loss of a peer's whole host shows only when something is sent
    /// to that peer.
    ///
    /// Ask this before a connection is used again that was made some time ago.
    pub fn check_peer(&self, conn: ConnId, interrupt: &mut dyn Interrupt) -> Result<()> {
        let core = self.here()?;
        core.conn(conn)?.take_in_end(interrupt)?;
        core.conn(conn).map(drop)
    }

    /// Registers memory.
    ///
    /// # Safety
    /// The `len` bytes at `ptr` must stay allocated until the region is deregistered or the
    /// endpoint closed, and that call has returned `Ok`: peers that hold an advert read and write
    /// them at any time.
    pub unsafe fn register(&self, ptr: usize, len: usize) -> Result<MrId> {
        let core = self.here()?;
        core.usable()?;
        core.add_region(Span { addr: ptr, len })
    }

    /// Ends a region: when this returns `Ok`, no access by a peer lands in it any more.
    ///
    /// Refuses a region that unfinished transfers of this endpoint use. Waits for peers of this
    /// host that are in the middle of an access, even if their connection was given up already, for
    /// at most the endpoint's timeout. Then the connection is given up, and [`Error::StillTouched`]
    /// says that the peer may still touch the memory, which must stay allocated. No new access can
    /// begin. Call this again to wait again.
    pub fn deregister(&self, mr: MrId) -> Result<()> {
        self.here()?.release_region(mr)
    }

    /// Whether a region's memory still belongs to the allocation in which it was registered, as far
    /// as the driver tells. After that allocation was freed, other data may be at its address;
    /// peers cannot reach that through this region.
    pub fn is_same_memory(&self, mr: MrId) -> Result<bool> {
        Ok(self.here()?.mrs.get(mr)?.is_same_memory())
    }

    /// Where a region starts and how long it is.
    pub fn region(&self, mr: MrId) -> Result<(usize, usize)> {
        let mr = self.here()?.mrs.get(mr)?;
        Ok((mr.span.addr, mr.span.len))
    }

    /// The region that contains the `len` bytes at `ptr`. If there are several: the one that begins
    /// last.
    pub fn region_holding(&self, ptr: usize, len: usize) -> Option<MrId> {
        self.here().ok()?.mrs.holding(Span { addr: ptr, len }).map(|mr| mr.id)
    }

    /// The address, length and kind of a region, its NUMA node and its nearest NIC.
    pub fn region_info(&self, mr: MrId) -> Result<RegionInfo> {
        let mr = self.here()?.mrs.get(mr)?;
        let numa_node = mr.node();
        let nic = mr.nearest_nic(numa_node, self.config().gpu_index);
        let Span { addr, len } = mr.span;
        Ok(RegionInfo { addr, len, kind: mr.kind, numa_node, nic })
    }

    /// The CPUs near the GPU that worker threads keep to; `None` if they run wherever the process
    /// may, or have not started yet.
    pub fn worker_cpus(&self) -> Option<CpuList> {
        self.core().workers.cpus().cloned()
    }

    /// Publishes a region: peers that are connected find it by the addresses of its bytes, without
    /// an advert ([`run_by_address`](Self::run_by_address)), and get the key of all of it. It stays
    /// published until it is deregistered, which ends also the keys that peers have.
    ///
    /// # Errors
    /// The endpoint does not allow it ([`Config::publish`]), or the region is unknown.
    pub fn publish(&self, mr: MrId) -> Result<()> {
        let core = self.here()?;
        core.usable()?;
        if !core.config.publish {
            return Err(Error::Invalid(format!(
                "{mr} cannot be published: this endpoint publishes nothing, as long as `publish` (UCCL_P2P_PUBLISH) is not set when it is made"
            )));
        }
        core.mrs.publish(mr)
    }

    /// Makes an advert, with which a peer can read and write the `len` bytes at `ptr` of a region.
    ///
    /// The advert names these bytes and contains the key of the whole region. Honest peers keep to
    /// the bytes; the owner only makes sure that accesses stay inside the region. Put memory that a
    /// peer must not reach into a region of its own; regions may overlap.
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

    /// Makes an advert for each of these pieces. Fails if one is outside its region.
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
        self.post_notif(conn, payload.into(), timeout).map(|transfer| transfer.id)
    }

    fn post_notif(
        &self,
        conn: ConnId,
        payload: NotifPayload<'_>,
        timeout: Option<Duration>,
    ) -> Result<Arc<Transfer>> {
        let conn = self.usable_conn(conn)?;
        let transfer = self.start_notif(&conn, payload, timeout)?;
        self.core().workers.hurry();
        transfer.conn.kick_if_busy();
        Ok(transfer)
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

    /// The connection, if the endpoint and the connection can be used.
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
            context: 0,
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

    /// Takes the notifications that have arrived; those of one connection are in order.
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

    /// Waits until a notification has arrived or `timeout` has passed; takes the notifications that
    /// are there.
    pub fn wait_notifs(
        &self,
        timeout: Option<Duration>,
        interrupt: &mut dyn Interrupt,
    ) -> Result<Vec<Notification>> {
        self.wait_notifs_of(None, timeout, interrupt)
    }

    /// The same as [`wait_notifs`](Self::wait_notifs), for a caller that waits for the peer of this
    /// connection. It takes the notifications of all connections.
    ///
    /// # Errors
    /// Also the reason for which the connection was lost, once all notifications have been taken.
    pub fn wait_notifs_from(
        &self,
        conn: ConnId,
        timeout: Option<Duration>,
        interrupt: &mut dyn Interrupt,
    ) -> Result<Vec<Notification>> {
        self.wait_notifs_of(Some(conn), timeout, interrupt)
    }

    fn wait_notifs_of(
        &self,
        conn: Option<ConnId>,
        timeout: Option<Duration>,
        interrupt: &mut dyn Interrupt,
    ) -> Result<Vec<Notification>> {
        let started = Instant::now();
        let until = timeout.and_then(|timeout| started.checked_add(timeout));
        loop {
            let core = self.here()?;
            core.usable()?;
            let lost = conn.and_then(|conn| self.check_connection(conn).err());
            let taken = self.spin_for_notifs(started, until);
            if !taken.is_empty() {
                return Ok(taken);
            }
            // The last look was after the end of the connection: all notifications before the end
            // have been taken.
            if let Some(lost) = lost {
                return Err(lost);
            }
            let now = Instant::now();
            if until.is_some_and(|until| until <= now) {
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

    /// Takes the notifications that have arrived; if there are none, makes progress for as long as
    /// threads spin.
    fn spin_for_notifs(&self, started: Instant, until: Option<Instant>) -> Vec<Notification> {
        let core = self.core();
        let conns = core.open_conns();
        // Held throughout: without claims, workers would take in the events that this call waits
        // for.
        let claims: SmallVec<[_; 8]> = conns.iter().map(|conn| conn.claim()).collect();
        loop {
            // A look costs less than reading the clock.
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

    /// Counters of this endpoint.
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

    /// Fails unfinished transfers, revokes every region, closes every connection, stops and joins
    /// the workers.
    ///
    /// When this returns `Ok`, no access by a peer lands in this endpoint's memory any more. Waits
    /// for peers of this host that are in the middle of an access, for at most the endpoint's
    /// timeout in all. Then [`Error::StillTouched`] names the regions that must stay allocated.
    /// Call this again to wait again. A worker that the kernel holds up in the middle of a copy
    /// leads to the same error; it gets at least 5 seconds, and keeps its resources.
    pub fn close(&self) -> Result<()> {
        // A child made by `fork` has nothing to close.
        self.here().map_or(Ok(()), Core::close)
    }
}
