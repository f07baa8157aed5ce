//! Pieces of memory, here and at the peer, as links see them.

/// A piece of this process's memory.
///
/// It owns nothing: whoever makes one promises that the memory stays allocated while a link uses it
/// (for callers of the engine that is the promise made at registration).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Span {
    /// Where it starts.
    pub addr: usize,
    /// How long it is, in bytes.
    pub len: usize,
}

/// A piece of this process's memory, and whose it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Located {
    pub(crate) span: Span,
    /// The GPU that alone reaches it, by its ordinal; none for what the CPU reaches.
    pub(crate) device: Option<u32>,
}

/// A piece of the peer's memory, with what proves the right to touch it.
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

/// What an access does to the memory of its owner.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// It is read.
    Read,
    /// It is written.
    Write,
}
