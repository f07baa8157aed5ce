//! Groups of ranks: the card by which ranks find each other, the hello of a connection, and the
//! notice of a rank that has given a call up.
//!
//! All numbers are little endian.
//!
//! A [`RankCard`] has [`RANK_CARD_LEN`] bytes:
//!
//! | offset | type | field |
//! | --- | --- | --- |
//! | 0 | 4 B | `UGC1` |
//! | 4 | u16 | port of the rank's endpoint |
//! | 6 | u16 | zero |
//! | 8 | u64 | the endpoint's instance |
//! | 16 | 16 B | the endpoint's IP address; IPv4 as an IPv6 address |
//!
//! A [`GroupHello`] and a [`GroupNotice`] are a head and a list of ranks:
//!
//! | offset | type | field of the hello | field of the notice |
//! | --- | --- | --- | --- |
//! | 0 | 4 B | `UGH1` | `UGN1` |
//! | 4 | u32 | epoch; [`OF_RELAYS`] is set in that of a relays' connection | epoch |
//! | 8 | u32 each | the ranks of the group, by their first numbers | the lost ranks, by their numbers in this group |

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use crate::cursor::{Reader, ShortInput};

/// Bytes of a [`RankCard`].
pub const RANK_CARD_LEN: usize = 32;
/// The bit of a hello's epoch that tells the second connection of a pair, which is for relays.
pub const OF_RELAYS: u32 = 1 << 31;
/// The most ranks of a list.
pub const MOST_RANKS: usize = 1 << 16;

const CARD_MAGIC: [u8; 4] = *b"UGC1";
const HELLO_MAGIC: [u8; 4] = *b"UGH1";
const NOTICE_MAGIC: [u8; 4] = *b"UGN1";

/// Why bytes are not one of these layouts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GroupWireError {
    /// They end too early.
    #[error(transparent)]
    Short(#[from] ShortInput),
    /// They are something else, or of another version.
    #[error("these bytes do not begin as {0}")]
    Magic(&'static str),
    /// More bytes than the layout has.
    #[error("{0} bytes too many")]
    Long(usize),
}

/// Where a rank's endpoint listens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RankCard {
    /// The endpoint's address.
    pub addr: SocketAddr,
    /// The endpoint's random number.
    pub instance: u64,
}

impl RankCard {
    /// As bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; RANK_CARD_LEN] {
        let ip = match self.addr.ip() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        let mut out = [0; RANK_CARD_LEN];
        out[..4].copy_from_slice(&CARD_MAGIC);
        out[4..6].copy_from_slice(&self.addr.port().to_le_bytes());
        out[8..16].copy_from_slice(&self.instance.to_le_bytes());
        out[16..].copy_from_slice(&ip.octets());
        out
    }

    /// Reads a card.
    ///
    /// # Errors
    /// The bytes are not a card.
    pub fn decode(bytes: &[u8]) -> Result<Self, GroupWireError> {
        let mut r = Reader::new(bytes);
        if r.array()? != CARD_MAGIC {
            return Err(GroupWireError::Magic("a rank's card"));
        }
        let (port, _) = (r.u16_le()?, r.u16_le()?);
        let instance = r.u64_le()?;
        let ip = IpAddr::from(Ipv6Addr::from(r.array::<16>()?)).to_canonical();
        match r.remaining() {
            0 => Ok(Self { addr: SocketAddr::new(ip, port), instance }),
            more => Err(GroupWireError::Long(more)),
        }
    }
}

/// The first message of each end of a connection of a group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GroupHello {
    /// How often the group has become smaller, and [`OF_RELAYS`].
    pub epoch: u32,
    /// The group's ranks, by their numbers in the group of epoch 0.
    pub members: Vec<u32>,
}

impl GroupHello {
    /// As bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        encode_list(HELLO_MAGIC, self.epoch, &self.members)
    }

    /// Reads a hello.
    ///
    /// # Errors
    /// The bytes are not a hello.
    pub fn decode(bytes: &[u8]) -> Result<Self, GroupWireError> {
        let (epoch, members) = decode_list(HELLO_MAGIC, "a hello of a group", bytes)?;
        Ok(Self { epoch, members })
    }
}

/// The word of a rank that has given a call of its group up.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GroupNotice {
    /// The epoch of the group.
    pub epoch: u32,
    /// The ranks that it has lost, by their numbers in this group; none if it has another reason.
    pub lost: Vec<u32>,
}

impl GroupNotice {
    /// As bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        encode_list(NOTICE_MAGIC, self.epoch, &self.lost)
    }

    /// Reads a notice.
    ///
    /// # Errors
    /// The bytes are not a notice.
    pub fn decode(bytes: &[u8]) -> Result<Self, GroupWireError> {
        let (epoch, lost) = decode_list(NOTICE_MAGIC, "a notice of a group", bytes)?;
        Ok(Self { epoch, lost })
    }
}

fn encode_list(magic: [u8; 4], epoch: u32, ranks: &[u32]) -> Vec<u8> {
    let mut out = Vec::with_capacity(8 + 4 * ranks.len());
    out.extend(magic);
    out.extend(epoch.to_le_bytes());
    out.extend(ranks.iter().flat_map(|rank| rank.to_le_bytes()));
    out
}

fn decode_list(
    magic: [u8; 4],
    name: &'static str,
    bytes: &[u8],
) -> Result<(u32, Vec<u32>), GroupWireError> {
    let mut r = Reader::new(bytes);
    if r.array()? != magic {
        return Err(GroupWireError::Magic(name));
    }
    let epoch = r.u32_le()?;
    let (ranks, rest) = bytes[8..].as_chunks::<4>();
    if ranks.len() > MOST_RANKS || !rest.is_empty() {
        return Err(GroupWireError::Long(rest.len().max(ranks.len().saturating_sub(MOST_RANKS))));
    }
    Ok((epoch, ranks.iter().copied().map(u32::from_le_bytes).collect()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_card_survives_its_bytes(ip: [u8; 16], port: u16, instance: u64) {
            let ip = IpAddr::from(Ipv6Addr::from(ip)).to_canonical();
            let card = RankCard { addr: SocketAddr::new(ip, port), instance };
            prop_assert_eq!(RankCard::decode(&card.encode()), Ok(card));
        }

        #[test]
        fn lists_survive_their_bytes(epoch: u32, ranks: Vec<u32>) {
            let hello = GroupHello { epoch, members: ranks.clone() };
            prop_assert_eq!(GroupHello::decode(&hello.encode()), Ok(hello.clone()));
            let notice = GroupNotice { epoch, lost: ranks };
            prop_assert_eq!(GroupNotice::decode(&notice.encode()), Ok(notice.clone()));
            prop_assert!(GroupNotice::decode(&hello.encode()).is_err());
            prop_assert!(GroupHello::decode(&notice.encode()).is_err());
        }

        #[test]
        fn other_bytes_are_refused(bytes: Vec<u8>) {
            for layout in [CARD_MAGIC, HELLO_MAGIC, NOTICE_MAGIC] {
                let bytes = [&layout[..], &bytes].concat();
                if let Ok(card) = RankCard::decode(&bytes) {
                    prop_assert_eq!(bytes.len(), RANK_CARD_LEN);
                    prop_assert_eq!(RankCard::decode(&card.encode()), Ok(card));
                }
                let hello = GroupHello::decode(&bytes);
                prop_assert!(hello.is_err() || bytes.len().is_multiple_of(4));
                let notice = GroupNotice::decode(&bytes);
                prop_assert!(notice.is_err() || bytes.len().is_multiple_of(4));
            }
        }
    }
}
