//! The [`Lane`] trait: one channel of a connection, as an engine sees it.
//!
//! A lane posts operations and reports their completion; it knows nothing of transfers. It never
//! blocks and owns no thread: the engine calls [`Lane::progress`], from any thread.

mod host;
mod message;
mod rails;

use std::{
    ops::Range,
    os::fd::{AsRawFd, BorrowedFd},
    sync::Arc,
};

use uccl_device::{MemoryKind, cuda::GpuError};
use uccl_wire::frame::Status;

pub use self::{
    host::{Aftermath, HostLane},
    message::{Handling, MessageLane, MessageSink},
    rails::RailLane,
};
use crate::{
    mem::{Access, RemoteSpan, Span},
    pieces::PieceList,
};

/// Local pieces of an operation.
pub type Spans = PieceList<Span>;
/// Remote pieces of an operation.
pub type RemoteSpans = PieceList<RemoteSpan>;

/// How data moves between two endpoints, from the fastest way to the slowest.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Moves {
    /// From memory to memory: by a device, a GPU or the kernel.
    Direct,
    /// Through an intermediate buffer: copied into it, then out of it.
    Staged,
    /// As a stream over TCP.
    Tcp,
}

impl Moves {
    /// In a word, for people: `direct`, `staged`, `tcp`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Staged => "staged",
            Self::Tcp => "tcp",
        }
    }
}

/// The abilities and limits of a lane. The engine plans with these values and need not know the
/// link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Caps {
    /// Short name of the link, for people.
    pub link: &'static str,
    /// Operations land in the order in which they were posted.
    pub ordered: bool,
    /// A write's completion means that its bytes are in the peer's memory, not merely on their way.
    pub delivery_complete: bool,
    /// Remote atomic operations are supported.
    pub remote_atomics: bool,
    /// Messages can be sent (two-sided); a connection needs one such lane.
    pub messages: bool,
    /// Data is covered by a checksum.
    pub checksum: bool,
    /// Devices move the data, while this machine's processors may do anything else.
    pub by_device: bool,
    /// The most pieces in one operation.
    pub max_pieces: usize,
    /// The most pieces in one operation with local GPU memory: one launch may copy any number.
    pub max_gpu_pieces: usize,
    /// Longest message in bytes.
    pub max_message: usize,
}

/// The direction of a one-sided operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OpKind {
    /// From the peer's memory into ours.
    Read,
    /// From our memory into the peer's.
    Write,
}

/// The access that an operation makes to the peer's memory.
pub fn access_of(kind: OpKind) -> Access {
    match kind {
        OpKind::Read => Access::Read,
        OpKind::Write => Access::Write,
    }
}

/// The part of a transfer that one lane carries. Local and remote pieces pair up: there are as many
/// of one as of the other, and each has the length of its partner.
pub struct Operation {
    /// Whether it reads or writes.
    pub kind: OpKind,
    /// The local pieces, in order.
    pub local: Spans,
    /// The kind of the local memory; all local pieces are of this kind.
    pub memory: MemoryKind,
    /// The remote pieces, in order.
    pub remote: RemoteSpans,
    /// Called once, when the operation has ended, unless [`Lane::post`] returned
    /// [`PostOutcome::Done`].
    pub done: Arc<dyn Completion>,
}

impl Operation {
    /// Bytes that it moves.
    pub fn len(&self) -> u64 {
        self.local.len_bytes()
    }

    /// A new operation with the pieces in `range`, which calls `done` when it ends.
    pub fn part(&self, range: Range<usize>, done: &Arc<dyn Completion>) -> Self {
        let (kind, memory, done) = (self.kind, self.memory, Arc::clone(done));
        let (local, remote) = (self.local[range.clone()].into(), self.remote[range].into());
        Self { kind, local, memory, remote, done }
    }

    /// Whether it moves nothing.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// How an operation ended.
pub type OpResult = Result<(), OpError>;

/// Why an operation failed while its lane lives on.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum OpError {
    /// The peer refused or could not do it.
    #[error("{}", describe(*.0))]
    Remote(Status),
    /// The bytes that arrived differ from those that were sent.
    #[error("checksum mismatch")]
    Checksum,
    /// Our own memory could not be touched.
    #[error("local memory could not be touched")]
    LocalFault,
    /// It was cancelled and has been fenced.
    #[error("cancelled")]
    Cancelled,
    /// A GPU could not do it.
    #[error("{0}")]
    Gpu(Arc<GpuError>),
    /// No GPU of this process reaches both our memory and the peer's.
    #[error("no GPU of this process reaches both sides: {0}")]
    HostOnly(&'static str),
    /// The lane died before the operation ended; whether it landed is unknown.
    #[error("the lane died")]
    LaneDown,
    /// The lane cannot reach the memory, or no longer can; another lane may. The operation moves no
    /// more bytes, but some may have landed.
    #[error("the lane does not reach the memory")]
    Unreachable,
    /// A device failed; the text is the device's own.
    #[error("{0}")]
    Device(Arc<str>),
}

impl From<GpuError> for OpError {
    fn from(e: GpuError) -> Self {
        Self::Gpu(Arc::new(e))
    }
}

fn describe(status: Status) -> &'static str {
    match status {
        Status::Ok => "no error",
        Status::UnknownKey => "no region has this key: forged, or revoked by deregistration",
        Status::OutOfBounds => "the range is not inside the region",
        Status::Denied => "the region does not allow this kind of access",
        Status::Device => "the region is GPU memory, which this path does not reach",
        Status::Checksum => "checksum mismatch at the peer",
        Status::Fault => "the peer's memory could not be touched (freed without deregistration?)",
        Status::Cut => "cut short",
        Status::Protocol => "the peer could not make sense of it",
    }
}

/// The callback for the end of an operation.
///
/// Called from whichever thread brought the end about: one that makes progress, cancels, kills,
/// posts something else or helps. That thread may hold locks of the lane (a stream's receive half,
/// for one). The call may post and send on any lane, but must not call [`Lane::progress`],
/// [`Lane::cancel`] or [`Lane::kill`].
pub trait Completion: Send + Sync {
    /// The operation has ended; no byte of it moves any more.
    fn complete(self: Arc<Self>, result: OpResult);
}

/// Why a lane is dead.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaneError {
    /// The peer closed it with a goodbye.
    #[error("closed by the peer")]
    Closed,
    /// The peer's end disappeared without a goodbye.
    #[error("the peer is gone: its process ended, or closed without a goodbye")]
    Ended,
    /// The peer is gone.
    #[error("{0}")]
    Lost(Arc<std::io::Error>),
    /// The peer broke the protocol.
    #[error("protocol violation: {0}")]
    Protocol(String),
    /// This side shut it.
    #[error("shut down")]
    Killed,
}

impl From<std::io::Error> for LaneError {
    fn from(e: std::io::Error) -> Self {
        Self::Lost(Arc::new(e))
    }
}

/// Identifies an operation on its lane, for [`Lane::cancel`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct OpName(pub u64);

/// The outcome of [`Lane::post`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PostOutcome {
    /// It ended at once; its completion is not called.
    Done(OpResult),
    /// Its completion will be called.
    Pending(OpName),
}

/// The descriptors that a thread watches while it sleeps on a lane.
#[derive(Clone, Copy, Debug)]
pub struct Interest<'a> {
    /// Readable when the peer has something for us.
    pub fd: BorrowedFd<'a>,
    /// Whether to wait until it is writable, too.
    pub write: bool,
    /// Readable, and then for good, when the peer's process has ended. `None` where `fd` always
    /// shows that; a socket does not while children of the peer keep it open.
    pub end: Option<BorrowedFd<'a>>,
}

impl Interest<'_> {
    /// The descriptor's number.
    pub fn raw(&self) -> i32 {
        self.fd.as_raw_fd()
    }
}

/// One channel of a connection, for operations on the peer's memory. Further traits add the
/// abilities of some lanes: [`MessageLane`], [`HostLane`], [`RailLane`]. No method has a default,
/// so that a wrapper around a lane cannot forget one.
pub trait Lane: Send + Sync {
    /// The lane's abilities and limits.
    fn caps(&self) -> Caps;

    /// Starts an operation.
    ///
    /// # Safety
    /// The local pieces must stay valid until the operation has ended: until its completion is
    /// called, or [`Lane::kill`] has returned.
    unsafe fn post(&self, op: Operation) -> Result<PostOutcome, LaneError>;

    /// Does all the work that needs no blocking. True if there was any.
    fn progress(&self, sink: &dyn MessageSink) -> Result<bool, LaneError>;

    /// Cancels an operation. Its completion is called when none of its bytes moves any more, at
    /// once or by a later progress; it may still report success.
    fn cancel(&self, op: OpName);

    /// A weight of the bytes and operations in flight, for choosing among lanes.
    fn load(&self) -> u64;

    /// Whether the lane has work that it can do without waiting for the peer.
    fn has_work(&self) -> bool;

    /// Whether the peer may be accessing our region in this slot right now, by itself.
    fn touched_by_peer(&self, slot: u32) -> bool;

    /// Prepares for sleep: from now on [`Lane::interest`] shows when progress is needed. Returns
    /// false if there is work right now.
    fn arm(&self) -> bool;

    /// The descriptors to watch while asleep.
    fn interest(&self) -> Interest<'_>;

    /// Shuts the lane for good. When this returns, no memory is accessed through it any more,
    /// except as [`aftermath`](HostLane::aftermath) reports. The completions of unfinished
    /// operations are called with [`OpError::LaneDown`].
    fn kill(&self);
}
