//! The advert: what lets a peer touch a region one-sidedly.

/// Bytes of an advert as callers carry it (a FifoItem).
pub const ADVERT_LEN: usize = 64;

/// What lets a peer touch `len` bytes at `addr`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Advert {
    /// Address in the owner's process.
    pub addr: u64,
    /// Length in bytes.
    pub len: u64,
    /// The region's random key.
    pub key: u64,
    /// The region's slot in the owner's table.
    pub slot: u32,
    /// The low half of the owner's instance: a restarted owner has another.
    pub instance: u32,
}
