//! The values that callers pass to the engine, and those that they get back.

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
pub use uccl_wire::signal::Change;

use crate::{
    error::Error,
    ids::{ConnId, MrId, TransferId},
};

/// A waiting call asks this now and then (at least every 50 ms) whether to go on.
pub trait Interrupt {
    /// True stops the waiting call with [`Error::Interrupted`].
    fn interrupted(&mut self) -> bool;
}

/// Nothing interrupts.
pub struct NoInterrupt;

impl Interrupt for NoInterrupt {
    fn interrupted(&mut self) -> bool {
        false
    }
}

/// The operation of a transfer.
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

/// A connection that a caller asks for.
#[derive(Clone, Copy, Debug)]
pub struct ConnectRequest<'a> {
    /// Where the peer may listen. The addresses are tried in their order: while others are left, an
    /// address has an equal share of the time.
    pub addrs: &'a [SocketAddr],
    /// How long it may take; `None` takes the endpoint's time, zero is no limit.
    pub timeout: Option<Duration>,
    /// The [instance](super::Endpoint::instance) of the endpoint that is meant. Another one
    /// refuses.
    pub instance: Option<u64>,
    /// Whether the peer may not be listening yet: until the time is up, it is tried again.
    pub waits_for_listener: bool,
}

impl<'a> ConnectRequest<'a> {
    /// A connection to any endpoint that listens at one of these addresses now, within the
    /// endpoint's time.
    #[must_use]
    pub fn new(addrs: &'a [SocketAddr]) -> Self {
        Self { addrs, timeout: None, instance: None, waits_for_listener: false }
    }
}

/// A transfer that a caller asks for: n iovs that are moved together.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The connection to use.
    pub conn: ConnId,
    /// The operation.
    pub op: Op,
    /// Local memory, one piece per iov.
    pub iovs: &'a [Iov],
    /// The peer's memory, one advert per iov; empty for send and recv.
    pub adverts: &'a [Advert],
    /// Delivered to the peer after the data, if given (read, write and send).
    pub notif: Option<&'a [u8]>,
    /// Deadline from now; `None` takes the endpoint's, zero waits for ever.
    pub timeout: Option<Duration>,
    /// A stream: the transfer begins after the work that is on it at the time of the post. `None`:
    /// the caller has already waited for the work that produces or uses the memory.
    pub after: Option<CudaStream>,
    /// A word in the peer's memory that changes when all bytes of a write are visible there, before
    /// the notification is sent. With a signal, a write may have no iovs.
    pub signal: Option<Signal>,
    /// The scope of strong signals: such a signal waits for the writes that were posted earlier in
    /// the same context.
    pub context: u32,
}

/// Memory of ours and memory of the peer's, of the same length, both named by their addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AddressPiece {
    /// Address in this process, in registered memory.
    pub local: usize,
    /// Address in the peer's process, in memory that the peer publishes.
    pub remote: u64,
    /// Length in bytes.
    pub len: usize,
}

/// A read or write that names memory by its addresses, on both sides.
#[derive(Clone, Copy, Debug)]
pub struct AddressRequest<'a> {
    /// The connection to use.
    pub conn: ConnId,
    /// Read or write.
    pub op: Op,
    /// The memory.
    pub pieces: &'a [AddressPiece],
    /// Deadline from now; `None` takes the endpoint's, zero waits for ever.
    pub timeout: Option<Duration>,
}

/// A word in the peer's memory that a write changes exactly once, when all its bytes are visible
/// there (also to the GPU, if it is GPU memory). The word does not change if the write fails or is
/// cancelled, or if its deadline passes first.
///
/// The word is an integer of eight bytes, aligned to eight, in memory that the peer has registered.
/// A reader that loads it atomically with acquire order, and sees the new value, also sees the
/// bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Signal {
    /// Where the word is: at the beginning of the advert.
    pub advert: Advert,
    /// How the word changes.
    pub change: Change,
    /// Whether the change also waits for all writes that were posted earlier in the same context
    /// over the same connection: all of them must have succeeded. Once one of them has failed, the
    /// context can have no strong signals any more.
    pub strong: bool,
}

/// The value that a call waits for in a word.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Until {
    /// This value or more.
    AtLeast(u64),
    /// Exactly this value.
    Equals(u64),
}

impl Until {
    /// Whether the value `word` ends the wait.
    #[must_use]
    pub fn is_met_by(self, word: u64) -> bool {
        match self {
            Self::AtLeast(value) => word >= value,
            Self::Equals(value) => word == value,
        }
    }
}

impl<'a> Request<'a> {
    /// A plain transfer: no notification, no signal, no stream to wait for, the endpoint's
    /// deadline. `adverts` is empty for send and recv.
    #[must_use]
    pub fn new(conn: ConnId, op: Op, iovs: &'a [Iov], adverts: &'a [Advert]) -> Self {
        let (notif, timeout, after, signal, context) = (None, None, None, None, 0);
        Self { conn, op, iovs, adverts, notif, timeout, after, signal, context }
    }
}

/// The state of a transfer.
#[derive(Clone, Debug)]
pub enum Status {
    /// Not finished.
    Pending,
    /// Finished with success.
    Done(Outcome),
    /// Failed. Asking again gives the same answer.
    Failed(Error),
}

/// The result of [`Endpoint::try_run`](super::Endpoint::try_run) and
/// [`Endpoint::try_run_held`](super::Endpoint::try_run_held).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TryOutcome<T = TransferId> {
    /// It is done.
    Done(Outcome),
    /// It is under way.
    Under(T),
}

/// The outcome of a finished transfer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Outcome {
    /// Bytes moved (for a recv: bytes received, which may be fewer than its capacity).
    pub bytes: u64,
    /// Whether every byte was covered by a checksum.
    pub checksummed: bool,
}

/// A connection that accept returned.
#[derive(Clone, Debug)]
pub struct Acceptance {
    /// The connection's id here.
    pub conn: ConnId,
    /// Where the peer connected from.
    pub ip: IpAddr,
    /// The peer's GPU.
    pub gpu_index: u32,
}

/// The payload of a notification to send.
#[derive(Clone, Debug)]
pub enum NotifPayload<'a> {
    /// The caller may reuse it as soon as the call returns: a long one is copied.
    Borrowed(&'a [u8]),
    /// Kept until the peer has received it, and not copied.
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

/// A notification from a peer, delivered after the data that it follows.
#[derive(Clone, Debug)]
pub struct Notification {
    /// The connection it came over.
    pub conn: ConnId,
    /// Its payload.
    pub payload: Vec<u8>,
}

/// Information about a connection.
#[derive(Clone, Debug, Serialize)]
pub struct ConnInfo {
    /// The peer's address.
    pub addr: SocketAddr,
    /// The peer's instance number ([`super::Endpoint::instance`]).
    pub instance: u64,
    /// The peer's GPU.
    pub gpu_index: u32,
    /// The peer's name in errors.
    pub peer: String,
    /// Whether the peer is on this host.
    pub same_host: bool,
    /// The path of one-sided data: `cma`, `shm`, `tcp`, `udp`, `verbs` or `libfabric` (and
    /// `mapped` for memory from alloc).
    pub path: String,
    /// How the data moves on that path. Over rails this depends on the regions registered here, and
    /// on those of the peer's that have been reached: `Staged` as soon as the devices do not accept
    /// one of them, so that its data has to be copied; `Tcp` as soon as the data of one goes over
    /// the streams.
    #[serde(serialize_with = "as_word")]
    pub moves: Moves,
    /// Number of streams that live or, over rails, of paths that work.
    pub lanes: usize,
    /// Whether stream data carries checksums.
    pub checksum: bool,
}

fn as_word<S: Serializer>(moves: &Moves, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(moves.name())
}

/// Information about a region.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct RegionInfo {
    /// Where it starts.
    pub addr: usize,
    /// How long it is, in bytes.
    pub len: usize,
    /// The kind of memory.
    pub kind: MemoryKind,
    /// The NUMA node of host memory: that of its first page at the time of the call, on a machine
    /// with several nodes, where the kernel tells.
    pub numa_node: Option<u32>,
    /// The nearest usable NIC: nearest to its GPU or its node; if neither is known, to the
    /// endpoint's GPU. `None` if no NIC is up. A process looks up its NICs only once.
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
    /// Transfers that finished with success.
    pub transfers_done: u64,
    /// Transfers that failed.
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
    /// Copies between our locked host memory and peers' GPU memory that we made because the peers
    /// asked.
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

/// A CUDA stream, identified as in frameworks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CudaStream {
    pub(crate) device: u32,
    pub(crate) handle: u64,
}

impl CudaStream {
    /// The stream with this handle (`cudaStream_t` as a number; 0 is the default stream) on the GPU
    /// of this ordinal.
    ///
    /// # Safety
    /// The stream must exist until every call that it is passed to has returned.
    #[must_use]
    pub unsafe fn new(device: u32, handle: u64) -> Self {
        Self { device, handle }
    }
}
