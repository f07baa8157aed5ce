//! Messages: the engines' protocol over the first lane of their connection.
//!
//! The first byte is the kind, the second the flag [`MORE`]; a message longer than a lane takes is
//! cut into fragments that all but the last carry the flag. Integers are little endian.

use crate::{frame::Status, signal::Change};

/// Set on every fragment of a message but the last.
pub const MORE: u8 = 1;
/// Longest message when put together: enough to describe the most iovs of one send.
pub const MAX_ASSEMBLED: usize = 4 << 20;
/// Most iovs of one send or receive.
pub const MAX_IOVS: usize = 65_536;
/// Longest notification.
pub const MAX_NOTIF: u64 = 64 << 20;
/// Most pieces of one ask.
pub const MAX_ASK_PIECES: usize = 8192;
/// Most asks that may wait for their answers on one connection.
pub const MAX_ASKS: usize = 1024;
/// Most pieces of these, together.
pub const MAX_ASKED_PIECES: usize = 256 << 10;
/// Most ranges of one look-up.
pub const MAX_RANGES: usize = 4096;
/// Most regions in the answer to a look-up.
pub const MAX_FOUND: usize = 8192;
/// Bytes before the body of every message: kind, flags and padding.
pub const PREFIX_LEN: usize = 8;

/// The kind of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Tag {
    /// How an ask ended.
    Answer = 10,
    /// The owner of memory is asked to copy to or from it.
    Ask = 9,
    /// The asker cancels its ask.
    AskCancel = 11,
    /// Sent data that travels with its message.
    Eager = 1,
    /// How a send ended at its receiver.
    Fin = 3,
    /// A lane of the connection is of no more use.
    LaneDown = 8,
    /// A note from one end of a link to the other.
    Link = 12,
    /// The receiver is asked for its published regions at some addresses.
    LookUp = 15,
    /// The published regions that a look-up found.
    LookUpAnswer = 16,
    /// A notification that travels with its message.
    Notif = 5,
    /// The notification arrived.
    NotifAck = 7,
    /// A notification to be read from the sender's memory.
    NotifRts = 6,
    /// Sent data to be read from the sender's memory.
    Rts = 2,
    /// The sender cancels its send.
    SendCancel = 4,
    /// A word of the receiver's memory is to be changed.
    Signal = 13,
    /// The result of a signal.
    SignalAck = 14,
}

impl Tag {
    fn from_u8(v: u8) -> Option<Self> {
        Some(match v {
            1 => Self::Eager,
            2 => Self::Rts,
            3 => Self::Fin,
            4 => Self::SendCancel,
            5 => Self::Notif,
            6 => Self::NotifRts,
            7 => Self::NotifAck,
            8 => Self::LaneDown,
            9 => Self::Ask,
            10 => Self::Answer,
            11 => Self::AskCancel,
            12 => Self::Link,
            13 => Self::Signal,
            14 => Self::SignalAck,
            15 => Self::LookUp,
            16 => Self::LookUpAnswer,
            _ => return None,
        })
    }
}

/// Why bytes are not a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MessageError {
    /// Fewer bytes than the message needs, or more.
    #[error("a {0:?} message of {1} bytes has the wrong length")]
    Length(Option<Tag>, usize),
    /// A kind of message that this version does not know.
    #[error("unknown kind of message {0}")]
    Tag(u8),
    /// More pieces than an ask may have.
    #[error("{0} pieces are more than {MAX_ASK_PIECES}")]
    Pieces(usize),
    /// More ranges than a look-up may have.
    #[error("{0} ranges are more than {MAX_RANGES}")]
    Ranges(usize),
    /// More regions than the answer to a look-up may have.
    #[error("{0} regions are more than {MAX_FOUND}")]
    Found(usize),
    /// A direction that this version does not know.
    #[error("unknown direction {0}")]
    Direction(u64),
    /// A status that this version does not know.
    #[error("unknown status {0}")]
    Status(u8),
    /// More iovs than a send may have.
    #[error("{0} iovs are more than {MAX_IOVS}")]
    Iovs(usize),
    /// A notification longer than they may be.
    #[error("a notification of {0} bytes is longer than {MAX_NOTIF}")]
    Notif(u64),
    /// A lane number that no lane has.
    #[error("there is no lane {0}")]
    Lane(u64),
    /// A verdict that this version does not know.
    #[error("unknown verdict {0}")]
    Verdict(u8),
    /// A change that this version does not know.
    #[error("unknown change of a word {0}")]
    Change(u64),
}

/// How a send ended at its receiver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// It was cancelled by its receiver, or by its sender and the receiver agrees.
    Cancelled,
    /// The receiver could not take the data.
    Failed,
    /// It arrived.
    Received,
    /// It was longer than the receive that it met.
    Truncated {
        /// The length of the receive, in bytes.
        capacity: u64,
    },
}

/// A piece of the sender's memory that the receiver is to read, or a region that the sender
/// publishes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Source {
    /// Address in the sender's process.
    pub addr: u64,
    /// Length in bytes.
    pub len: u64,
    /// The key made for this send, or the region's.
    pub key: u64,
    /// Its slot.
    pub slot: u32,
}

const SOURCE_LEN: usize = 28;

/// A range of the owner's addresses, about which a peer asks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Range {
    /// Its first address in the owner's process.
    pub addr: u64,
    /// Its length in bytes.
    pub len: u64,
}

const RANGE_LEN: usize = 16;

/// The direction of the copy that the owner is asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// Copy from its memory into the asker's.
    FromOwner,
    /// Copy from the asker's memory into its own.
    ToOwner,
}

/// A piece of the owner's memory and one of the asker's, of the same length, to be copied one to
/// the other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AskPiece {
    /// The owner's.
    pub owner: Place,
    /// The asker's, with the key made for this ask.
    pub asker: Place,
    /// Length of both in bytes.
    pub len: u64,
}

/// The address of a piece of memory, and the key that proves the right to touch it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// Address in its owner's process.
    pub addr: u64,
    /// The region's key.
    pub key: u64,
    /// The region's slot.
    pub slot: u32,
}

const PLACE_LEN: usize = 20;
const ASK_PIECE_LEN: usize = 8 + 2 * PLACE_LEN;

/// How an ask ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer {
    /// All was copied.
    Copied,
    /// The asker cancelled it: its data moves no more, but some may have been copied.
    Cancelled,
    /// The owner cannot make the copy, and stops trying: the asker had better make it itself.
    Declined,
    /// The asker may not touch the memory.
    Refused(Status),
}

/// A message, its variable parts borrowed from the bytes it was read from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Message<'a> {
    /// How an ask ended.
    Answer {
        /// The ask.
        id: u64,
        /// Its end.
        answer: Answer,
    },
    /// The receiver is asked to copy to or from memory of its own, which it reaches better than the
    /// sender.
    Ask {
        /// Numbers the ask.
        id: u64,
        /// Which way.
        direction: Direction,
        /// The pieces to copy.
        pieces: AskPieces<'a>,
    },
    /// The asker cancels the ask. It is answered all the same.
    AskCancel {
        /// The ask.
        id: u64,
    },
    /// Sent data: one length an iov, and the data of all.
    Eager {
        /// Numbers the send.
        seq: u64,
        /// One length an iov.
        lens: Lens<'a>,
        /// The data, iov after iov.
        data: &'a [u8],
    },
    /// How a send ended.
    Fin {
        /// The send.
        seq: u64,
        /// Its end.
        verdict: Verdict,
    },
    /// The sender's end of a lane is dead: nothing that was sent on it lands in the sender's memory
    /// any more. A receiver that hears this for the first time ends its own end, and sends the same
    /// message.
    LaneDown {
        /// Which lane, counted from the one that carries messages, which is 0.
        lane: u16,
    },
    /// A note from one end of a lane to the other, for the link to read.
    Link {
        /// Which lane, counted from the one that carries messages, which is 0.
        lane: u16,
        /// The note's bytes.
        note: &'a [u8],
    },
    /// The receiver is asked for its published regions in these ranges.
    LookUp {
        /// Numbers the look-up.
        id: u64,
        /// The ranges.
        ranges: Ranges<'a>,
    },
    /// The result of a look-up.
    LookUpAnswer {
        /// The look-up.
        id: u64,
        /// Ok: the regions are those that the look-up found. Denied: the sender publishes nothing.
        status: Status,
        /// The regions, each in full and with its key.
        regions: Sources<'a>,
    },
    /// A notification.
    Notif {
        /// Numbers the notification.
        id: u64,
        /// The notification's bytes.
        payload: &'a [u8],
    },
    /// A notification arrived.
    NotifAck {
        /// The notification.
        id: u64,
        /// Whether it was taken.
        ok: bool,
    },
    /// A notification to be read.
    NotifRts {
        /// Numbers the notification.
        id: u64,
        /// Where it is.
        source: Source,
    },
    /// Data to be read.
    Rts {
        /// Numbers the send.
        seq: u64,
        /// One piece an iov.
        sources: Sources<'a>,
    },
    /// The sender cancels its send.
    SendCancel {
        /// The send.
        seq: u64,
    },
    /// A word of the receiver's memory is to be changed, once.
    Signal {
        /// Numbers the signal: each is one more than the one before, from 1.
        id: u64,
        /// Where the word is.
        word: Place,
        /// The change.
        change: Change,
    },
    /// The result of a signal.
    SignalAck {
        /// The signal.
        id: u64,
        /// Ok: the word has been changed. Else it has not.
        status: Status,
    },
}

/// Lengths of the iovs of an eager send.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lens<'a>(&'a [[u8; 4]]);

impl Lens<'_> {
    /// One length an iov, in bytes.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = u32> {
        self.0.iter().map(|b| u32::from_le_bytes(*b))
    }
}

/// The ranges of a look-up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ranges<'a>(&'a [[u8; RANGE_LEN]]);

impl Ranges<'_> {
    /// The ranges, one after the other.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Range> {
        self.0.iter().map(|bytes| {
            let (addr, len) = bytes.split_at(8);
            Range { addr: word(addr), len: word(len) }
        })
    }
}

/// The pieces of a send that is to be read, or the regions that a look-up found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sources<'a>(&'a [[u8; SOURCE_LEN]]);

impl Sources<'_> {
    /// One piece an iov, or one for each region.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Source> {
        self.0.iter().map(Source::decode)
    }
}

/// The pieces of an ask.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AskPieces<'a>(&'a [[u8; ASK_PIECE_LEN]]);

impl AskPieces<'_> {
    /// The pieces, one after the other.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = AskPiece> {
        self.0.iter().map(AskPiece::decode)
    }
}

impl AskPiece {
    fn encode_to(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.len.to_le_bytes());
        self.owner.encode_to(out);
        self.asker.encode_to(out);
    }

    fn decode(bytes: &[u8; ASK_PIECE_LEN]) -> Self {
        let (len, places) = bytes.split_at(8);
        let (owner, asker) = places.split_at(PLACE_LEN);
        Self { owner: Place::decode(owner), asker: Place::decode(asker), len: word(len) }
    }
}

impl Place {
    fn encode_to(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.addr.to_le_bytes());
        out.extend_from_slice(&self.key.to_le_bytes());
        out.extend_from_slice(&self.slot.to_le_bytes());
    }

    fn decode(bytes: &[u8]) -> Self {
        let (addr, rest) = bytes.split_at(8);
        let (key, slot) = rest.split_at(8);
        Self { addr: word(addr), key: word(key), slot: word(slot) as u32 }
    }
}

impl Source {
    /// Appends the piece's bytes.
    pub fn encode_to(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.addr.to_le_bytes());
        out.extend_from_slice(&self.len.to_le_bytes());
        out.extend_from_slice(&self.key.to_le_bytes());
        out.extend_from_slice(&self.slot.to_le_bytes());
    }

    fn decode(bytes: &[u8; SOURCE_LEN]) -> Self {
        Self {
            addr: word(&bytes[0..8]),
            len: word(&bytes[8..16]),
            key: word(&bytes[16..24]),
            slot: word(&bytes[24..28]) as u32,
        }
    }
}

/// The head of an eager send; the data follows it.
pub fn eager_head(seq: u64, lens: impl ExactSizeIterator<Item = u32>, out: &mut Vec<u8>) {
    start(Tag::Eager, seq, out);
    out.extend_from_slice(&(lens.len() as u64).to_le_bytes());
    lens.for_each(|len| out.extend_from_slice(&len.to_le_bytes()));
}

/// A send that is to be read.
pub fn rts(seq: u64, sources: impl Iterator<Item = Source>, out: &mut Vec<u8>) {
    start(Tag::Rts, seq, out);
    sources.for_each(|source| source.encode_to(out));
}

/// How a send ended.
pub fn fin(seq: u64, verdict: Verdict, out: &mut Vec<u8>) {
    start(Tag::Fin, seq, out);
    let (code, capacity) = match verdict {
        Verdict::Received => (0, 0),
        Verdict::Truncated { capacity } => (1, capacity),
        Verdict::Cancelled => (2, 0),
        Verdict::Failed => (3, 0),
    };
    out.push(code);
    out.extend_from_slice(&u64::to_le_bytes(capacity));
}

/// The sender cancels its send.
pub fn send_cancel(seq: u64, out: &mut Vec<u8>) {
    start(Tag::SendCancel, seq, out);
}

/// The owner of memory is asked to copy to or from it. At most [`MAX_ASK_PIECES`] pieces.
pub fn ask(
    id: u64,
    direction: Direction,
    pieces: impl Iterator<Item = AskPiece>,
    out: &mut Vec<u8>,
) {
    start(Tag::Ask, id, out);
    let direction = match direction {
        Direction::FromOwner => 0u64,
        Direction::ToOwner => 1,
    };
    out.extend_from_slice(&direction.to_le_bytes());
    pieces.for_each(|piece| piece.encode_to(out));
}

/// How an ask ended.
pub fn answer(id: u64, answer: Answer, out: &mut Vec<u8>) {
    start(Tag::Answer, id, out);
    let (code, status) = match answer {
        Answer::Copied => (0, Status::Ok),
        Answer::Cancelled => (1, Status::Ok),
        Answer::Declined => (2, Status::Ok),
        Answer::Refused(status) => (3, status),
    };
    out.extend_from_slice(&[code, status as u8]);
}

/// The asker cancels its ask.
pub fn ask_cancel(id: u64, out: &mut Vec<u8>) {
    start(Tag::AskCancel, id, out);
}

/// The sender's end of a lane is dead.
pub fn lane_down(lane: u16, out: &mut Vec<u8>) {
    start(Tag::LaneDown, lane.into(), out);
}

/// The head of a note from one end of a lane to the other; the note follows.
pub fn link_head(lane: u16, out: &mut Vec<u8>) {
    start(Tag::Link, lane.into(), out);
}

/// The receiver is asked for its published regions. At most [`MAX_RANGES`] ranges.
pub fn look_up(id: u64, ranges: impl Iterator<Item = Range>, out: &mut Vec<u8>) {
    start(Tag::LookUp, id, out);
    for Range { addr, len } in ranges {
        out.extend_from_slice(&addr.to_le_bytes());
        out.extend_from_slice(&len.to_le_bytes());
    }
}

/// The result of a look-up. At most [`MAX_FOUND`] regions.
pub fn look_up_answer(
    id: u64,
    status: Status,
    regions: impl Iterator<Item = Source>,
    out: &mut Vec<u8>,
) {
    start(Tag::LookUpAnswer, id, out);
    out.push(status as u8);
    regions.for_each(|region| region.encode_to(out));
}

/// The head of a notification; its payload follows.
pub fn notif_head(id: u64, out: &mut Vec<u8>) {
    start(Tag::Notif, id, out);
}

/// A notification that is to be read.
pub fn notif_rts(id: u64, source: Source, out: &mut Vec<u8>) {
    start(Tag::NotifRts, id, out);
    source.encode_to(out);
}

/// A notification arrived (or could not be taken).
pub fn notif_ack(id: u64, ok: bool, out: &mut Vec<u8>) {
    start(Tag::NotifAck, id, out);
    out.push(ok.into());
}

/// A word of the receiver's memory is to be changed.
pub fn signal(id: u64, word: Place, change: Change, out: &mut Vec<u8>) {
    start(Tag::Signal, id, out);
    let (code, value) = match change {
        Change::Set(value) => (0u64, value),
        Change::Add(value) => (1, value),
    };
    out.extend_from_slice(&code.to_le_bytes());
    out.extend_from_slice(&value.to_le_bytes());
    word.encode_to(out);
}

/// The result of a signal.
pub fn signal_ack(id: u64, status: Status, out: &mut Vec<u8>) {
    start(Tag::SignalAck, id, out);
    out.push(status as u8);
}

fn start(tag: Tag, id: u64, out: &mut Vec<u8>) {
    out.extend_from_slice(&[tag as u8, 0, 0, 0, 0, 0, 0, 0]);
    out.extend_from_slice(&id.to_le_bytes());
}

impl<'a> Message<'a> {
    /// Reads a whole message (its fragments put together: the prefix once, then all bodies).
    pub fn decode(bytes: &'a [u8]) -> Result<Self, MessageError> {
        let Some((head, body)) = bytes.split_at_checked(PREFIX_LEN + 8) else {
            return Err(MessageError::Length(None, bytes.len()));
        };
        let tag = Tag::from_u8(head[0]).ok_or(MessageError::Tag(head[0]))?;
        let id = word(&head[PREFIX_LEN..]);
        let wrong = || MessageError::Length(Some(tag), bytes.len());
        Ok(match tag {
            Tag::Answer => {
                let [code, status] = *body else { return Err(wrong()) };
                let status = Status::from_u8(status).ok_or(MessageError::Status(status))?;
                let answer = match code {
                    0 => Answer::Copied,
                    1 => Answer::Cancelled,
                    2 => Answer::Declined,
                    3 => Answer::Refused(status),
                    _ => return Err(MessageError::Verdict(code)),
                };
                Self::Answer { id, answer }
            }
            Tag::Ask => {
                let (direction, pieces) = body.split_at_checked(8).ok_or_else(wrong)?;
                let direction = match word(direction) {
                    0 => Direction::FromOwner,
                    1 => Direction::ToOwner,
                    other => return Err(MessageError::Direction(other)),
                };
                let (pieces, rest) = pieces.as_chunks::<ASK_PIECE_LEN>();
                if !rest.is_empty() {
                    return Err(wrong());
                }
                if pieces.len() > MAX_ASK_PIECES {
                    return Err(MessageError::Pieces(pieces.len()));
                }
                Self::Ask { id, direction, pieces: AskPieces(pieces) }
            }
            Tag::AskCancel if body.is_empty() => Self::AskCancel { id },
            Tag::Eager => {
                let (count, rest) = body.split_at_checked(8).ok_or_else(wrong)?;
                let count = usize::try_from(word(count)).unwrap_or(usize::MAX);
                if count > MAX_IOVS {
                    return Err(MessageError::Iovs(count));
                }
                let (lens, data) = rest.split_at_checked(count * 4).ok_or_else(wrong)?;
                let lens = Lens(lens.as_chunks().0);
                if lens.iter().map(u64::from).sum::<u64>() != data.len() as u64 {
                    return Err(wrong());
                }
                Self::Eager { seq: id, lens, data }
            }
            Tag::Rts => {
                let (sources, rest) = body.as_chunks::<SOURCE_LEN>();
                if !rest.is_empty() {
                    return Err(wrong());
                }
                if sources.len() > MAX_IOVS {
                    return Err(MessageError::Iovs(sources.len()));
                }
                Self::Rts { seq: id, sources: Sources(sources) }
            }
            Tag::Fin => {
                let (&code, capacity) = body.split_first().ok_or_else(wrong)?;
                if capacity.len() != 8 {
                    return Err(wrong());
                }
                let verdict = match code {
                    0 => Verdict::Received,
                    1 => Verdict::Truncated { capacity: word(capacity) },
                    2 => Verdict::Cancelled,
                    3 => Verdict::Failed,
                    _ => return Err(MessageError::Verdict(code)),
                };
                Self::Fin { seq: id, verdict }
            }
            Tag::SendCancel if body.is_empty() => Self::SendCancel { seq: id },
            Tag::Notif => Self::Notif { id, payload: body },
            Tag::NotifRts => {
                let bytes: &[u8; SOURCE_LEN] = body.try_into().map_err(|_| wrong())?;
                let source = Source::decode(bytes);
                if source.len > MAX_NOTIF {
                    return Err(MessageError::Notif(source.len));
                }
                Self::NotifRts { id, source }
            }
            Tag::NotifAck if body.len() == 1 => Self::NotifAck { id, ok: body[0] != 0 },
            Tag::LaneDown if body.is_empty() => {
                Self::LaneDown { lane: u16::try_from(id).map_err(|_| MessageError::Lane(id))? }
            }
            Tag::Link => {
                let lane = u16::try_from(id).map_err(|_| MessageError::Lane(id))?;
                Self::Link { lane, note: body }
            }
            Tag::LookUp => {
                let (ranges, rest) = body.as_chunks::<RANGE_LEN>();
                if !rest.is_empty() {
                    return Err(wrong());
                }
                if ranges.len() > MAX_RANGES {
                    return Err(MessageError::Ranges(ranges.len()));
                }
                Self::LookUp { id, ranges: Ranges(ranges) }
            }
            Tag::LookUpAnswer => {
                let (&status, regions) = body.split_first().ok_or_else(wrong)?;
                let status = Status::from_u8(status).ok_or(MessageError::Status(status))?;
                let (regions, rest) = regions.as_chunks::<SOURCE_LEN>();
                if !rest.is_empty() {
                    return Err(wrong());
                }
                if regions.len() > MAX_FOUND {
                    return Err(MessageError::Found(regions.len()));
                }
                Self::LookUpAnswer { id, status, regions: Sources(regions) }
            }
            Tag::Signal => {
                let (change, place) = body.split_at_checked(16).ok_or_else(wrong)?;
                if place.len() != PLACE_LEN {
                    return Err(wrong());
                }
                let (code, value) = change.split_at(8);
                let change = match (word(code), word(value)) {
                    (0, value) => Change::Set(value),
                    (1, value) => Change::Add(value),
                    (other, _) => return Err(MessageError::Change(other)),
                };
                Self::Signal { id, word: Place::decode(place), change }
            }
            Tag::SignalAck => {
                let [status] = *body else { return Err(wrong()) };
                let status = Status::from_u8(status).ok_or(MessageError::Status(status))?;
                Self::SignalAck { id, status }
            }
            Tag::AskCancel | Tag::SendCancel | Tag::NotifAck | Tag::LaneDown => return Err(wrong()),
        })
    }
}

/// Little endian, at most eight bytes.
fn word(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |acc, b| acc << 8 | u64::from(*b))
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    proptest! {
        #[test]
        fn eager_survives_the_wire(seq: u64, iovs in vec(vec(any::<u8>(), 0..20), 0..5)) {
            let mut bytes = Vec::new();
            eager_head(seq, iovs.iter().map(|iov| iov.len() as u32), &mut bytes);
            bytes.extend(iovs.concat());
            let Ok(Message::Eager { seq: got, lens, data }) = Message::decode(&bytes) else {
                panic!("{bytes:?}");
            };
            prop_assert_eq!(got, seq);
            prop_assert_eq!(lens.iter().collect::<Vec<_>>(), iovs.iter().map(|iov| iov.len() as u32).collect::<Vec<_>>());
            prop_assert_eq!(data, iovs.concat());
        }

        #[test]
        fn rts_survives_the_wire(seq: u64, pieces in vec((any::<u64>(), any::<u64>(), any::<u64>(), any::<u32>()), 0..5)) {
            let sources: Vec<_> = pieces.into_iter().map(|(addr, len, key, slot)| Source { addr, len, key, slot }).collect();
            let mut bytes = Vec::new();
            rts(seq, sources.iter().copied(), &mut bytes);
            let Ok(Message::Rts { seq: got, sources: back }) = Message::decode(&bytes) else {
                panic!("{bytes:?}");
            };
            prop_assert_eq!(got, seq);
            prop_assert_eq!(back.iter().collect::<Vec<_>>(), sources);
        }

        #[test]
        fn asks_survive_the_wire(id: u64, to_owner: bool, pieces in vec((any::<[u64; 5]>(), any::<[u32; 2]>()), 0..5)) {
            let direction = if to_owner { Direction::ToOwner } else { Direction::FromOwner };
            let pieces: Vec<_> = pieces.into_iter().map(|([a, b, c, d, len], [e, f])| AskPiece {
                owner: Place { addr: a, key: b, slot: e },
                asker: Place { addr: c, key: d, slot: f },
                len,
            }).collect();
            let mut bytes = Vec::new();
            ask(id, direction, pieces.iter().copied(), &mut bytes);
            let Ok(Message::Ask { id: got, direction: way, pieces: back }) = Message::decode(&bytes) else {
                panic!("{bytes:?}");
            };
            prop_assert_eq!((got, way), (id, direction));
            prop_assert_eq!(back.iter().collect::<Vec<_>>(), pieces);
        }

        #[test]
        fn look_ups_survive_the_wire(
            id: u64,
            ranges in vec((any::<u64>(), any::<u64>()), 0..5),
            regions in vec((any::<u64>(), any::<u64>(), any::<u64>(), any::<u32>()), 0..5),
        ) {
            let ranges = ranges.into_iter().map(|(addr, len)| Range { addr, len });
            let ranges: Vec<_> = ranges.collect();
            let mut bytes = Vec::new();
            look_up(id, ranges.iter().copied(), &mut bytes);
            let Ok(Message::LookUp { id: got, ranges: back }) = Message::decode(&bytes) else {
                panic!("{bytes:?}");
            };
            prop_assert_eq!((got, back.iter().collect::<Vec<_>>()), (id, ranges));
            let regions = regions.into_iter();
            let regions = regions.map(|(addr, len, key, slot)| Source { addr, len, key, slot });
            let regions: Vec<_> = regions.collect();
            for status in [Status::Ok, Status::Denied] {
                bytes.clear();
                look_up_answer(id, status, regions.iter().copied(), &mut bytes);
                let back = Message::decode(&bytes);
                let Ok(Message::LookUpAnswer { id: got, status: how, regions: back }) = back else {
                    panic!("{bytes:?}");
                };
                prop_assert_eq!((got, how), (id, status));
                prop_assert_eq!(&back.iter().collect::<Vec<_>>(), &regions);
            }
        }

        #[test]
        fn any_bytes_are_refused_or_read(bytes in vec(any::<u8>(), 0..200), tag in 0u8..18) {
            let mut bytes = bytes;
            if let Some(first) = bytes.first_mut() { *first = tag; }
            let _ = Message::decode(&bytes);
        }
    }

    #[test]
    fn the_small_messages_survive_the_wire() {
        let mut out = Vec::new();
        for verdict in [
            Verdict::Received,
            Verdict::Cancelled,
            Verdict::Failed,
            Verdict::Truncated { capacity: 7 },
        ] {
            out.clear();
            fin(3, verdict, &mut out);
            assert_eq!(Message::decode(&out), Ok(Message::Fin { seq: 3, verdict }));
            // Neither longer nor shorter.
            let wrong = |len| Err(MessageError::Length(Some(Tag::Fin), len));
            out.push(0);
            assert_eq!(Message::decode(&out), wrong(out.len()));
            out.truncate(out.len() - 2);
            assert_eq!(Message::decode(&out), wrong(out.len()));
        }
        out.clear();
        notif_ack(5, true, &mut out);
        assert_eq!(Message::decode(&out), Ok(Message::NotifAck { id: 5, ok: true }));
        out.clear();
        send_cancel(6, &mut out);
        assert_eq!(Message::decode(&out), Ok(Message::SendCancel { seq: 6 }));
        for answer in
            [Answer::Copied, Answer::Cancelled, Answer::Declined, Answer::Refused(Status::Denied)]
        {
            out.clear();
            super::answer(4, answer, &mut out);
            assert_eq!(Message::decode(&out), Ok(Message::Answer { id: 4, answer }));
        }
        out.clear();
        ask_cancel(9, &mut out);
        assert_eq!(Message::decode(&out), Ok(Message::AskCancel { id: 9 }));
        out.clear();
        lane_down(63, &mut out);
        assert_eq!(Message::decode(&out), Ok(Message::LaneDown { lane: 63 }));
        out.push(0);
        assert_eq!(Message::decode(&out), Err(MessageError::Length(Some(Tag::LaneDown), 17)));
        out.clear();
        start(Tag::LaneDown, 1 << 16, &mut out);
        assert_eq!(Message::decode(&out), Err(MessageError::Lane(1 << 16)));
        out.clear();
        link_head(1, &mut out);
        out.extend_from_slice(b"note");
        assert_eq!(Message::decode(&out), Ok(Message::Link { lane: 1, note: b"note" }));
        out.clear();
        notif_head(7, &mut out);
        out.extend_from_slice(b"hello");
        assert_eq!(Message::decode(&out), Ok(Message::Notif { id: 7, payload: b"hello" }));
        out.clear();
        let source = Source { addr: 1, len: MAX_NOTIF + 1, key: 3, slot: 4 };
        notif_rts(8, source, &mut out);
        assert_eq!(Message::decode(&out), Err(MessageError::Notif(MAX_NOTIF + 1)));
    }

    #[test]
    fn signals_survive_the_wire() {
        let place = Place { addr: 0x1000, key: 9, slot: 2 };
        let mut out = Vec::new();
        for change in [Change::Set(u64::MAX), Change::Add(7)] {
            out.clear();
            signal(3, place, change, &mut out);
            assert_eq!(Message::decode(&out), Ok(Message::Signal { id: 3, word: place, change }));
            let wrong = |len| Err(MessageError::Length(Some(Tag::Signal), len));
            out.push(0);
            assert_eq!(Message::decode(&out), wrong(out.len()));
            out.truncate(out.len() - 2);
            assert_eq!(Message::decode(&out), wrong(out.len()));
            out.truncate(PREFIX_LEN + 8 + 15);
            assert_eq!(Message::decode(&out), wrong(out.len()));
        }
        out.clear();
        signal(3, place, Change::Set(1), &mut out);
        out[PREFIX_LEN + 8] = 2;
        assert_eq!(Message::decode(&out), Err(MessageError::Change(2)));
        out.clear();
        signal_ack(4, Status::Denied, &mut out);
        let ack = Message::SignalAck { id: 4, status: Status::Denied };
        assert_eq!(Message::decode(&out), Ok(ack));
        *out.last_mut().unwrap() = 200;
        assert_eq!(Message::decode(&out), Err(MessageError::Status(200)));
        out.pop();
        let wrong = MessageError::Length(Some(Tag::SignalAck), out.len());
        assert_eq!(Message::decode(&out), Err(wrong));
    }

    /// A receiver splits the data by the lengths.
    #[test]
    fn the_lengths_of_an_eager_message_are_its_datas() {
        let of = |lens: &[u32], data: &[u8]| {
            let mut bytes = Vec::new();
            eager_head(1, lens.iter().copied(), &mut bytes);
            bytes.extend_from_slice(data);
            bytes
        };
        for (lens, data) in [(&[3, 1][..], &[9; 4][..]), (&[], &[]), (&[0], &[])] {
            assert!(matches!(Message::decode(&of(lens, data)), Ok(Message::Eager { .. })));
        }
        for (lens, data) in
            [(&[3, 2][..], &[9; 4][..]), (&[3], &[9; 4]), (&[1], &[]), (&[u32::MAX, 5], &[9; 4])]
        {
            let bytes = of(lens, data);
            let refused = MessageError::Length(Some(Tag::Eager), bytes.len());
            assert_eq!(Message::decode(&bytes), Err(refused), "{lens:?}");
        }
        let too_many = of(&vec![0; MAX_IOVS + 1], &[]);
        assert_eq!(Message::decode(&too_many), Err(MessageError::Iovs(MAX_IOVS + 1)));
    }

    #[test]
    fn the_pieces_of_a_send_are_bounded() {
        let source = Source { addr: 1, len: 2, key: 3, slot: 4 };
        let of = |count| {
            let mut bytes = Vec::new();
            rts(1, std::iter::repeat_n(source, count), &mut bytes);
            bytes
        };
        assert!(matches!(Message::decode(&of(MAX_IOVS)), Ok(Message::Rts { .. })));
        let too_many = of(MAX_IOVS + 1);
        assert_eq!(Message::decode(&too_many), Err(MessageError::Iovs(MAX_IOVS + 1)));
    }

    #[test]
    fn look_ups_are_bounded() {
        let of = |ranges: usize| {
            let mut bytes = Vec::new();
            look_up(1, std::iter::repeat_n(Range { addr: 1, len: 2 }, ranges), &mut bytes);
            bytes
        };
        let answer = |regions: usize| {
            let region = Source { addr: 1, len: 2, key: 3, slot: 4 };
            let mut bytes = Vec::new();
            let regions = std::iter::repeat_n(region, regions);
            look_up_answer(1, Status::Ok, regions, &mut bytes);
            bytes
        };
        for (most, more, error) in [
            (of(MAX_RANGES), of(MAX_RANGES + 1), MessageError::Ranges(MAX_RANGES + 1)),
            (answer(MAX_FOUND), answer(MAX_FOUND + 1), MessageError::Found(MAX_FOUND + 1)),
        ] {
            assert!(most.len() <= MAX_ASSEMBLED);
            assert!(Message::decode(&most).is_ok());
            assert_eq!(Message::decode(&more), Err(error));
        }
        for (tag, mut cut) in [(Tag::LookUp, of(2)), (Tag::LookUpAnswer, answer(2))] {
            cut.pop();
            let wrong = MessageError::Length(Some(tag), cut.len());
            assert_eq!(Message::decode(&cut), Err(wrong), "half of an entry");
        }
        let mut unknown = answer(0);
        *unknown.last_mut().unwrap() = 200;
        assert_eq!(Message::decode(&unknown), Err(MessageError::Status(200)));
        unknown.pop();
        let wrong = MessageError::Length(Some(Tag::LookUpAnswer), unknown.len());
        assert_eq!(Message::decode(&unknown), Err(wrong));
    }

    #[test]
    fn asks_are_bounded() {
        let place = Place { addr: 1, key: 2, slot: 3 };
        let piece = AskPiece { owner: place, asker: place, len: 4 };
        let of = |count| {
            let mut bytes = Vec::new();
            ask(1, Direction::ToOwner, std::iter::repeat_n(piece, count), &mut bytes);
            bytes
        };
        let (most, more) = (of(MAX_ASK_PIECES), of(MAX_ASK_PIECES + 1));
        assert!(most.len() <= MAX_ASSEMBLED);
        assert!(matches!(Message::decode(&most), Ok(Message::Ask { .. })));
        assert_eq!(Message::decode(&more), Err(MessageError::Pieces(MAX_ASK_PIECES + 1)));
        let mut cut = of(2);
        cut.pop();
        assert_eq!(
            Message::decode(&cut),
            Err(MessageError::Length(Some(Tag::Ask), cut.len())),
            "half a piece"
        );
        let mut sideways = of(1);
        sideways[PREFIX_LEN + 8] = 7;
        assert_eq!(Message::decode(&sideways), Err(MessageError::Direction(7)));
        let mut bytes = Vec::new();
        answer(1, Answer::Copied, &mut bytes);
        *bytes.last_mut().unwrap() = 200;
        assert_eq!(Message::decode(&bytes), Err(MessageError::Status(200)));
    }
}
