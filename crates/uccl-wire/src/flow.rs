//! Flows: the handle of a listener, the greeting of a stream, and the head of each frame.
//!
//! All numbers are little endian.
//!
//! A [`Handle`] has [`HANDLE_LEN`] bytes:
//!
//! | offset | type | field |
//! | --- | --- | --- |
//! | 0 | 4 B | `UFLH` |
//! | 4 | u8 | version |
//! | 5 | u8 | number of addresses |
//! | 6 | u16 | device |
//! | 8 | u16 | port of all addresses |
//! | 10 | 6 B | zeros |
//! | 16 | u64 | instance: names the process |
//! | 24 | 16 B | nonce: names the listener |
//! | 40 | 16 B | network: the kernel and its network namespace |
//! | 56 | 64 B | addresses, each a byte 4 or 6 and its bytes; then zeros |
//!
//! A [`FlowHello`] has [`HELLO_LEN`] bytes and opens a stream, a [`FlowWelcome`] of
//! [`WELCOME_LEN`] bytes answers it:
//!
//! | offset | type | field of the hello | type | field of the welcome |
//! | --- | --- | --- | --- | --- |
//! | 0 | 4 B | `UFLO` | 4 B | `UFLW` |
//! | 4 | u8 | version | u8 | version |
//! | 5 | u8 | purpose | u8 | status |
//! | 6 | u16 | zero | u16 | zero |
//! | 8 | 16 B | key: the listener's nonce, or the key of an earlier welcome | 16 B | key for streams that follow |
//! | 24 | u64 | instance of the connecting process | u64 | instance of the listening process |
//! | 32 | u64 | flow, or the number of a stream | u64 | bytes of its own stream that the flow has received |
//! | 40 | u64 | bytes of a chunk, or the round | u64 | zero |
//!
//! A [`FlowHead`] has [`HEAD_LEN`] bytes: kind (u8), three zeros, tag (u32), flow, message, total,
//! offset and length (u64 each).

pub mod greeting;

use std::net::{IpAddr, SocketAddr};

use crate::cursor::{Reader, ShortInput};

/// Bytes of a [`Handle`]. NCCL has 128, so 8 are left for its user.
pub const HANDLE_LEN: usize = 120;
/// Bytes of a [`FlowHello`].
pub const HELLO_LEN: usize = 48;
/// Bytes of a [`FlowWelcome`].
pub const WELCOME_LEN: usize = 48;
/// Bytes of a [`FlowHead`].
pub const HEAD_LEN: usize = 48;

const HANDLE_MAGIC: [u8; 4] = *b"UFLH";
const HELLO_MAGIC: [u8; 4] = *b"UFLO";
const WELCOME_MAGIC: [u8; 4] = *b"UFLW";
const VERSION: u8 = 2;
const ADDRESSES_LEN: usize = 64;

/// Why bytes are not one of these layouts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FlowWireError {
    /// They end too early.
    #[error(transparent)]
    Truncated(#[from] ShortInput),
    /// They begin with another mark.
    #[error("the mark is {0:02x?}, which is not this layout's")]
    Magic([u8; 4]),
    /// They are of another version.
    #[error("version {0} of flows; this side speaks version {VERSION}")]
    Version(u8),
    /// A byte that names one of several things names none of them.
    #[error("{field} cannot be {value}")]
    Value {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// More addresses than there is room for.
    #[error("{0} addresses do not fit into a handle")]
    Addresses(usize),
}

/// The name of a listener, for a process that connects to it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Handle {
    /// The device, by its number at the listener.
    pub device: u16,
    /// The process.
    pub instance: u64,
    /// The listener.
    pub nonce: [u8; 16],
    /// The kernel and the network namespace; all zeros if unknown.
    pub network: [u8; 16],
    /// Where to reach it, the best first.
    pub addrs: Vec<IpAddr>,
    /// The port of all addresses.
    pub port: u16,
}

impl Handle {
    /// The first addresses of a list that fit into a handle.
    #[must_use]
    pub fn fitting(addrs: &[IpAddr]) -> Vec<IpAddr> {
        let mut left = ADDRESSES_LEN;
        let mut fits = |addr: &&IpAddr| {
            let len = address_len(addr);
            let is_fit = len <= left;
            left -= if is_fit { len } else { 0 };
            is_fit
        };
        addrs.iter().filter(&mut fits).copied().collect()
    }

    /// The addresses with their port.
    pub fn sockets(&self) -> impl Iterator<Item = SocketAddr> + '_ {
        self.addrs.iter().map(|ip| SocketAddr::new(*ip, self.port))
    }

    /// The handle's bytes.
    ///
    /// # Errors
    /// When its addresses need more than 64 bytes.
    pub fn encode(&self) -> Result<[u8; HANDLE_LEN], FlowWireError> {
        let refused = FlowWireError::Addresses(self.addrs.len());
        let len: usize = self.addrs.iter().map(address_len).sum();
        if len > ADDRESSES_LEN {
            return Err(refused);
        }
        let mut out = Vec::with_capacity(HANDLE_LEN);
        out.extend(HANDLE_MAGIC);
        out.extend([VERSION, self.addrs.len() as u8]);
        out.extend(self.device.to_le_bytes());
        out.extend(self.port.to_le_bytes());
        out.extend([0; 6]);
        out.extend(self.instance.to_le_bytes());
        out.extend(self.nonce);
        out.extend(self.network);
        for addr in &self.addrs {
            match addr {
                IpAddr::V4(ip) => {
                    out.push(4);
                    out.extend(ip.octets());
                }
                IpAddr::V6(ip) => {
                    out.push(6);
                    out.extend(ip.octets());
                }
            }
        }
        out.resize(HANDLE_LEN, 0);
        out.try_into().map_err(|_| refused)
    }

    /// Reads a handle; bytes behind it are left alone.
    ///
    /// # Errors
    /// When the bytes are not one.
    pub fn decode(bytes: &[u8]) -> Result<Self, FlowWireError> {
        let mut reader = Reader::new(bytes);
        check_mark(&mut reader, HANDLE_MAGIC)?;
        let count = reader.u8()?;
        let device = reader.u16_le()?;
        let port = reader.u16_le()?;
        check_zeros(&reader.array::<6>()?)?;
        let instance = reader.u64_le()?;
        let nonce = reader.array()?;
        let network = reader.array()?;
        let places = reader.array::<ADDRESSES_LEN>()?;
        let mut places = Reader::new(&places);
        let addrs = (0..count).map(|_| address(&mut places)).collect::<Result<Vec<_>, _>>()?;
        check_zeros(places.take(places.remaining() as u64)?)?;
        Ok(Self { device, instance, nonce, network, addrs, port })
    }
}

fn address_len(addr: &IpAddr) -> usize {
    if addr.is_ipv4() { 5 } else { 17 }
}

fn address(reader: &mut Reader<'_>) -> Result<IpAddr, FlowWireError> {
    match reader.u8()? {
        4 => Ok(reader.array::<4>()?.into()),
        6 => Ok(reader.array::<16>()?.into()),
        family => Err(FlowWireError::Value { field: "family", value: family.into() }),
    }
}

fn check_mark(reader: &mut Reader<'_>, mark: [u8; 4]) -> Result<(), FlowWireError> {
    let found = reader.array()?;
    if found != mark {
        return Err(FlowWireError::Magic(found));
    }
    match reader.u8()? {
        VERSION => Ok(()),
        other => Err(FlowWireError::Version(other)),
    }
}

fn check_zeros(bytes: &[u8]) -> Result<(), FlowWireError> {
    match bytes.iter().find(|byte| **byte != 0) {
        None => Ok(()),
        Some(byte) => Err(FlowWireError::Value { field: "padding", value: (*byte).into() }),
    }
}

/// The use of a stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Purpose {
    /// The own stream of a new flow.
    Flow,
    /// The own stream of a flow that has lost its stream.
    Resume,
    /// A stream for the chunks of all flows between two processes.
    Bulk,
}

/// The first bytes of a stream, from the side that connects.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FlowHello {
    /// The use of the stream.
    pub purpose: Purpose,
    /// The listener's nonce for a new flow, else the key that an earlier welcome gave.
    pub key: [u8; 16],
    /// The process that connects.
    pub instance: u64,
    /// The flow; for [`Purpose::Bulk`] the number of the stream among those of its process.
    pub flow: u64,
    /// Bytes of a chunk of a large message. For [`Purpose::Resume`] the round: a number that grows
    /// with each greeting, so that one that was held up does not take the place of a later one.
    pub chunk_len: u64,
}

impl FlowHello {
    /// The greeting's bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; HELLO_LEN] {
        let purpose = match self.purpose {
            Purpose::Flow => 0,
            Purpose::Resume => 1,
            Purpose::Bulk => 2,
        };
        let mut out = [0; HELLO_LEN];
        out[..4].copy_from_slice(&HELLO_MAGIC);
        out[4] = VERSION;
        out[5] = purpose;
        out[8..24].copy_from_slice(&self.key);
        out[24..32].copy_from_slice(&self.instance.to_le_bytes());
        out[32..40].copy_from_slice(&self.flow.to_le_bytes());
        out[40..].copy_from_slice(&self.chunk_len.to_le_bytes());
        out
    }

    /// Reads a greeting.
    ///
    /// # Errors
    /// When the bytes are not one.
    pub fn decode(bytes: &[u8; HELLO_LEN]) -> Result<Self, FlowWireError> {
        let mut reader = Reader::new(bytes);
        check_mark(&mut reader, HELLO_MAGIC)?;
        let purpose = match reader.u8()? {
            0 => Purpose::Flow,
            1 => Purpose::Resume,
            2 => Purpose::Bulk,
            value => return Err(FlowWireError::Value { field: "purpose", value: value.into() }),
        };
        check_zeros(&reader.array::<2>()?)?;
        let (key, instance) = (reader.array()?, reader.u64_le()?);
        let (flow, chunk_len) = (reader.u64_le()?, reader.u64_le()?);
        Ok(Self { purpose, key, instance, flow, chunk_len })
    }
}

/// How a greeting is answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Status {
    /// The stream is taken.
    Taken,
    /// Nobody has that key: another process, or a listener that is closed.
    UnknownKey,
    /// The flow is not known, or ended.
    UnknownFlow,
    /// As many streams as there may be wait already.
    Full,
    /// One of the two processes has a pre-shared key, and the other has none.
    NeedsSecret,
}

/// The answer to a greeting.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FlowWelcome {
    /// Whether the stream is taken.
    pub status: Status,
    /// The key of streams that follow.
    pub key: [u8; 16],
    /// The process that answers.
    pub instance: u64,
    /// Bytes of its own streams that the flow has received, for [`Purpose::Resume`]: the new stream
    /// begins with the next one.
    pub received: u64,
}

impl FlowWelcome {
    /// The answer's bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; WELCOME_LEN] {
        let status = match self.status {
            Status::Taken => 0,
            Status::UnknownKey => 1,
            Status::UnknownFlow => 2,
            Status::Full => 3,
            Status::NeedsSecret => 4,
        };
        let mut out = [0; WELCOME_LEN];
        out[..4].copy_from_slice(&WELCOME_MAGIC);
        out[4] = VERSION;
        out[5] = status;
        out[8..24].copy_from_slice(&self.key);
        out[24..32].copy_from_slice(&self.instance.to_le_bytes());
        out[32..40].copy_from_slice(&self.received.to_le_bytes());
        out
    }

    /// Reads an answer.
    ///
    /// # Errors
    /// When the bytes are not one.
    pub fn decode(bytes: &[u8; WELCOME_LEN]) -> Result<Self, FlowWireError> {
        let mut reader = Reader::new(bytes);
        check_mark(&mut reader, WELCOME_MAGIC)?;
        let status = match reader.u8()? {
            0 => Status::Taken,
            1 => Status::UnknownKey,
            2 => Status::UnknownFlow,
            3 => Status::Full,
            4 => Status::NeedsSecret,
            value => return Err(FlowWireError::Value { field: "status", value: value.into() }),
        };
        check_zeros(&reader.array::<2>()?)?;
        let (key, instance) = (reader.array()?, reader.u64_le()?);
        let received = reader.u64_le()?;
        check_zeros(&reader.array::<8>()?)?;
        Ok(Self { status, key, instance, received })
    }
}

/// The kind of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HeadKind {
    /// A whole message on the flow's own stream; `len` bytes follow, as many as `total`.
    Message,
    /// A part of a message on a stream for chunks; `len` bytes follow.
    Chunk,
    /// So many bytes (own stream, over all streams that it has had) or chunks (stream for chunks)
    /// have come: `message`.
    Ack,
    /// So many receives of the flow have been posted: `message`.
    Posted,
    /// No more follows: the flow is closed. On a stream for chunks it answers a
    /// [`HeadKind::Sent`].
    End,
    /// Asks for an acknowledgement on the same stream, so that both ends know of each other.
    Ping,
    /// So many bytes have been sent on the own stream of the flow: `message`. Asks for a
    /// [`HeadKind::Received`] on the same stream for chunks.
    Sent,
    /// So many bytes of the own stream of the flow have come: `message`. The tag is 1 if its user
    /// has looked for more since the last answer, else 0.
    Received,
    /// A ring in shared memory for messages of the flow, in the own stream: the sender's process
    /// and descriptor are the halves of `message`, its token is in the place of `flow`.
    Ring,
}

/// The head of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FlowHead {
    /// The kind.
    pub kind: HeadKind,
    /// The sender's tag.
    pub tag: u32,
    /// The flow.
    pub flow: u64,
    /// The number of the message in its flow, from 0.
    pub message: u64,
    /// Bytes of the message.
    pub total: u64,
    /// The place of the bytes in the message.
    pub offset: u64,
    /// Bytes that follow.
    pub len: u64,
}

impl FlowHead {
    /// A head without payload.
    #[must_use]
    pub fn note(kind: HeadKind, flow: u64, message: u64) -> Self {
        Self { kind, tag: 0, flow, message, total: 0, offset: 0, len: 0 }
    }

    /// The head's bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; HEAD_LEN] {
        let mut out = [0; HEAD_LEN];
        out[0] = match self.kind {
            HeadKind::Message => 1,
            HeadKind::Chunk => 2,
            HeadKind::Ack => 3,
            HeadKind::Posted => 4,
            HeadKind::End => 5,
            HeadKind::Ping => 6,
            HeadKind::Sent => 7,
            HeadKind::Received => 8,
            HeadKind::Ring => 9,
        };
        out[4..8].copy_from_slice(&self.tag.to_le_bytes());
        let numbers = [self.flow, self.message, self.total, self.offset, self.len];
        for (place, number) in out[8..].chunks_exact_mut(8).zip(numbers) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        out
    }

    /// Reads a head. The part that it names is known to lie in its message, and notes to have no
    /// payload.
    ///
    /// # Errors
    /// When the bytes are not one.
    pub fn decode(bytes: &[u8; HEAD_LEN]) -> Result<Self, FlowWireError> {
        let mut reader = Reader::new(bytes);
        let kind = match reader.u8()? {
            1 => HeadKind::Message,
            2 => HeadKind::Chunk,
            3 => HeadKind::Ack,
            4 => HeadKind::Posted,
            5 => HeadKind::End,
            6 => HeadKind::Ping,
            7 => HeadKind::Sent,
            8 => HeadKind::Received,
            9 => HeadKind::Ring,
            value => return Err(FlowWireError::Value { field: "kind", value: value.into() }),
        };
        check_zeros(&reader.array::<3>()?)?;
        let tag = reader.u32_le()?;
        let (flow, message, total) = (reader.u64_le()?, reader.u64_le()?, reader.u64_le()?);
        let (offset, len) = (reader.u64_le()?, reader.u64_le()?);
        let head = Self { kind, tag, flow, message, total, offset, len };
        let is_sound = match kind {
            HeadKind::Message => offset == 0 && len == total,
            HeadKind::Chunk => len > 0 && offset.checked_add(len).is_some_and(|end| end <= total),
            HeadKind::Received => tag <= 1 && total == 0 && offset == 0 && len == 0,
            HeadKind::Ack
            | HeadKind::Posted
            | HeadKind::End
            | HeadKind::Ping
            | HeadKind::Sent
            | HeadKind::Ring => tag == 0 && total == 0 && offset == 0 && len == 0,
        };
        if is_sound { Ok(head) } else { Err(FlowWireError::Value { field: "length", value: len }) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn handle(addrs: Vec<IpAddr>) -> Handle {
        Handle { device: 3, instance: 77, nonce: [1; 16], network: [2; 16], addrs, port: 4711 }
    }

    proptest! {
        #[test]
        fn handles_survive_the_wire(four: Vec<[u8; 4]>, six: Vec<[u8; 16]>) {
            let all: Vec<IpAddr> =
                six.into_iter().map(Into::into).chain(four.into_iter().map(Into::into)).collect();
            let handle = handle(Handle::fitting(&all));
            let bytes = handle.encode().expect("it fits");
            prop_assert_eq!(Handle::decode(&bytes), Ok(handle));
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 120)) {
            if let Ok(handle) = Handle::decode(&bytes) {
                prop_assert_eq!(handle.encode().map(Vec::from), Ok(bytes.clone()));
            }
            let head = bytes.first_chunk().expect("long enough");
            if let Ok(found) = FlowHead::decode(head) {
                prop_assert_eq!(&found.encode(), head);
            }
        }
    }

    #[test]
    fn more_addresses_than_fit_are_refused() {
        let many: Vec<IpAddr> = (0..5u8).map(|byte| [byte; 16].into()).collect();
        assert_eq!(Handle::fitting(&many).len(), 3);
        assert_eq!(handle(many).encode(), Err(FlowWireError::Addresses(5)));
    }

    #[test]
    fn a_part_past_its_message_is_refused() {
        let head = FlowHead {
            kind: HeadKind::Chunk,
            tag: 1,
            flow: 2,
            message: 3,
            total: 100,
            offset: 60,
            len: 40,
        };
        assert_eq!(FlowHead::decode(&head.encode()), Ok(head));
        for wrong in [
            FlowHead { len: 41, ..head },
            FlowHead { offset: u64::MAX, ..head },
            FlowHead { len: 0, ..head },
            FlowHead { kind: HeadKind::Message, ..head },
            FlowHead { kind: HeadKind::Ack, ..head },
            FlowHead { tag: 2, ..FlowHead::note(HeadKind::Received, 2, 3) },
            FlowHead { tag: 1, ..FlowHead::note(HeadKind::Ring, 2, 3) },
            FlowHead { offset: 1, ..FlowHead::note(HeadKind::Ring, 2, 3) },
        ] {
            assert!(FlowHead::decode(&wrong.encode()).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn greetings_survive_the_wire() {
        for purpose in [Purpose::Flow, Purpose::Resume, Purpose::Bulk] {
            let hello = FlowHello { purpose, key: [9; 16], instance: 1, flow: 2, chunk_len: 3 };
            assert_eq!(FlowHello::decode(&hello.encode()), Ok(hello));
        }
        use Status::{Full, NeedsSecret, Taken, UnknownFlow, UnknownKey};
        for status in [Taken, UnknownKey, UnknownFlow, Full, NeedsSecret] {
            let welcome = FlowWelcome { status, key: [7; 16], instance: 5, received: 6 };
            assert_eq!(FlowWelcome::decode(&welcome.encode()), Ok(welcome));
        }
        let mut stranger = [0; HELLO_LEN];
        stranger[..4].copy_from_slice(b"GET ");
        assert_eq!(FlowHello::decode(&stranger), Err(FlowWireError::Magic(*b"GET ")));
    }
}
