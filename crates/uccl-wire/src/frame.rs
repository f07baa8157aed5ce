//! Frames: the units of the byte stream between two lanes after their handshake.
//!
//! A frame is a 32-byte header, `descs` descriptors of 24 bytes, `len` bytes of payload and, for
//! frames with payload, an 8-byte trailer. All integers are little endian. Lanes with checksums
//! seal their headers and put another trailer behind the descriptors: see [`crate::checked`].
//!
//! The last frame of a write may carry a signal. Its flags name the change of the word, `aux` is
//! the value, and one more descriptor, which `descs` does not count, names the word.
//!
//! ```text
//! 0     1      2      4      8     16     24     32
//! +-----+------+------+------+-----+------+------+-- - --+-- - --+---------+
//! |kind |flags |descs |magic | op  | len  | aux  | descs |payload| trailer |
//! +-----+------+------+------+-----+------+------+-- - --+-- - --+---------+
//! ```

use crate::signal::{Change, SIGNAL_LEN};

/// Bytes of a frame header.
pub const HEADER_LEN: usize = 32;
/// Bytes of a descriptor.
pub const DESC_LEN: usize = 24;
/// Bytes of a trailer.
pub const TRAILER_LEN: usize = 8;
/// Most descriptors of a frame: as many as one vectored system call takes.
pub const MAX_DESCS: usize = 1024;
/// Longest payload of a frame. Longer operations are several frames, so that a cancel need not wait
/// for more than this and other frames get their turn.
pub const MAX_PAYLOAD: u64 = 4 << 20;
/// Longest payload of a [`Kind::Message`].
pub const MAX_MESSAGE: usize = 64 << 10;

const MAGIC: u32 = 0x7563_6C31;

/// The frame is the last of its operation.
const LAST: u8 = 1;
/// The trailer carries a checksum.
const CHECKED: u8 = 1 << 1;
/// The frame carries a signal.
const SIGNAL: u8 = 1 << 2;
/// The signal adds to its word; without this flag it sets the word.
const ADD: u8 = 1 << 3;

/// The kind of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Kind {
    /// Answers a write, a failed read or a fence; `aux` is a [`Status`].
    Ack = 4,
    /// The sender closes the lane.
    Bye = 9,
    /// Data for the read named `op`.
    Data = 3,
    /// Makes the lanes a connection: `aux` is the number of lanes.
    Establish = 10,
    /// Asks for an ack once everything before it on this lane has landed; cuts the write named
    /// `op`.
    Fence = 6,
    /// A message for the engine.
    Message = 5,
    /// Asks for a pong.
    Ping = 7,
    /// Answers a ping. A lane that receives nothing for a while sends it unasked.
    Pong = 8,
    /// Asks for the `aux` bytes that the descriptors name.
    Read = 2,
    /// The read named `op` is cancelled: one empty frame, the last, replaces the rest of its data.
    Stop = 11,
    /// Data for the memory that the descriptors name.
    Write = 1,
}

impl Kind {
    fn from_u8(v: u8) -> Option<Self> {
        Some(match v {
            1 => Self::Write,
            2 => Self::Read,
            3 => Self::Data,
            4 => Self::Ack,
            5 => Self::Message,
            6 => Self::Fence,
            7 => Self::Ping,
            8 => Self::Pong,
            9 => Self::Bye,
            10 => Self::Establish,
            11 => Self::Stop,
            _ => return None,
        })
    }

    /// Whether frames of this kind end in a trailer.
    pub fn has_trailer(self) -> bool {
        matches!(self, Self::Write | Self::Data | Self::Message)
    }
}

/// How an operation ended, by its code in frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Status {
    /// It was cut short by its sender.
    Cut = 7,
    /// The bytes that arrived are not those that were sent.
    Checksum = 4,
    /// The region does not allow this kind of access.
    Denied = 3,
    /// The memory is a GPU's, and this lane reaches host memory only.
    Device = 9,
    /// The memory could not be touched although it is registered.
    Fault = 6,
    /// All is well.
    Ok = 0,
    /// The range is not inside the region.
    OutOfBounds = 2,
    /// The lengths do not add up.
    Protocol = 8,
    /// No region has this key (any more).
    UnknownKey = 1,
}

impl Status {
    /// The status that this number stands for.
    pub fn from_u8(v: u8) -> Option<Self> {
        Some(match v {
            0 => Self::Ok,
            1 => Self::UnknownKey,
            2 => Self::OutOfBounds,
            3 => Self::Denied,
            4 => Self::Checksum,
            6 => Self::Fault,
            7 => Self::Cut,
            8 => Self::Protocol,
            9 => Self::Device,
            _ => return None,
        })
    }
}

/// Why bytes are not a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FrameError {
    /// Not this protocol, or the stream has lost its place.
    #[error("not a frame (magic {0:#010x})")]
    Magic(u32),
    /// A kind of frame that this version does not know.
    #[error("unknown kind of frame {0}")]
    Kind(u8),
    /// A status that this version does not know.
    #[error("unknown status {0}")]
    Status(u64),
    /// More descriptors than a frame may have, or descriptors where none belong.
    #[error("{0} descriptors do not belong in a {1:?} frame")]
    Descs(u16, Kind),
    /// More payload than a frame may have, or payload where none belongs.
    #[error("{0} bytes of payload do not belong in a {1:?} frame")]
    Len(u64, Kind),
    /// Flags that this version does not know, or that do not belong in such a frame.
    #[error("the flags {0:#06b} do not belong in a {1:?} frame")]
    Flags(u8, Kind),
    /// The word of a signal has another length than words have.
    #[error("a signal changes {SIGNAL_LEN} bytes, not {0}")]
    Word(u64),
    /// The descriptors do not add up to the payload.
    #[error("descriptors of {descs} bytes for {len} bytes of data")]
    Sum {
        /// The sum of the descriptors' lengths.
        descs: u64,
        /// The length in the header.
        len: u64,
    },
}

/// The start of every frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// The frame's kind.
    pub kind: Kind,
    /// This frame is the last of its operation.
    pub last: bool,
    /// The trailer carries a checksum.
    pub checked: bool,
    /// Descriptors that follow.
    pub descs: u16,
    /// The operation it belongs to, as its initiator numbers them.
    pub op: u64,
    /// Bytes of payload.
    pub len: u64,
    /// Its meaning depends on the kind. Zero if there is a signal, because its value takes the
    /// place.
    pub aux: u64,
    /// The change of a word of the receiver's once all bytes of the write are there.
    pub signal: Option<Change>,
}

impl Header {
    /// A frame without descriptors and payload.
    pub fn bare(kind: Kind, op: u64, aux: u64) -> Self {
        Self { kind, last: true, checked: false, descs: 0, op, len: 0, aux, signal: None }
    }

    /// The header's bytes.
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let mut out = [0; HEADER_LEN];
        let (change, aux) = match self.signal {
            None => (0, self.aux),
            Some(Change::Set(value)) => (SIGNAL, value),
            Some(Change::Add(value)) => (SIGNAL | ADD, value),
        };
        let flag = |is_set, flag| if is_set { flag } else { 0 };
        out[0] = self.kind as u8;
        out[1] = flag(self.last, LAST) | flag(self.checked, CHECKED) | change;
        out[2..4].copy_from_slice(&self.descs.to_le_bytes());
        out[4..8].copy_from_slice(&MAGIC.to_le_bytes());
        out[8..16].copy_from_slice(&self.op.to_le_bytes());
        out[16..24].copy_from_slice(&self.len.to_le_bytes());
        out[24..32].copy_from_slice(&aux.to_le_bytes());
        out
    }

    /// Reads a header and checks it against the rules of its kind.
    pub fn decode(bytes: &[u8; HEADER_LEN]) -> Result<Self, FrameError> {
        let magic = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
        if magic != MAGIC {
            return Err(FrameError::Magic(magic));
        }
        let kind = Kind::from_u8(bytes[0]).ok_or(FrameError::Kind(bytes[0]))?;
        let (flags, aux) = (bytes[1], u64_at(bytes, 24));
        let (aux, signal) = match flags & !(LAST | CHECKED) {
            0 => (aux, None),
            SIGNAL => (0, Some(Change::Set(aux))),
            change if change == SIGNAL | ADD => (0, Some(Change::Add(aux))),
            _ => return Err(FrameError::Flags(flags, kind)),
        };
        let last = flags & LAST != 0;
        // Not all bytes of the write are there before its last frame has come.
        if signal.is_some() && !(last && kind == Kind::Write) {
            return Err(FrameError::Flags(flags, kind));
        }
        let header = Self {
            kind,
            last,
            checked: flags & CHECKED != 0,
            descs: u16::from_le_bytes([bytes[2], bytes[3]]),
            op: u64_at(bytes, 8),
            len: u64_at(bytes, 16),
            aux,
            signal,
        };
        header.check()?;
        Ok(header)
    }

    fn check(&self) -> Result<(), FrameError> {
        let descs_max = if matches!(self.kind, Kind::Write | Kind::Read) { MAX_DESCS } else { 0 };
        if usize::from(self.descs) > descs_max {
            return Err(FrameError::Descs(self.descs, self.kind));
        }
        let len_max = match self.kind {
            Kind::Data | Kind::Write => MAX_PAYLOAD,
            Kind::Message => MAX_MESSAGE as u64,
            _ => 0,
        };
        if self.len > len_max {
            return Err(FrameError::Len(self.len, self.kind));
        }
        if self.kind == Kind::Ack && Status::from_u8_wide(self.aux).is_none() {
            return Err(FrameError::Status(self.aux));
        }
        Ok(())
    }

    /// Bytes of the descriptors behind the header, that of a signal's word included.
    pub fn descs_len(&self) -> usize {
        (usize::from(self.descs) + usize::from(self.signal.is_some())) * DESC_LEN
    }

    /// The status of an ack.
    pub fn status(&self) -> Status {
        Status::from_u8_wide(self.aux).unwrap_or(Status::Protocol)
    }
}

impl Status {
    fn from_u8_wide(v: u64) -> Option<Self> {
        u8::try_from(v).ok().and_then(Self::from_u8)
    }
}

/// A piece of the receiver's memory that a frame writes or reads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Desc {
    /// Address in the receiver's process.
    pub addr: u64,
    /// Low 40 bits: length in bytes.
    pub len: u64,
    /// The region's key.
    pub key: u64,
    /// The region's slot: travels in the top 24 bits of the length's word.
    pub slot: u32,
}

/// Longest piece that a descriptor can name.
pub const MAX_DESC_BYTES: u64 = (1 << 40) - 1;
/// Highest slot that a descriptor can name.
pub const MAX_SLOT: u32 = (1 << 24) - 1;

impl Desc {
    /// Appends the descriptor's bytes.
    pub fn encode_to(&self, out: &mut Vec<u8>) {
        let word = self.len & MAX_DESC_BYTES | u64::from(self.slot) << 40;
        out.extend_from_slice(&self.addr.to_le_bytes());
        out.extend_from_slice(&word.to_le_bytes());
        out.extend_from_slice(&self.key.to_le_bytes());
    }

    /// Reads a descriptor.
    pub fn decode(bytes: &[u8; DESC_LEN]) -> Self {
        let word = u64_at(bytes, 8);
        Self {
            addr: u64_at(bytes, 0),
            len: word & MAX_DESC_BYTES,
            slot: (word >> 40) as u32,
            key: u64_at(bytes, 16),
        }
    }
}

/// Reads the descriptors of `header` from `bytes`, which must be exactly theirs: those of its data
/// into `out`. Returns that of the word which its signal changes.
pub fn decode_descs(
    header: &Header,
    bytes: &[u8],
    out: &mut Vec<Desc>,
) -> Result<Option<Desc>, FrameError> {
    out.clear();
    let mut sum = 0u64;
    let mut descs = bytes.as_chunks::<DESC_LEN>().0.iter().map(Desc::decode);
    for desc in descs.by_ref().take(usize::from(header.descs)) {
        // 1024 lengths of 40 bits cannot overflow 64.
        sum += desc.len;
        out.push(desc);
    }
    let expected = if header.kind == Kind::Read { header.aux } else { header.len };
    if sum != expected || out.len() != usize::from(header.descs) {
        return Err(FrameError::Sum { descs: sum, len: expected });
    }
    if header.signal.is_none() {
        return Ok(None);
    }
    match descs.next() {
        Some(word) if word.len == SIGNAL_LEN => Ok(Some(word)),
        word => Err(FrameError::Word(word.map_or(0, |word| word.len))),
    }
}

/// The end of a frame with payload.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Trailer {
    /// CRC-32C of header, descriptors and payload, if the header's flag `checked` is set.
    pub crc: u32,
    /// Anything but ok means that the payload is filler: its source went away while it was sent.
    pub status: Status,
}

impl Trailer {
    /// The trailer's bytes.
    pub fn encode(&self) -> [u8; TRAILER_LEN] {
        let mut out = [0; TRAILER_LEN];
        out[..4].copy_from_slice(&self.crc.to_le_bytes());
        out[4] = self.status as u8;
        out
    }

    /// Reads a trailer.
    pub fn decode(bytes: &[u8; TRAILER_LEN]) -> Result<Self, FrameError> {
        let status = Status::from_u8(bytes[4]).ok_or(FrameError::Status(bytes[4].into()))?;
        Ok(Self { crc: u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]), status })
    }
}

fn u64_at<const N: usize>(bytes: &[u8; N], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn kinds() -> impl Strategy<Value = Kind> {
        (1u8..=11).prop_map(|v| Kind::from_u8(v).expect("1 to 11 are kinds"))
    }

    proptest! {
        #[test]
        fn headers_survive_the_wire(kind in kinds(), last: bool, checked: bool, op: u64, len in 0u64..64, aux: u64) {
            let data = matches!(kind, Kind::Data | Kind::Write | Kind::Message);
            let header = Header {
                kind, last, checked, op,
                descs: 0,
                len: if data { len } else { 0 },
                aux: if kind == Kind::Ack { aux % 5 } else { aux },
                signal: None,
            };
            prop_assert_eq!(Header::decode(&header.encode()), Ok(header));
        }

        #[test]
        fn signals_survive_the_wire(value: u64, add: bool, checked: bool, len in 0u64..64, slot in 0..=MAX_SLOT) {
            let signal = Some(if add { Change::Add(value) } else { Change::Set(value) });
            let header = Header { descs: 1, len, checked, signal, ..Header::bare(Kind::Write, 7, 0) };
            prop_assert_eq!(Header::decode(&header.encode()), Ok(header));
            let data = Desc { addr: 1, len, key: 2, slot };
            let word = Desc { addr: value, len: SIGNAL_LEN, key: value, slot };
            let (mut bytes, mut out) = (Vec::new(), Vec::new());
            [data, word].iter().for_each(|desc| desc.encode_to(&mut bytes));
            prop_assert_eq!(bytes.len(), header.descs_len());
            prop_assert_eq!(decode_descs(&header, &bytes, &mut out), Ok(Some(word)));
            prop_assert_eq!(out, vec![data]);
        }

        #[test]
        fn descs_survive_the_wire(addr: u64, len in 0..=MAX_DESC_BYTES, key: u64, slot in 0..=MAX_SLOT) {
            let desc = Desc { addr, len, key, slot };
            let mut bytes = Vec::new();
            desc.encode_to(&mut bytes);
            let array: [u8; DESC_LEN] = bytes.try_into().expect("one descriptor");
            prop_assert_eq!(Desc::decode(&array), desc);
        }

        #[test]
        fn a_header_of_any_bytes_is_refused_or_within_bounds(mut bytes: [u8; HEADER_LEN], ours: bool) {
            if ours {
                bytes[4..8].copy_from_slice(&MAGIC.to_le_bytes());
            }
            if let Ok(header) = Header::decode(&bytes) {
                prop_assert!(header.len <= MAX_PAYLOAD);
                prop_assert!(usize::from(header.descs) <= MAX_DESCS);
            }
        }
    }

    #[test]
    fn descs_that_do_not_add_up_are_refused() {
        let header = Header { descs: 1, len: 9, ..Header::bare(Kind::Write, 1, 0) };
        let mut bytes = Vec::new();
        Desc { addr: 1, len: 8, key: 2, slot: 3 }.encode_to(&mut bytes);
        let mut out = Vec::new();
        assert_eq!(
            decode_descs(&header, &bytes, &mut out),
            Err(FrameError::Sum { descs: 8, len: 9 })
        );
        // Neither less nor more. The same holds for a read, which has its length in `aux`.
        for (said, sound) in [(7, false), (8, true), (9, false)] {
            for header in [
                Header { len: said, ..header },
                Header { descs: 1, ..Header::bare(Kind::Read, 1, said) },
            ] {
                let sum = Err(FrameError::Sum { descs: 8, len: said });
                let want = if sound { Ok(None) } else { sum };
                assert_eq!(decode_descs(&header, &bytes, &mut out), want, "{header:?}");
            }
        }
    }

    #[test]
    fn only_the_last_frame_of_a_write_carries_a_signal() {
        for kind in (1u8..=11).map(|v| Kind::from_u8(v).expect("1 to 11 are kinds")) {
            for last in [false, true] {
                let signal = Some(Change::Add(1));
                let header = Header { last, signal, ..Header::bare(kind, 1, 0) };
                let read = Header::decode(&header.encode());
                if kind == Kind::Write && last {
                    assert_eq!(read, Ok(header));
                } else {
                    assert!(
                        matches!(read, Err(FrameError::Flags(..))),
                        "{kind:?} {last}: {read:?}"
                    );
                }
            }
        }
        // Flags without a meaning.
        let mut bytes = Header::bare(Kind::Write, 1, 0).encode();
        for change in [ADD, 1 << 4, SIGNAL | 1 << 7] {
            bytes[1] = LAST | change;
            let refused = FrameError::Flags(bytes[1], Kind::Write);
            assert_eq!(Header::decode(&bytes), Err(refused));
        }
    }

    #[test]
    fn a_signal_changes_one_word_and_no_more() {
        let signal = Some(Change::Set(5));
        let header = Header { signal, ..Header::bare(Kind::Write, 1, 0) };
        let mut out = Vec::new();
        for len in [0, 4, 7, 9, 1 << 30] {
            let mut bytes = Vec::new();
            Desc { addr: 8, len, key: 2, slot: 3 }.encode_to(&mut bytes);
            assert_eq!(decode_descs(&header, &bytes, &mut out), Err(FrameError::Word(len)));
        }
        assert_eq!(decode_descs(&header, &[], &mut out), Err(FrameError::Word(0)));
    }

    #[test]
    fn a_header_says_no_more_than_its_kind_allows() {
        let all = (1u8..=11).map(|v| Kind::from_u8(v).expect("1 to 11 are kinds"));
        for kind in all {
            let most = match kind {
                Kind::Write | Kind::Data => MAX_PAYLOAD,
                Kind::Message => MAX_MESSAGE as u64,
                _ => 0,
            };
            for (len, sound) in [(most, true), (most + 1, false), (u64::MAX, false)] {
                let header = Header { len, ..Header::bare(kind, 1, 0) };
                let want = if sound { Ok(header) } else { Err(FrameError::Len(len, kind)) };
                assert_eq!(Header::decode(&header.encode()), want);
            }
            let most = match kind {
                Kind::Write | Kind::Read => MAX_DESCS as u16,
                _ => 0,
            };
            for (descs, sound) in [(most, true), (most + 1, false), (u16::MAX, false)] {
                let header = Header { descs, ..Header::bare(kind, 1, 0) };
                let want = if sound { Ok(header) } else { Err(FrameError::Descs(descs, kind)) };
                assert_eq!(Header::decode(&header.encode()), want);
            }
        }
    }

    #[test]
    fn an_ack_has_a_status_that_there_is() {
        for status in 0..=u8::MAX {
            let header = Header::bare(Kind::Ack, 1, status.into());
            let known = Status::from_u8(status).map(|_| header);
            let want = known.ok_or(FrameError::Status(status.into()));
            assert_eq!(Header::decode(&header.encode()), want);
        }
        // The whole number counts, not its lowest byte alone.
        for status in [256, 1 << 32, u64::MAX] {
            let header = Header::bare(Kind::Ack, 1, status);
            assert_eq!(Header::decode(&header.encode()), Err(FrameError::Status(status)));
        }
    }
}
