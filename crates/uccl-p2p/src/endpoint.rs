//! The endpoint: what callers hold.
#![allow(unused_variables, clippy::missing_panics_doc)]

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use serde::Serialize;
use uccl_wire::advert::Advert;

use crate::{
    config::Config,
    error::{Error, Result},
    ids::{ConnId, MrId, TransferId},
};

/// One process's engine for one GPU (or none). Clones share the engine.
#[derive(Clone)]
pub struct Endpoint {
    _inner: Arc<()>,
}

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
    /// Number of lanes.
    pub lanes: usize,
    /// Whether stream data carries checksums.
    pub checksum: bool,
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
}

/// Memory that peers on this host can map, so that a transfer is one user-space copy.
///
/// Freed when the last clone is dropped; regions over it keep it alive.
#[derive(Clone)]
pub struct SharedBuf {
    _inner: Arc<()>,
}

impl SharedBuf {
    /// Where it starts.
    pub fn as_ptr(&self) -> *mut u8 {
        unimplemented!()
    }
    /// How long it is, in bytes.
    pub fn len(&self) -> usize {
        unimplemented!()
    }
    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Endpoint {
    /// Starts an endpoint: listens, and runs its first worker.
    pub fn new(config: Config) -> Result<Self> {
        unimplemented!()
    }
    /// The settings it runs with.
    pub fn config(&self) -> &Config {
        unimplemented!()
    }
    /// The address it listens on; the IP is one that peers can reach (or the bound one).
    pub fn addr(&self) -> SocketAddr {
        unimplemented!()
    }
    /// Connects to the endpoint that listens at `addr`.
    pub fn connect(
        &self,
        addr: SocketAddr,
        timeout: Option<Duration>,
        interrupt: &mut dyn Interrupt,
    ) -> Result<ConnId> {
        unimplemented!()
    }
    /// Waits for a peer that connected and hands its connection over.
    pub fn accept(
        &self,
        timeout: Option<Duration>,
        interrupt: &mut dyn Interrupt,
    ) -> Result<Accepted> {
        unimplemented!()
    }
    /// From now on connections are taken as they come; accept will not return them.
    pub fn start_passive_accept(&self) -> Result<()> {
        unimplemented!()
    }
    /// Closes a connection; its unfinished transfers fail.
    pub fn disconnect(&self, conn: ConnId) -> Result<()> {
        unimplemented!()
    }
    /// What is known of a connection.
    pub fn connection(&self, conn: ConnId) -> Result<ConnInfo> {
        unimplemented!()
    }
    /// Registers memory.
    ///
    /// # Safety
    /// The `len` bytes at `ptr` must stay allocated until the region is deregistered or the endpoint
    /// closed: peers that hold an advert read and write them at any time.
    pub unsafe fn register(&self, ptr: usize, len: usize) -> Result<MrId> {
        unimplemented!()
    }
    /// Ends a region: when this returns `Ok`, no peer's access lands in it any more.
    pub fn deregister(&self, mr: MrId) -> Result<()> {
        unimplemented!()
    }
    /// Where a region starts and how long it is.
    pub fn region(&self, mr: MrId) -> Result<(usize, usize)> {
        unimplemented!()
    }
    /// What lets a peer read and write `len` bytes at `ptr` of a region.
    pub fn advertise(&self, mr: MrId, ptr: usize, len: usize) -> Result<Advert> {
        unimplemented!()
    }
    /// Starts a transfer.
    pub fn post(&self, request: &Request<'_>) -> Result<TransferId> {
        unimplemented!()
    }
    /// Starts a transfer and waits for its end. Interrupted, it cancels the transfer first.
    pub fn run(&self, request: &Request<'_>, interrupt: &mut dyn Interrupt) -> Result<Outcome> {
        unimplemented!()
    }
    /// Where a transfer stands.
    pub fn poll(&self, transfer: TransferId) -> Result<Status> {
        unimplemented!()
    }
    /// Waits for a transfer's end, at most `timeout`; the transfer goes on if that passes.
    pub fn wait(
        &self,
        transfer: TransferId,
        timeout: Option<Duration>,
        interrupt: &mut dyn Interrupt,
    ) -> Result<Status> {
        unimplemented!()
    }
    /// Ends a transfer. When this returns, no byte of it lands in either side's memory any more; the
    /// status says whether it had finished before. An error means that the fence could not be
    /// confirmed because the peer was lost.
    pub fn cancel(&self, transfer: TransferId) -> Result<Status> {
        unimplemented!()
    }
    /// Sends a message to the peer, at most 64 MiB.
    pub fn send_notif(
        &self,
        conn: ConnId,
        payload: &[u8],
        timeout: Option<Duration>,
    ) -> Result<TransferId> {
        unimplemented!()
    }
    /// Takes the notifications that have arrived, in order per connection.
    pub fn take_notifs(&self) -> Vec<Notification> {
        unimplemented!()
    }
    /// Waits until notifications are there or `timeout` has passed, and takes them.
    pub fn wait_notifs(
        &self,
        timeout: Option<Duration>,
        interrupt: &mut dyn Interrupt,
    ) -> Result<Vec<Notification>> {
        unimplemented!()
    }
    /// Allocates memory that peers on this host can map; page aligned, zeroed.
    pub fn alloc(&self, len: usize) -> Result<SharedBuf> {
        unimplemented!()
    }
    /// Counters.
    pub fn stats(&self) -> Stats {
        unimplemented!()
    }
    /// Fails what is unfinished, closes every connection, stops and joins the workers. Idempotent.
    pub fn close(&self) {
        unimplemented!()
    }
}

#[allow(dead_code)]
fn _unused(e: Error) -> Error {
    e
}
