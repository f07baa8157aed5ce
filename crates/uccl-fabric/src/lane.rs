//! The lane: one channel of a connection on a rail, and what an engine may ask of it.
//!
//! A lane posts operations and reports their completion; it knows nothing of transfers. It never
//! blocks and owns no thread: whoever wants progress calls [`Lane::progress`], from any thread.

use std::{
    ops::Range,
    os::fd::{AsRawFd, BorrowedFd},
    sync::Arc,
};

use smallvec::SmallVec;
use uccl_device::{MemoryKind, cuda::GpuError};
use uccl_wire::frame::Status;

use crate::{
    alloc::Shareable,
    mem::{Access, RemoteSpan, Span},
};

/// Local pieces of an operation. One piece needs no allocation.
pub type Spans = SmallVec<[Span; 1]>;
/// Remote pieces of an operation. One piece needs no allocation.
pub type RemoteSpans = SmallVec<[RemoteSpan; 1]>;

/// How data moves between two endpoints. Of two, the later one is slower.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Moves {
    /// From memory to memory: by a device, a GPU or the kernel.
    Direct,
    /// Through memory that lies between, into which it is copied and out of which it is copied again.
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

/// What a lane can do, so that an engine can plan without knowing which link it is.
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
    /// Most pieces of one operation.
    pub max_pieces: usize,
    /// The same where our memory is a GPU's: one launch may copy any number.
    pub max_gpu_pieces: usize,
    /// Longest message in bytes.
    pub max_message: usize,
}

/// What a one-sided operation does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OpKind {
    /// From the peer's memory into ours.
    Read,
    /// From our memory into the peer's.
    Write,
}

/// What an operation does to the memory of its owner.
pub(crate) fn access_of(kind: OpKind) -> Access {
    match kind {
        OpKind::Read => Access::Read,
        OpKind::Write => Access::Write,
    }
}

/// One piece of a transfer on one lane. The lengths of both sides add up to the same.
pub struct Operation {
    /// What it does.
    pub kind: OpKind,
    /// Our memory, in order.
    pub local: Spans,
    /// What kind of memory ours is, all of it.
    pub memory: MemoryKind,
    /// The peer's memory, in order.
    pub remote: RemoteSpans,
    /// Told once, when the operation has ended.
    pub done: Arc<dyn Completion>,
}

impl Operation {
    /// Bytes that it moves.
    pub fn len(&self) -> u64 {
        self.local.iter().map(|span| span.len as u64).sum()
    }

    /// Some of its pieces as an operation of their own.
    pub(crate) fn part(&self, range: Range<usize>, done: &Arc<dyn Completion>) -> Self {
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
    /// What arrived is not what was sent.
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
    /// The lane does not reach the memory, or not any more: another one may. Nothing of the operation moves
    /// any more, but some of it may have landed.
    #[error("the lane does not reach the memory")]
    Unreachable,
    /// A device could not do it, in its own words.
    #[error("{0}")]
    Device(Arc<str>),
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

/// Told when an operation ends.
///
/// Called from whichever thread made the progress, with the lane's receive lock held: it may post and
/// send on any lane, but must not call [`Lane::progress`], [`Lane::cancel`] or [`Lane::kill`].
pub trait Completion: Send + Sync {
    /// The operation has ended; no byte of it moves any more.
    fn complete(self: Arc<Self>, result: OpResult);
}

/// Takes the messages of a lane, in order. The rules of [`Completion`] hold.
pub trait MessageSink {
    /// A message came in. An error says why it makes no sense; the lane dies of it.
    fn message(&self, bytes: &[u8]) -> Result<(), String>;
}

/// Why a lane is of no more use.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaneError {
    /// The peer closed it in good order.
    #[error("closed by the peer")]
    Closed,
    /// The peer's end went away without a goodbye.
    #[error("the peer is gone: its process ended, or closed without a goodbye")]
    Ended,
    /// The peer is gone.
    #[error("{0}")]
    Lost(Arc<std::io::Error>),
    /// The peer broke the protocol.
    #[error("protocol violation: {0}")]
    Protocol(String),
    /// It was shut here.
    #[error("shut down")]
    Killed,
}

impl From<std::io::Error> for LaneError {
    fn from(e: std::io::Error) -> Self {
        Self::Lost(Arc::new(e))
    }
}

/// Names an operation on its lane, for cancelling.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct OpName(pub u64);

/// What became of a post.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Posted {
    /// It ended at once; its completion is not called.
    Done(OpResult),
    /// Its completion will be called.
    Pending(OpName),
}

/// What a sleeper must watch before it may sleep on a lane.
#[derive(Clone, Copy, Debug)]
pub struct Interest<'a> {
    /// Readable when the peer has something for us.
    pub fd: BorrowedFd<'a>,
    /// Whether writability matters too.
    pub write: bool,
    /// Readable, and then for good, when the peer's process has ended, where that may not show on the first: children of
    /// the peer's keep a socket open.
    pub end: Option<BorrowedFd<'a>>,
}

impl Interest<'_> {
    /// The descriptor's number.
    pub fn raw(&self) -> i32 {
        self.fd.as_raw_fd()
    }
}

/// A lane that is dead here, but whose peer may not know it yet: it may be stopped in the middle of an access. So may
/// a copy of our own be, in the kernel, which the peer's memory keeps from ending.
pub trait Aftermath: Send + Sync {
    /// Whether copies of our own are under way: of any operation that the lane had, to or from any memory.
    fn copies(&self) -> bool;

    /// Whether our region of this slot may be touched at this moment.
    fn touches(&self, slot: u32) -> bool;

    /// Has those told whose operations have ended since the kill. The rules of [`Completion`] hold.
    fn look(&self) {}

    /// Whether the peer has ended its side as well, or died, and our copies have ended: nothing is touched any more.
    fn is_over(&self) -> bool;
}

/// One channel of a connection on a rail.
pub trait Lane: Send + Sync {
    /// What it can do.
    fn caps(&self) -> Caps;

    /// How one-sided data to and from this memory of the peer's would move right now, in a word for people.
    fn path_to(&self, _: &RemoteSpan) -> &'static str {
        self.caps().link
    }

    /// Which of these pieces of the peer's memory their owner copies better, to and from memory of this kind
    /// here: one answer a piece, or none at all where it is not so for any. Whether a piece may be touched is
    /// for the owner to say.
    fn owner_copies(&self, _ours: MemoryKind, _: &[RemoteSpan]) -> Vec<bool> {
        Vec::new()
    }

    /// Whether we are such an owner: this process copies well between memory of this kind here and these
    /// pieces of the peer's.
    fn copies_as_owner(&self, _ours: MemoryKind, _: &[RemoteSpan]) -> bool {
        false
    }

    /// Starts an operation.
    ///
    /// # Safety
    /// The local pieces must stay valid until the operation has ended: until its completion is called,
    /// or [`Lane::kill`] has returned.
    unsafe fn post(&self, op: Operation) -> Result<Posted, LaneError>;

    /// Moves one piece right now, on the caller's thread, if the link can and the piece is short: the way
    /// with the least on it. `None`: post it.
    ///
    /// # Safety
    /// The local piece must be valid during the call.
    unsafe fn try_now(&self, _: OpKind, _local: Span, _: &RemoteSpan) -> Option<OpResult> {
        None
    }

    /// Whether a GPU of ours would copy between memory of this kind and the peer's, as far as can be told
    /// before: such a copy ends soon, and [`Lane::progress_copies`] sees it.
    fn is_copied_by_gpu(&self, _ours: MemoryKind, _: &RemoteSpan) -> bool {
        false
    }

    /// Ends copies that GPUs have made. Less than [`Lane::progress`], for whoever waits for one of these.
    fn progress_copies(&self) {}

    /// Sends a message made of parts, together at most [`Caps::max_message`] bytes. The bytes are taken
    /// before this returns.
    fn send(&self, parts: &[&[u8]]) -> Result<(), LaneError>;

    /// Does what can be done without blocking, and says whether anything was.
    fn progress(&self, sink: &dyn MessageSink) -> Result<bool, LaneError>;

    /// Ends an operation early. Its completion is called, at once or by a later progress, when no byte
    /// of it moves any more; it may still report success.
    fn cancel(&self, op: OpName);

    /// Whether all that is left of an operation is for this process to do, its processors or its GPUs: its end is
    /// not up to the peer.
    fn is_ours(&self, _op: OpName) -> bool {
        false
    }

    /// Bytes and operations posted and not ended, weighed for choosing among lanes.
    fn load(&self) -> u64;

    /// Bytes of messages that wait for room. A sender that minds leaves off while they are many.
    fn queued_bytes(&self) -> usize {
        0
    }

    /// When the peer was last heard, as [`crate::clock::coarse_ms`].
    fn last_heard_ms(&self) -> u64;

    /// Asks the peer for a sign of life.
    fn ping(&self) -> Result<(), LaneError>;

    /// Whether it could make progress on its own account, without anything from the peer.
    fn has_work(&self) -> bool;

    /// Whether other threads could take part in its work, beside the one that makes progress.
    fn wants_help(&self) -> bool {
        false
    }

    /// Takes a part of such work; false when there is none.
    fn help(&self) -> bool {
        false
    }

    /// Whether the peer may be touching our region of this slot at this moment, without our help.
    fn touched_by_peer(&self, _slot: u32) -> bool {
        false
    }

    /// What may still be done to our memory after [`Lane::kill`]: by the peer, without our help, or by a copy of ours
    /// that did not end in time. `None` where there is neither.
    fn aftermath(&self) -> Option<Box<dyn Aftermath>> {
        None
    }

    /// Lets the peer reach memory by itself, where the link can.
    fn offer(&self, _: &Shareable) {}

    /// Has the peer forget memory that was offered.
    fn retract(&self, _id: u32) {}

    /// Prepares for sleep: from now on whatever needs progress shows on [`Lane::interest`]. False: there
    /// is something to do right now.
    fn arm(&self) -> bool;

    /// What to watch while asleep.
    fn interest(&self) -> Interest<'_>;

    /// Says goodbye to the peer as far as that goes without blocking.
    fn bye(&self);

    /// Shuts the lane for good. When this returns no memory is touched through it any more, except as its
    /// [`aftermath`](Lane::aftermath) tells; completions of what was unfinished are called with
    /// [`OpError::LaneDown`].
    fn kill(&self);
}
