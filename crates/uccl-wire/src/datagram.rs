//! Datagrams: parts of messages that go over UDP, and acknowledgements of them.
//!
//! | offset | type | field |
//! | --- | --- | --- |
//! | 0 | u16 | magic, "UD" |
//! | 2 | u8 | version, 1 |
//! | 3 | u8 | kind, see [`DatagramKind`] |
//! | 4 | u16 | path |
//! | 6 | u16 | bytes of the content |
//! | 8 | u64 | the receiver's connection |
//! | 16 | u32 | number on the path |
//! | 20 | u32 | bytes of the message |
//! | 24 | u32 | where the content begins in the message |
//! | 28 | u32 | bytes that a read asks for; of an acknowledgement: marked numbers |
//! | 32 | u64 | the sender's message |
//! | 40 | u64 | a region's key, or the receiver's message that is answered |
//! | 48 | u64 | where the message begins in the region |
//! | 56 | 16 B | code over the bytes before it and the content |
//! | 72 | | content |
//!
//! All numbers are little endian. With a pre-shared key the code is the first 16 bytes of
//! HMAC-SHA256, by a key of the connection and of the direction. Without one it is CRC-32C and 12
//! zeros: it finds damage and no forgery. The content of an acknowledgement is an
//! [`Ack`](crate::ack::Ack).

mod address;
mod seal;
#[cfg(test)]
mod tests;

pub use address::{MAX_PATHS, MIN_DATAGRAM, UdpAddress, UdpAddressError};
pub use seal::{DatagramKey, DatagramKeys};

use crate::{
    ack::ACK_LEN,
    cursor::{Reader, ShortInput},
};

/// Bytes of a datagram in front of its content.
pub const HEAD_LEN: usize = 72;
/// Bytes of the code, the last of the head.
pub const CODE_LEN: usize = 16;
/// Bytes in front of the code.
const SEALED_LEN: usize = HEAD_LEN - CODE_LEN;
const MAGIC: u16 = u16::from_le_bytes(*b"UD");
const VERSION: u8 = 1;

/// The purpose of a datagram.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum DatagramKind {
    /// Bytes for the receiver's memory.
    Write = 1,
    /// A question for bytes of the receiver's memory.
    Read = 2,
    /// Bytes that the receiver has asked for.
    Reply = 3,
    /// The receiver's message may not touch the memory that it names.
    Refusal = 4,
    /// Bytes that go nowhere, to be answered by as many.
    Ping = 5,
    /// The answer to a ping.
    Pong = 6,
    /// Nothing: the sender wants an acknowledgement.
    Probe = 7,
    /// Which numbers of a path have come.
    Ack = 8,
}

/// The head of a datagram.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DatagramHead {
    /// Its purpose.
    pub kind: DatagramKind,
    /// The path that it took.
    pub path: u16,
    /// Bytes of its content.
    pub len: u16,
    /// The receiver's connection.
    pub connection: u64,
    /// Its number on the path.
    pub number: u32,
    /// Bytes of the message.
    pub total: u32,
    /// Where the content begins in the message.
    pub offset: u32,
    /// Bytes that a read asks for; of an acknowledgement: marked numbers.
    pub length: u32,
    /// The sender's message.
    pub message: u64,
    /// A region's key, or the receiver's message that is answered.
    pub key: u64,
    /// Where the message begins in the region.
    pub addr: u64,
}

/// Why bytes are no datagram.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DatagramError {
    /// They end too early.
    #[error(transparent)]
    Truncated(#[from] ShortInput),
    /// Something else.
    #[error("not a datagram: it starts with {0:#06x}")]
    Magic(u16),
    /// A datagram of another version.
    #[error("a datagram of version {0}; this is version {VERSION}")]
    Version(u8),
    /// There is no such kind.
    #[error("a datagram of kind {0}")]
    Kind(u8),
    /// Its length is not the one that it names, or not one of its kind.
    #[error("{len} bytes of content, and {names} are named")]
    Length {
        /// Bytes that have come.
        len: usize,
        /// Bytes that the head names.
        names: usize,
    },
    /// Its content ends behind its message.
    #[error("{len} bytes at {offset} of a message of {total}")]
    Outside {
        /// Bytes of the content.
        len: u16,
        /// Where they begin.
        offset: u32,
        /// Bytes of the message.
        total: u32,
    },
}

impl DatagramKind {
    fn of(byte: u8) -> Option<Self> {
        Some(match byte {
            1 => Self::Write,
            2 => Self::Read,
            3 => Self::Reply,
            4 => Self::Refusal,
            5 => Self::Ping,
            6 => Self::Pong,
            7 => Self::Probe,
            8 => Self::Ack,
            _ => return None,
        })
    }
}

impl DatagramHead {
    /// A head that names nothing, of this kind.
    #[must_use]
    pub fn bare(kind: DatagramKind, connection: u64) -> Self {
        Self {
            kind,
            path: 0,
            len: 0,
            connection,
            number: 0,
            total: 0,
            offset: 0,
            length: 0,
            message: 0,
            key: 0,
            addr: 0,
        }
    }

    /// Its bytes, with a code of zeros.
    #[must_use]
    pub fn encode(&self) -> [u8; HEAD_LEN] {
        let mut out = [0; HEAD_LEN];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &MAGIC.to_le_bytes());
        put(2, &[VERSION, self.kind as u8]);
        put(4, &self.path.to_le_bytes());
        put(6, &self.len.to_le_bytes());
        put(8, &self.connection.to_le_bytes());
        put(16, &self.number.to_le_bytes());
        put(20, &self.total.to_le_bytes());
        put(24, &self.offset.to_le_bytes());
        put(28, &self.length.to_le_bytes());
        put(32, &self.message.to_le_bytes());
        put(40, &self.key.to_le_bytes());
        put(48, &self.addr.to_le_bytes());
        out
    }

    /// Reads a whole datagram: its head and its content. Its code is not looked at:
    /// [`DatagramKey::has_sealed`] does that.
    ///
    /// # Errors
    /// The bytes are none.
    pub fn decode(datagram: &[u8]) -> Result<(Self, &[u8]), DatagramError> {
        let mut reader = Reader::new(datagram);
        let magic = reader.u16_le()?;
        if magic != MAGIC {
            return Err(DatagramError::Magic(magic));
        }
        let version = reader.u8()?;
        if version != VERSION {
            return Err(DatagramError::Version(version));
        }
        let kind = reader.u8()?;
        let kind = DatagramKind::of(kind).ok_or(DatagramError::Kind(kind))?;
        let head = Self {
            kind,
            path: reader.u16_le()?,
            len: reader.u16_le()?,
            connection: reader.u64_le()?,
            number: reader.u32_le()?,
            total: reader.u32_le()?,
            offset: reader.u32_le()?,
            length: reader.u32_le()?,
            message: reader.u64_le()?,
            key: reader.u64_le()?,
            addr: reader.u64_le()?,
        };
        reader.take(CODE_LEN as u64)?;
        let (len, names) = (reader.remaining(), usize::from(head.len));
        let is_of_kind = kind != DatagramKind::Ack || names == ACK_LEN;
        if len != names || !is_of_kind {
            return Err(DatagramError::Length { len, names });
        }
        let content = reader.take(len as u64)?;
        let end = u64::from(head.offset) + u64::from(head.len);
        if kind != DatagramKind::Ack && end > head.total.into() {
            let Self { len, offset, total, .. } = head;
            return Err(DatagramError::Outside { len, offset, total });
        }
        Ok((head, content))
    }
}
