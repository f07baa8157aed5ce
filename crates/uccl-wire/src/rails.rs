//! Notes between two ends of a multipath link: their rails, the start and end of a channel over a
//! pair of rails, and the keys of memory.
//!
//! These notes travel inside [`Message::Link`](crate::message::Message::Link), in order and without
//! loss. A *path* is a pair of rails, one of each end, numbered by the end that connected; an
//! *attempt* numbers the channels that are made over it, one after the other.

use crate::{
    cursor::{Reader, ShortInput},
    frame::Status,
};

/// Most rails of an endpoint, and most paths of a connection.
pub const MAX_RAILS: usize = 64;
/// Longest name of a rail, a link or a network, in bytes.
pub const MAX_NAME: usize = 128;
/// Longest address of a channel, in bytes.
pub const MAX_ADDRESS: usize = 1024;
/// Longest key of a region, in bytes.
pub const MAX_KEY: usize = 256;
/// Longest reason, in bytes. A longer one is cut.
pub const MAX_REASON: usize = 512;
/// Most pieces that pass through a landing chunk together.
pub const MAX_STAGED: usize = 128;

/// The region by which a [`Note::Ask`] names its hearer's landing area: locked host memory cut into
/// chunks, through which the asker reaches memory that no rail reaches. No region has such a slot.
pub const LANDING: RegionId = RegionId { slot: u32::MAX, key: 0 };
/// Bytes of a chunk of a landing area.
pub const LANDING_CHUNK: usize = 512 << 10;

/// A rail as it is described to the peer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RailOffer {
    /// Its name, for people.
    pub name: String,
    /// Its link: rails of one link can be joined.
    pub link: String,
    /// Its network: rails of one network are joined first. May be empty.
    pub network: String,
}

/// Names a channel.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct PathId {
    /// The path.
    pub path: u16,
    /// The attempt at it.
    pub attempt: u32,
}

/// Names a region.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RegionId {
    /// Its slot in its owner's table.
    pub slot: u32,
    /// Its random key there.
    pub key: u64,
}

/// A peer's means to reach a region over one path.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PathKey {
    /// Over which channel.
    pub id: PathId,
    /// The address of the region's first byte there.
    pub base: u64,
    /// The region's key there.
    pub key: Vec<u8>,
}

/// A peer's rights to a region, and the paths to it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Grant {
    /// Address of the region's first byte in its owner's process.
    pub addr: u64,
    /// Its length in bytes.
    pub len: u64,
    /// It may be read.
    pub read: bool,
    /// It may be written.
    pub write: bool,
    /// No channel reaches it, but its owner copies between it and its [landing area](LANDING).
    pub staged: bool,
    /// The channels it can be reached over.
    pub paths: Vec<PathKey>,
}

/// A piece of the hearer's memory that a chunk of its landing area is copied to or from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StagedPiece {
    /// Its region.
    pub region: RegionId,
    /// Where it is in its owner's process.
    pub addr: u64,
    /// Its length in bytes.
    pub len: u32,
}

/// One of these notes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Note {
    /// The rails of its sender. The connecting end sends it first, and the other answers with its
    /// own.
    Offer(Vec<RailOffer>),
    /// The connecting end has made its end of a channel.
    Open {
        /// The channel.
        id: PathId,
        /// Which of the hearer's rails it is for, in the order in which they were offered.
        rail: u16,
        /// Where the sender's end is.
        address: Vec<u8>,
    },
    /// The other end is made, and joined.
    Opened {
        /// The channel.
        id: PathId,
        /// Where the sender's end is.
        address: Vec<u8>,
    },
    /// There will be no other end.
    Refused {
        /// The channel.
        id: PathId,
        /// Why, for people.
        why: String,
    },
    /// The channel works: it may be posted to.
    Ready(PathId),
    /// The sender's end of the channel is gone: nothing that is sent on it lands in the sender's
    /// memory any more. The answer is the same note.
    Down(PathId),
    /// The connecting end has tried every path once.
    Settled,
    /// Asks for the rights and paths to a region.
    Ask(RegionId),
    /// Grants a region: its range, rights and paths.
    Grant(RegionId, Grant),
    /// Denies a region, with the reason.
    Deny(RegionId, Status),
    /// The region ends. The hearer answers with [`Note::Released`] once it has no operation there
    /// any more.
    Revoke(RegionId),
    /// The sender of this note has no operation on the region any more.
    Released(RegionId),
    /// Copy between these pieces and the start of a chunk of your landing area, one behind the
    /// other.
    Stage {
        /// Which chunk. It is the sender's until the note of its end arrives.
        chunk: u16,
        /// From the chunk to the pieces; else from the pieces to the chunk.
        write: bool,
        /// At most [`MAX_STAGED`].
        pieces: Vec<StagedPiece>,
    },
    /// The copy of a chunk has ended.
    Staged {
        /// Which chunk.
        chunk: u16,
        /// Whether all of it was copied, or why not.
        status: Status,
    },
}

/// Why bytes are no note.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NoteError {
    /// It ends early.
    #[error(transparent)]
    Truncated(#[from] ShortInput),
    /// It has bytes after its end.
    #[error("{0} bytes follow the end")]
    Trailing(usize),
    /// A kind that this version does not know.
    #[error("unknown kind of note {0}")]
    Kind(u8),
    /// More of something than there may be.
    #[error("{count} {what} are more than {most}")]
    TooMany {
        /// The counted items.
        what: &'static str,
        /// How many.
        count: usize,
        /// The most.
        most: usize,
    },
    /// A name or reason that is not UTF-8.
    #[error("a text is not UTF-8")]
    Text,
    /// Rights, or a status, that this version does not know.
    #[error("unknown code {0}")]
    Code(u8),
    /// A region that runs past the end of the address space.
    #[error("{len} bytes at {addr:#x} run past the end of the address space")]
    Range {
        /// Where it starts.
        addr: u64,
        /// How long it is.
        len: u64,
    },
}

const OFFER: u8 = 1;
const OPEN: u8 = 2;
const OPENED: u8 = 3;
const REFUSED: u8 = 4;
const READY: u8 = 5;
const DOWN: u8 = 6;
const SETTLED: u8 = 7;
const ASK: u8 = 8;
const GRANT: u8 = 9;
const DENY: u8 = 10;
const REVOKE: u8 = 11;
const RELEASED: u8 = 12;
const STAGE: u8 = 13;
const STAGED: u8 = 14;

const MAY_READ: u8 = 1;
const MAY_WRITE: u8 = 2;
const IS_STAGED: u8 = 4;

impl Note {
    /// Appends its bytes. Texts, addresses and keys are within the limits above; a reason is cut to
    /// them.
    pub fn encode_to(&self, out: &mut Vec<u8>) {
        match self {
            Self::Offer(rails) => {
                out.push(OFFER);
                put_u16(rails.len(), out);
                for rail in rails {
                    [&rail.name, &rail.link, &rail.network]
                        .iter()
                        .for_each(|text| put_bytes(text.as_bytes(), out));
                }
            }
            Self::Open { id, rail, address } => {
                start(OPEN, *id, out);
                put_u16(usize::from(*rail), out);
                put_bytes(address, out);
            }
            Self::Opened { id, address } => {
                start(OPENED, *id, out);
                put_bytes(address, out);
            }
            Self::Refused { id, why } => {
                start(REFUSED, *id, out);
                let end =
                    (0..=why.len().min(MAX_REASON)).rev().find(|at| why.is_char_boundary(*at));
                put_bytes(&why.as_bytes()[..end.unwrap_or(0)], out);
            }
            Self::Ready(id) => start(READY, *id, out),
            Self::Down(id) => start(DOWN, *id, out),
            Self::Settled => out.push(SETTLED),
            Self::Ask(region) => about(ASK, *region, out),
            Self::Grant(region, grant) => {
                about(GRANT, *region, out);
                grant.encode_to(out);
            }
            Self::Deny(region, status) => {
                about(DENY, *region, out);
                out.push(*status as u8);
            }
            Self::Revoke(region) => about(REVOKE, *region, out),
            Self::Released(region) => about(RELEASED, *region, out),
            Self::Stage { chunk, write, pieces } => {
                out.push(STAGE);
                put_u16(usize::from(*chunk), out);
                out.push(u8::from(*write));
                put_u16(pieces.len(), out);
                pieces.iter().for_each(|piece| piece.encode_to(out));
            }
            Self::Staged { chunk, status } => {
                out.push(STAGED);
                put_u16(usize::from(*chunk), out);
                out.push(*status as u8);
            }
        }
    }

    /// Reads one note that is all of `bytes`.
    ///
    /// # Errors
    /// When they are none, or exceed a limit.
    pub fn decode(bytes: &[u8]) -> Result<Self, NoteError> {
        let mut r = Reader::new(bytes);
        let note = match r.u8()? {
            OFFER => {
                let rails = count(&mut r, "rails", MAX_RAILS)?;
                Self::Offer(
                    (0..rails).map(|_| RailOffer::decode(&mut r)).collect::<Result<_, _>>()?,
                )
            }
            OPEN => {
                let (id, rail) = (path_id(&mut r)?, r.u16_le()?);
                Self::Open {
                    id,
                    rail,
                    address: bytes_of(&mut r, "bytes of an address", MAX_ADDRESS)?,
                }
            }
            OPENED => {
                let id = path_id(&mut r)?;
                Self::Opened { id, address: bytes_of(&mut r, "bytes of an address", MAX_ADDRESS)? }
            }
            REFUSED => Self::Refused { id: path_id(&mut r)?, why: text(&mut r, MAX_REASON)? },
            READY => Self::Ready(path_id(&mut r)?),
            DOWN => Self::Down(path_id(&mut r)?),
            SETTLED => Self::Settled,
            ASK => Self::Ask(region_id(&mut r)?),
            GRANT => Self::Grant(region_id(&mut r)?, Grant::decode(&mut r)?),
            DENY => {
                let (region, status) = (region_id(&mut r)?, status(&mut r)?);
                if status == Status::Ok {
                    return Err(NoteError::Code(status as u8));
                }
                Self::Deny(region, status)
            }
            REVOKE => Self::Revoke(region_id(&mut r)?),
            RELEASED => Self::Released(region_id(&mut r)?),
            STAGE => {
                let (chunk, write) = (r.u16_le()?, r.u8()?);
                if write > 1 {
                    return Err(NoteError::Code(write));
                }
                let pieces = count(&mut r, "staged pieces", MAX_STAGED)?;
                let pieces = (0..pieces).map(|_| StagedPiece::decode(&mut r));
                let pieces = pieces.collect::<Result<_, _>>()?;
                Self::Stage { chunk, write: write == 1, pieces }
            }
            STAGED => Self::Staged { chunk: r.u16_le()?, status: status(&mut r)? },
            other => return Err(NoteError::Kind(other)),
        };
        match r.remaining() {
            0 => Ok(note),
            left => Err(NoteError::Trailing(left)),
        }
    }
}

impl RailOffer {
    fn decode(r: &mut Reader<'_>) -> Result<Self, NoteError> {
        let (name, link) = (text(r, MAX_NAME)?, text(r, MAX_NAME)?);
        Ok(Self { name, link, network: text(r, MAX_NAME)? })
    }
}

impl Grant {
    fn encode_to(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.addr.to_le_bytes());
        out.extend_from_slice(&self.len.to_le_bytes());
        let bit = |set, bit| if set { bit } else { 0 };
        let rights = bit(self.read, MAY_READ) | bit(self.write, MAY_WRITE);
        out.push(rights | bit(self.staged, IS_STAGED));
        put_u16(self.paths.len(), out);
        for path in &self.paths {
            put_id(path.id, out);
            out.extend_from_slice(&path.base.to_le_bytes());
            put_bytes(&path.key, out);
        }
    }

    fn decode(r: &mut Reader<'_>) -> Result<Self, NoteError> {
        let (addr, len, rights) = (r.u64_le()?, r.u64_le()?, r.u8()?);
        if addr.checked_add(len).is_none() {
            return Err(NoteError::Range { addr, len });
        }
        if rights & !(MAY_READ | MAY_WRITE | IS_STAGED) != 0 {
            return Err(NoteError::Code(rights));
        }
        let paths = count(r, "paths", MAX_RAILS)?;
        let path = |_| {
            let (id, base) = (path_id(r)?, r.u64_le()?);
            Ok(PathKey { id, base, key: bytes_of(r, "bytes of a key", MAX_KEY)? })
        };
        let paths = (0..paths).map(path).collect::<Result<_, NoteError>>()?;
        let (read, write) = (rights & MAY_READ != 0, rights & MAY_WRITE != 0);
        Ok(Self { addr, len, read, write, staged: rights & IS_STAGED != 0, paths })
    }
}

impl StagedPiece {
    fn encode_to(&self, out: &mut Vec<u8>) {
        put_region(self.region, out);
        out.extend_from_slice(&self.addr.to_le_bytes());
        out.extend_from_slice(&self.len.to_le_bytes());
    }

    fn decode(r: &mut Reader<'_>) -> Result<Self, NoteError> {
        let (region, addr, len) = (region_id(r)?, r.u64_le()?, r.u32_le()?);
        if addr.checked_add(u64::from(len)).is_none() {
            return Err(NoteError::Range { addr, len: len.into() });
        }
        Ok(Self { region, addr, len })
    }
}

fn start(kind: u8, id: PathId, out: &mut Vec<u8>) {
    out.push(kind);
    put_id(id, out);
}

fn put_id(id: PathId, out: &mut Vec<u8>) {
    out.extend_from_slice(&id.path.to_le_bytes());
    out.extend_from_slice(&id.attempt.to_le_bytes());
}

fn about(kind: u8, region: RegionId, out: &mut Vec<u8>) {
    out.push(kind);
    put_region(region, out);
}

fn put_region(region: RegionId, out: &mut Vec<u8>) {
    out.extend_from_slice(&region.slot.to_le_bytes());
    out.extend_from_slice(&region.key.to_le_bytes());
}

fn put_u16(number: usize, out: &mut Vec<u8>) {
    // The callers' counts are bounded far below.
    out.extend_from_slice(&u16::try_from(number).unwrap_or(u16::MAX).to_le_bytes());
}

fn put_bytes(bytes: &[u8], out: &mut Vec<u8>) {
    put_u16(bytes.len(), out);
    out.extend_from_slice(bytes);
}

fn path_id(r: &mut Reader<'_>) -> Result<PathId, ShortInput> {
    Ok(PathId { path: r.u16_le()?, attempt: r.u32_le()? })
}

fn region_id(r: &mut Reader<'_>) -> Result<RegionId, ShortInput> {
    Ok(RegionId { slot: r.u32_le()?, key: r.u64_le()? })
}

fn status(r: &mut Reader<'_>) -> Result<Status, NoteError> {
    let code = r.u8()?;
    Status::from_u8(code).ok_or(NoteError::Code(code))
}

fn count(r: &mut Reader<'_>, what: &'static str, most: usize) -> Result<usize, NoteError> {
    match usize::from(r.u16_le()?) {
        count if count > most => Err(NoteError::TooMany { what, count, most }),
        count => Ok(count),
    }
}

fn bytes_of(r: &mut Reader<'_>, what: &'static str, most: usize) -> Result<Vec<u8>, NoteError> {
    let len = count(r, what, most)?;
    Ok(r.take(len as u64)?.to_vec())
}

fn text(r: &mut Reader<'_>, most: usize) -> Result<String, NoteError> {
    String::from_utf8(bytes_of(r, "bytes of text", most)?).map_err(|_| NoteError::Text)
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    fn path_ids() -> impl Strategy<Value = PathId> {
        any::<(u16, u32)>().prop_map(|(path, attempt)| PathId { path, attempt })
    }

    fn regions() -> impl Strategy<Value = RegionId> {
        any::<(u32, u64)>().prop_map(|(slot, key)| RegionId { slot, key })
    }

    fn offers() -> impl Strategy<Value = RailOffer> {
        let name = || "[a-z0-9:/.]{0,20}";
        (name(), name(), name()).prop_map(|(name, link, network)| RailOffer { name, link, network })
    }

    fn path_keys() -> impl Strategy<Value = PathKey> {
        let key = vec(any::<u8>(), 0..40);
        (path_ids(), any::<u64>(), key).prop_map(|(id, base, key)| PathKey { id, base, key })
    }

    fn grants() -> impl Strategy<Value = Grant> {
        let rest = (any::<[bool; 3]>(), vec(path_keys(), 0..5));
        (0..u64::MAX / 2, 0..u64::MAX / 2, rest).prop_map(
            |(addr, len, ([read, write, staged], paths))| Grant {
                addr,
                len,
                read,
                write,
                staged,
                paths,
            },
        )
    }

    fn staged_pieces() -> impl Strategy<Value = StagedPiece> {
        (regions(), 0..u64::MAX / 2, any::<u32>()).prop_map(|(region, addr, len)| StagedPiece {
            region,
            addr,
            len,
        })
    }

    fn notes() -> impl Strategy<Value = Note> {
        let address = || vec(any::<u8>(), 0..100);
        prop_oneof![
            vec(offers(), 0..5).prop_map(Note::Offer),
            (path_ids(), any::<u16>(), address()).prop_map(|(id, rail, address)| Note::Open {
                id,
                rail,
                address
            }),
            (path_ids(), address()).prop_map(|(id, address)| Note::Opened { id, address }),
            (path_ids(), "\\PC{0,50}").prop_map(|(id, why)| Note::Refused { id, why }),
            path_ids().prop_map(Note::Ready),
            path_ids().prop_map(Note::Down),
            Just(Note::Settled),
            regions().prop_map(Note::Ask),
            (regions(), grants()).prop_map(|(region, grant)| Note::Grant(region, grant)),
            regions().prop_map(|region| Note::Deny(region, Status::OutOfBounds)),
            regions().prop_map(Note::Revoke),
            regions().prop_map(Note::Released),
            (any::<u16>(), any::<bool>(), vec(staged_pieces(), 0..5))
                .prop_map(|(chunk, write, pieces)| Note::Stage { chunk, write, pieces }),
            any::<u16>().prop_map(|chunk| Note::Staged { chunk, status: Status::Fault }),
        ]
    }

    fn encoded(note: &Note) -> Vec<u8> {
        let mut bytes = Vec::new();
        note.encode_to(&mut bytes);
        bytes
    }

    proptest! {
        #[test]
        fn notes_are_read_as_they_were_written(note in notes()) {
            prop_assert_eq!(Note::decode(&encoded(&note)), Ok(note));
        }

        #[test]
        fn cut_or_longer_notes_are_refused(note in notes(), at in any::<proptest::sample::Index>()) {
            let mut bytes = encoded(&note);
            prop_assert!(Note::decode(&bytes[..at.index(bytes.len())]).is_err());
            bytes.push(0);
            prop_assert!(Note::decode(&bytes).is_err());
        }

        #[test]
        fn a_note_that_is_read_is_written_the_same(bytes in vec(any::<u8>(), 0..80)) {
            if let Ok(note) = Note::decode(&bytes) {
                prop_assert_eq!(encoded(&note), bytes);
            }
        }
    }

    #[test]
    fn long_reasons_are_cut_between_characters() {
        let why = "é".repeat(MAX_REASON);
        let id = PathId { path: 1, attempt: 2 };
        let Ok(Note::Refused { why: read, .. }) =
            Note::decode(&encoded(&Note::Refused { id, why }))
        else {
            panic!("a refusal");
        };
        assert_eq!(read, "é".repeat(MAX_REASON / 2));
    }

    #[test]
    fn limits_are_kept() {
        let rail = RailOffer { name: String::new(), link: String::new(), network: String::new() };
        let many = encoded(&Note::Offer(vec![rail; MAX_RAILS + 1]));
        assert!(matches!(Note::decode(&many), Err(NoteError::TooMany { what: "rails", .. })));
        let region = RegionId { slot: 1, key: 2 };
        let (addr, paths) = (u64::MAX, Vec::new());
        let grant = Grant { addr, len: 1, read: true, write: true, staged: true, paths };
        let wraps = encoded(&Note::Grant(region, grant));
        assert!(matches!(Note::decode(&wraps), Err(NoteError::Range { .. })));
        let stage = |addr, count| {
            let pieces = vec![StagedPiece { region, addr, len: 1 }; count];
            Note::decode(&encoded(&Note::Stage { chunk: 0, write: true, pieces }))
        };
        assert!(stage(0, MAX_STAGED).is_ok());
        assert!(matches!(stage(0, MAX_STAGED + 1), Err(NoteError::TooMany { .. })));
        assert!(matches!(stage(u64::MAX, 1), Err(NoteError::Range { .. })));
        let mut denied = encoded(&Note::Deny(region, Status::Denied));
        *denied.last_mut().expect("a status") = Status::Ok as u8;
        assert_eq!(Note::decode(&denied), Err(NoteError::Code(0)));
    }

    #[test]
    fn names_addresses_and_keys_are_bounded_in_length() {
        let id = PathId { path: 1, attempt: 2 };
        let open = |len| Note::Open { id, rail: 0, address: vec![7; len] };
        let opened = |len| Note::Opened { id, address: vec![7; len] };
        let offer = |len| {
            let short = String::new();
            let rail = RailOffer { name: "n".repeat(len), link: short.clone(), network: short };
            Note::Offer(vec![rail])
        };
        let grant = |len| {
            let paths = vec![PathKey { id, base: 0, key: vec![7; len] }];
            let (read, write, staged) = (true, true, true);
            let grant = Grant { addr: 0, len: 1, read, write, staged, paths };
            Note::Grant(RegionId { slot: 1, key: 2 }, grant)
        };
        let kinds: [(&dyn Fn(usize) -> Note, usize); 4] =
            [(&open, MAX_ADDRESS), (&opened, MAX_ADDRESS), (&offer, MAX_NAME), (&grant, MAX_KEY)];
        for (note, most) in kinds {
            let longest = note(most);
            assert_eq!(Note::decode(&encoded(&longest)), Ok(longest));
            let longer = Note::decode(&encoded(&note(most + 1)));
            let is_refused =
                matches!(longer, Err(NoteError::TooMany { count, .. }) if count == most + 1);
            assert!(is_refused, "{longer:?}");
        }
    }

    #[test]
    fn codes_that_mean_nothing_are_refused() {
        let region = RegionId { slot: 1, key: 2 };
        let grant =
            Grant { addr: 0, len: 1, read: true, write: true, staged: true, paths: Vec::new() };
        let with = |note: Note, at: usize, code: u8| {
            let mut bytes = encoded(&note);
            bytes[at] = code;
            Note::decode(&bytes)
        };
        // Behind its kind, a grant begins with its region, and that region's place.
        let rights = 1 + 12 + 16;
        assert!(with(Note::Grant(region, grant.clone()), rights, 7).is_ok());
        assert_eq!(with(Note::Grant(region, grant), rights, 8), Err(NoteError::Code(8)));
        let stage = || Note::Stage { chunk: 0, write: true, pieces: Vec::new() };
        assert!(with(stage(), 3, 0).is_ok());
        assert_eq!(with(stage(), 3, 2), Err(NoteError::Code(2)));
        let staged = Note::Staged { chunk: 0, status: Status::Ok };
        assert_eq!(with(staged, 3, 0xff), Err(NoteError::Code(0xff)));
    }
}
