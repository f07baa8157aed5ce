//! Lanes between processes of one host, which access each other's memory directly.

use uccl_device::{
    MemoryKind,
    cuda::{Event, Stream},
};
use uccl_wire::signal::Change;

use super::{LaneError, MessageLane, OpKind, OpName, OpResult, Operation, PostOutcome};
use crate::{
    alloc::Shareable,
    mem::{RemoteSpan, Span},
    signal::Word,
};

/// The accesses that may still happen after a lane was killed here. The peer may not know of the
/// kill yet, and may be stopped in the middle of an access. A copy of our own may also hang in the
/// kernel, which waits for the peer's memory.
pub trait Aftermath: Send + Sync {
    /// Whether any copy of our own is still under way, of any operation of the lane and any memory.
    fn copies(&self) -> bool;

    /// Whether our region in this slot may be accessed right now.
    fn touches(&self, slot: u32) -> bool;

    /// Calls the completions of operations that have ended since the kill. The rules of
    /// [`Completion`](super::Completion) hold.
    fn look(&self) {}

    /// Whether no memory is accessed any more: the peer has closed its side or died, and our copies
    /// have ended.
    fn is_over(&self) -> bool;
}

/// A lane between processes of one host.
pub trait HostLane: MessageLane {
    /// The path that one-sided data to and from this memory of the peer's would take right now, in
    /// a word for people.
    fn path_to(&self, remote: &RemoteSpan) -> &'static str;

    /// For each of these remote pieces: whether its owner copies it better than we do, to and from
    /// local memory of this kind. Empty if that is so for none. This is no access check: the owner
    /// makes that.
    fn owner_copies(&self, ours: MemoryKind, remote: &[RemoteSpan]) -> Vec<bool>;

    /// The owner's side of [`owner_copies`](Self::owner_copies): whether this process copies well
    /// between local memory of this kind and these pieces of the peer's.
    fn copies_as_owner(&self, ours: MemoryKind, remote: &[RemoteSpan]) -> bool;

    /// Moves one piece right now, on the caller's thread, if the link can and the piece is short.
    /// `None`: post it instead.
    ///
    /// # Safety
    /// The local piece must be valid during the call.
    unsafe fn try_now(&self, kind: OpKind, local: Span, remote: &RemoteSpan) -> Option<OpResult>;

    /// Writes as [`try_now`](Self::try_now) does, then changes a word as
    /// [`try_signal`](Self::try_signal) does. `None`: nothing has happened; write first, then
    /// signal.
    ///
    /// # Safety
    /// The local piece must be valid during the call.
    unsafe fn try_signalled(
        &self,
        local: Span,
        remote: &RemoteSpan,
        word: &RemoteSpan,
        change: Change,
    ) -> Option<OpResult>;

    /// Changes a word of the peer's right now, in one access, if the link can. The peer sees the
    /// change when this returns, so the data that the signal announces must already be visible to
    /// the peer. `None`: ask the owner to change it.
    fn try_signal(&self, word: &RemoteSpan, change: Change) -> Option<OpResult>;

    /// Whether one of our GPUs would copy between memory of this kind and the peer's, as far as is
    /// known beforehand. Such a copy ends soon, and [`progress_copies`](Self::progress_copies)
    /// completes it.
    fn is_copied_by_gpu(&self, ours: MemoryKind, remote: &RemoteSpan) -> bool;

    /// Whether a GPU of ours makes all of a write from memory of this kind to these pieces of the
    /// peer's, and then changes this word of the peer's in the same job, as far as is known
    /// beforehand.
    fn signals_by_gpu(&self, ours: MemoryKind, remote: &[RemoteSpan], word: &Word) -> bool;

    /// Starts a write as [`Lane::post`](super::Lane::post) does, for which
    /// [`signals_by_gpu`](Self::signals_by_gpu) holds. The word changes once, when all bytes of the
    /// write are visible to the peer, and before the write ends. If the write fails, the word does
    /// not change.
    ///
    /// # Safety
    /// As for [`Lane::post`](super::Lane::post).
    ///
    /// # Errors
    /// The lane is dead.
    unsafe fn post_signalled_by_gpu(
        &self,
        write: Operation,
        word: Word,
    ) -> Result<PostOutcome, LaneError>;

    /// Makes work that is enqueued on a stream from now on wait for these operations, and enqueues
    /// the copies that have not been. Our GPUs must be the ones to make all copies that are left of
    /// them. Returns how many of the operations have not ended. `None`: not all can be enqueued
    /// now; some may have been.
    fn lead(&self, ops: &[OpName], stream: &Stream) -> Option<usize> {
        let _ = (ops, stream);
        None
    }

    /// Starts an operation as [`Lane::post`](super::Lane::post) does; a GPU of ours copies it when
    /// an event has happened. `Err`: nothing was started; a GPU of ours would not copy all of it.
    ///
    /// # Safety
    /// As for [`Lane::post`](super::Lane::post).
    unsafe fn post_behind(&self, op: Operation, event: &Event) -> Result<OpName, Operation> {
        let _ = event;
        Err(op)
    }

    /// Completes the copies that GPUs have finished. Does less than
    /// [`Lane::progress`](super::Lane::progress), for a thread that waits for one of these copies.
    fn progress_copies(&self);

    /// Whether only this process, its CPUs or its GPUs, has work left on the operation: its end
    /// does not depend on the peer.
    fn is_ours(&self, op: OpName) -> bool;

    /// Whether other threads could share its work with the one that makes progress.
    fn wants_help(&self) -> bool;

    /// Does a share of that work on this thread. False: there was none.
    fn help(&self) -> bool;

    /// The accesses to our memory that may still happen after [`Lane::kill`](super::Lane::kill): by
    /// the peer itself, or by a copy of ours that did not end in time. `None` if neither can.
    fn aftermath(&self) -> Option<Box<dyn Aftermath>>;

    /// Gives the peer direct access to memory.
    fn offer(&self, memory: &Shareable);

    /// Makes the peer forget memory that was offered.
    fn retract(&self, id: u32);
}
