//! The endpoint, the handle that callers use.

mod address;
mod at_once;
mod by_address;
mod connect;
mod handle;
mod notifs;
mod prepared;
mod reach;
mod regions;
mod run;
mod stream;
mod transfers;
mod words;

use std::{
    io,
    net::SocketAddr,
    sync::{Arc, OnceLock, atomic::Ordering::Relaxed},
    time::Duration,
};

use uccl_device::CpuList;
use uccl_fabric::{alloc, mem::Span, rail::Rail};
use uccl_rma::Rails;
use uccl_wire::advert::Advert;

pub use self::{
    address::{gpu_index, parse_address, parse_ip_address, resolve},
    by_address::AddressTransfer,
    connect::ConnectHandle,
    handle::TransferHandle,
    prepared::PreparedTransfer,
    words::StreamWait,
};
use self::{
    address::{listen, listen_locally},
    transfers::remote_span,
};
pub use crate::host_address::{reachable_ip, told_ip};
pub use crate::types::*;
use crate::{
    config::{Config, take_notices},
    descriptors,
    drive::{
        acceptor::Acceptor,
        core::{Core, Devices, connection::Connection, workers::Workers},
        greeting::Greeting,
        places, worker,
    },
    error::{Error, Result},
    ids::{ConnId, MrId},
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
    /// [`Self::alloc`] on this host), `cma`, `cuda_ipc` or `shm`; `verbs`, `libfabric` or `udp`;
    /// `tcp`.
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

    /// The CPUs near the GPU that worker threads keep to; `None` if they run wherever the process
    /// may, or have not started yet.
    pub fn worker_cpus(&self) -> Option<CpuList> {
        self.core().workers.cpus().cloned()
    }

    /// The connection, if the endpoint and the connection can be used.
    fn usable_conn(&self, conn: ConnId) -> Result<Arc<Connection>> {
        let core = self.here()?;
        core.usable()?;
        core.conn(conn)
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
