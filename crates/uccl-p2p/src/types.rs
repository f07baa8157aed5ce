//! What callers ask for, and what they are told.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use serde::{Serialize, Serializer};
use uccl_device::{MemoryKind, NearNic};
use uccl_fabric::alloc;
pub use uccl_fabric::lane::Moves;
use uccl_wire::advert::Advert;

use crate::{
    error::Error,
    ids::{ConnId, MrId, TransferId},
};

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

impl<'a> Request<'a> {
    /// A transfer with nothing besides: no notification, the endpoint's deadline, at once. `adverts` is empty for
    /// send and recv.
    #[must_use]
    pub fn new(conn: ConnId, op: Op, iovs: &'a [Iov], adverts: &'a [Advert]) -> Self {
        Self { conn, op, iovs, adverts, notif: None, timeout: None, after: None }
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

/// What became of a request that was tried.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tried {
    /// It is done.
    Done(Outcome),
    /// It is under way.
    Under(TransferId),
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

/// What a notification is to say.
#[derive(Clone, Debug)]
pub enum NotifPayload<'a> {
    /// The caller may use it again at once: where it is long, it is copied.
    Borrowed(&'a [u8]),
    /// Kept until the peer has it, and not copied.
    Shared(Bytes),
}

impl AsRef<[u8]> for NotifPayload<'_> {
    fn as_ref(&self) -> &[u8] {
        match self {
            Self::Borrowed(bytes) => bytes,
            Self::Shared(bytes) => bytes,
        }
    }
}

impl<'a> From<&'a [u8]> for NotifPayload<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self::Borrowed(bytes)
    }
}

impl<'a, const N: usize> From<&'a [u8; N]> for NotifPayload<'a> {
    fn from(bytes: &'a [u8; N]) -> Self {
        Self::Borrowed(bytes)
    }
}

impl<'a> From<&'a Vec<u8>> for NotifPayload<'a> {
    fn from(bytes: &'a Vec<u8>) -> Self {
        Self::Borrowed(bytes)
    }
}

impl From<Bytes> for NotifPayload<'_> {
    fn from(bytes: Bytes) -> Self {
        Self::Shared(bytes)
    }
}

impl From<Vec<u8>> for NotifPayload<'_> {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Shared(bytes.into())
    }
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
    /// Which endpoint the peer is ([`super::Endpoint::instance`]).
    pub instance: u64,
    /// The peer's GPU.
    pub gpu_index: u32,
    /// How the peer is named in errors.
    pub peer: String,
    /// Whether the peer is on this host.
    pub same_host: bool,
    /// The path one-sided data takes: `cma`, `shm`, `tcp` (and `mapped` for memory from alloc).
    pub path: String,
    /// How the data moves there. Over rails that is as the regions have it that are registered here, and those of the
    /// peer's that have been reached: `Staged` as soon as the devices do not take one of them, and others have to copy
    /// it; `Tcp` as soon as one goes over the streams.
    #[serde(serialize_with = "as_word")]
    pub moves: Moves,
    /// Number of lanes that live.
    pub lanes: usize,
    /// Whether stream data carries checksums.
    pub checksum: bool,
}

fn as_word<S: Serializer>(moves: &Moves, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(moves.name())
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
    pub(super) inner: Arc<alloc::SharedBuf>,
    pub(super) len: usize,
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

/// A CUDA stream, as frameworks name theirs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CudaStream {
    pub(crate) device: u32,
    pub(crate) handle: u64,
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
}
