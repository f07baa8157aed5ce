//! Messages between the members of a group. All numbers are little endian.
//!
//! | offset | type | field |
//! | --- | --- | --- |
//! | 0 | 4 B | `URMA` |
//! | 4 | u8 | version |
//! | 5 | u8 | kind: 1 hello, 2 region, 3 goodbye |
//! | 6 | u16 | zero |
//! | 8 | 16 B | token of the receiver's listener |
//! | 24 | u32 | rank of the sender |
//! | 28 | u32 | region: its number |
//! | 32 | 64 B | region: its advert |

use uccl_p2p::wire::advert::{ADVERT_LEN, Advert};

/// The random name of a listener, which only those know that have its handle.
pub(crate) type Token = [u8; 16];

const MAGIC: [u8; 4] = *b"URMA";
const VERSION: u8 = 1;
const HEAD_LEN: usize = 32;
/// The most ranks of a group, and the most regions that a member may register.
pub(crate) const MAX_RANKS: usize = 1 << 16;
pub(crate) const MAX_REGIONS: usize = 1 << 16;

/// A message of a member.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Note {
    pub(crate) to: Token,
    pub(crate) from: usize,
    pub(crate) body: Body,
}

/// The content of a message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Body {
    /// The connection that this came over belongs to the group.
    Hello,
    /// A region of the sender's.
    Region { number: usize, advert: Advert },
    /// The sender closes its half of the group, and has not failed.
    Goodbye,
}

impl Note {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let kind = match self.body {
            Body::Hello => 1,
            Body::Region { .. } => 2,
            Body::Goodbye => 3,
        };
        let mut bytes = Vec::with_capacity(HEAD_LEN + ADVERT_LEN);
        bytes.extend(MAGIC);
        bytes.extend([VERSION, kind, 0, 0]);
        bytes.extend(self.to);
        bytes.extend((self.from as u32).to_le_bytes());
        let number = if let Body::Region { number, .. } = self.body { number } else { 0 };
        bytes.extend((number as u32).to_le_bytes());
        if let Body::Region { advert, .. } = &self.body {
            bytes.extend(advert.encode());
        }
        bytes
    }

    /// The message of these bytes; the reason why they are none.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, &'static str> {
        let (head, rest) = bytes.split_first_chunk::<HEAD_LEN>().ok_or("it is too short")?;
        if head[..4] != MAGIC {
            return Err("it begins with another mark");
        }
        if head[4] != VERSION {
            return Err("its version is another");
        }
        let mut to = Token::default();
        to.copy_from_slice(&head[8..24]);
        let number_at = |at: usize| {
            let mut word = [0; 4];
            word.copy_from_slice(&head[at..at + 4]);
            u32::from_le_bytes(word) as usize
        };
        let (from, number) = (number_at(24), number_at(28));
        if from >= MAX_RANKS {
            return Err("no group has such a rank");
        }
        let body = match head[5] {
            1 => Body::Hello,
            2 if number >= MAX_REGIONS => return Err("no member has so many regions"),
            2 => {
                let advert = Advert::decode(rest).map_err(|_| "its advert cannot be read")?;
                return Ok(Self { to, from, body: Body::Region { number, advert } });
            }
            3 => Body::Goodbye,
            _ => return Err("its kind is unknown"),
        };
        if rest.is_empty() { Ok(Self { to, from, body }) } else { Err("it is too long") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_survive_their_encoding() {
        let advert = Advert { addr: 0x1000, len: 64, key: 7, slot: 3, instance: 9 };
        for body in [Body::Hello, Body::Region { number: 5, advert }, Body::Goodbye] {
            let note = Note { to: [4; 16], from: 2, body };
            assert_eq!(Note::decode(&note.encode()), Ok(note));
        }
    }

    #[test]
    fn other_bytes_are_no_notes() {
        let note = Note { to: [4; 16], from: 2, body: Body::Hello };
        let bytes = note.encode();
        for (at, value) in [(0, b'X'), (4, 9), (5, 0), (5, 2), (26, 1)] {
            let mut wrong = bytes.clone();
            wrong[at] = value;
            assert!(Note::decode(&wrong).is_err(), "byte {at} is {value}");
        }
        assert!(Note::decode(&bytes[..31]).is_err() && Note::decode(&[]).is_err());
        assert!(Note::decode(&[&bytes[..], &[0]].concat()).is_err(), "a byte too many");
        let advert = Advert { addr: 0x1000, len: 64, key: 7, slot: 3, instance: 9 };
        let body = Body::Region { number: MAX_REGIONS, advert };
        assert!(Note::decode(&Note { body, ..note }.encode()).is_err(), "too many regions");
    }
}
