//! Pieces of memory, here and at the peer, as links see them.

use std::{
    io,
    sync::atomic::{AtomicU32, Ordering},
};

/// A piece of this process's memory.
///
/// It owns nothing: the caller that makes one promises that the memory stays allocated while a link
/// uses it (for callers of the engine that is the promise made at registration).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Span {
    /// Where it starts.
    pub addr: usize,
    /// How long it is, in bytes.
    pub len: usize,
}

/// A piece of this process's memory, and the GPU that it is on, if any.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LocatedSpan {
    /// The memory.
    pub span: Span,
    /// The ordinal of the GPU, if only that GPU reaches the memory; `None` if the CPU does.
    pub device: Option<u32>,
}

/// A piece of the peer's memory, with the key that permits access to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RemoteSpan {
    /// Address in the peer's process.
    pub addr: u64,
    /// Length in bytes.
    pub len: u64,
    /// The region's key.
    pub key: u64,
    /// The region's slot in the peer's table.
    pub slot: u32,
}

/// How an access uses the memory of its owner.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// It is read.
    Read,
    /// It is written.
    Write,
}

/// A new id for memory that peers can reach. Ids are never reused.
pub(crate) fn next_id() -> io::Result<u32> {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    NEXT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |id| id.checked_add(1))
        .map_err(|_| io::Error::other("too many shared buffers"))
}
