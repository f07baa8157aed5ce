//! The card of a rank in an expert-parallel group: other ranks find its window by it.
//!
//! | offset | type | field |
//! | --- | --- | --- |
//! | 0 | u32 | magic and version |
//! | 4 | u32 | rank |
//! | 8 | u32 | ranks of the group |
//! | 12 | u32 | process |
//! | 16 | u32 | descriptor of the window there |
//! | 20 | u16 | port of the endpoint; 0 if there is none, and then all that follows of it is 0 too |
//! | 22 | u16 | 0 |
//! | 24 | u64 | bytes of the pool |
//! | 32 | u64 | nonce, which the window has too |
//! | 40 | u64 | number of the next call |
//! | 48 | u64 | node |
//! | 56 | 36 B | the kernel's boot id, as text |
//! | 92 | u32 | generation |
//! | 96 | 16 B | the endpoint's IP address; IPv4 as an IPv6 address |
//! | 112 | u64 | the endpoint's instance |
//! | 120 | 64 B | advert of the window |
//!
//! All numbers are little endian.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use crate::advert::{ADVERT_LEN, Advert, AdvertError};

/// Bytes of a card.
pub const EP_CARD_LEN: usize = 184;
/// Bytes of a boot id.
pub const HOST_LEN: usize = 36;

const MAGIC: u32 = 0x5543_4503;
const HOST_AT: usize = 56;
const GENERATION_AT: usize = 92;
const IP_AT: usize = 96;
const INSTANCE_AT: usize = 112;
const ADVERT_AT: usize = 120;

/// A card; see the module.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EpCard {
    /// Which rank it is.
    pub rank: u32,
    /// How many ranks there are.
    pub ranks: u32,
    /// Its process.
    pub pid: u32,
    /// The window's descriptor in that process.
    pub descriptor: u32,
    /// Bytes of its pool.
    pub pool: u64,
    /// A random number that the window has too.
    pub nonce: u64,
    /// The number of its next call.
    pub next_call: u64,
    /// How often it has met others in this group; 0 for a rank that comes for the first time.
    pub generation: u32,
    /// Ranks of one node, on one kernel, map each other's windows.
    pub node: u64,
    /// The boot id of its kernel.
    pub host: [u8; HOST_LEN],
    /// How ranks of other nodes reach it.
    pub endpoint: Option<EpEndpoint>,
}

/// How ranks of other nodes reach a window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EpEndpoint {
    /// Where the rank's endpoint listens.
    pub addr: SocketAddr,
    /// The endpoint's random number, different for each endpoint.
    pub instance: u64,
    /// All of the window.
    pub window: Advert,
}

/// Why bytes are not a card.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EpCardError {
    /// Cards have another length.
    #[error("a rank's card is not {0} bytes long")]
    WrongLength(usize),
    /// The bytes are something else, or of another version.
    #[error("not a rank's card: its magic is {0:#010x}")]
    WrongMagic(u32),
    /// The rank is none of the group's.
    #[error("a card of rank {rank} of {ranks}")]
    NoSuchRank {
        /// The rank in the card.
        rank: u32,
        /// The number of ranks in the card.
        ranks: u32,
    },
    /// The window's handle is of an unknown kind.
    #[error("a window with a handle of kind {0}")]
    WrongHandle(u32),
    /// The window's advert is none.
    #[error("the window's advert: {0}")]
    Advert(#[from] AdvertError),
}

impl EpCard {
    /// As bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; EP_CARD_LEN] {
        let mut out = [0; EP_CARD_LEN];
        let port = self.endpoint.map_or(0, |endpoint| endpoint.addr.port());
        let words = [MAGIC, self.rank, self.ranks, self.pid, self.descriptor, port.into()];
        for (word, out) in words.iter().zip(out.as_chunks_mut::<4>().0) {
            *out = word.to_le_bytes();
        }
        let longs = [self.pool, self.nonce, self.next_call, self.node];
        for (long, out) in longs.iter().zip(out[24..HOST_AT].as_chunks_mut::<8>().0) {
            *out = long.to_le_bytes();
        }
        out[HOST_AT..][..HOST_LEN].copy_from_slice(&self.host);
        out[GENERATION_AT..IP_AT].copy_from_slice(&self.generation.to_le_bytes());
        if let Some(EpEndpoint { addr, instance, window }) = self.endpoint {
            let ip = match addr.ip() {
                IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                IpAddr::V6(ip) => ip,
            };
            out[IP_AT..INSTANCE_AT].copy_from_slice(&ip.octets());
            out[INSTANCE_AT..ADVERT_AT].copy_from_slice(&instance.to_le_bytes());
            out[ADVERT_AT..].copy_from_slice(&window.encode());
        }
        out
    }

    /// Reads a card.
    ///
    /// # Errors
    /// The bytes are not a card.
    pub fn decode(bytes: &[u8]) -> Result<Self, EpCardError> {
        let Ok(bytes) = <&[u8; EP_CARD_LEN]>::try_from(bytes) else {
            return Err(EpCardError::WrongLength(bytes.len()));
        };
        let word = |at: usize| u32::from_le_bytes(field(bytes, 4 * at));
        let long = |at: usize| u64::from_le_bytes(field(bytes, at));
        if word(0) != MAGIC {
            return Err(EpCardError::WrongMagic(word(0)));
        }
        let [rank, ranks, pid, descriptor] = [1, 2, 3, 4].map(word);
        if rank >= ranks {
            return Err(EpCardError::NoSuchRank { rank, ranks });
        }
        let [pool, nonce, next_call, node] = [24, 32, 40, 48].map(long);
        let endpoint = match u16::from_le_bytes(field(bytes, 20)) {
            0 => None,
            port => {
                let ip = IpAddr::from(Ipv6Addr::from(field::<16>(bytes, IP_AT))).to_canonical();
                let window = Advert::decode(&field::<ADVERT_LEN>(bytes, ADVERT_AT))?;
                let addr = SocketAddr::new(ip, port);
                Some(EpEndpoint { addr, instance: long(INSTANCE_AT), window })
            }
        };
        let host = field(bytes, HOST_AT);
        let generation = u32::from_le_bytes(field(bytes, GENERATION_AT));
        Ok(Self {
            rank,
            ranks,
            pid,
            descriptor,
            pool,
            nonce,
            next_call,
            generation,
            node,
            host,
            endpoint,
        })
    }

    /// Whether the ranks of both cards can map each other's windows.
    #[must_use]
    pub fn is_near(&self, other: &Self) -> bool {
        (self.host, self.node) == (other.host, other.node)
    }
}

/// The bytes of a field, which are there.
fn field<const LEN: usize>(bytes: &[u8; EP_CARD_LEN], at: usize) -> [u8; LEN] {
    bytes[at..].first_chunk().copied().unwrap_or([0; LEN])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn endpoint(at: ([u8; 16], u16), numbers: [u64; 3]) -> EpEndpoint {
        let [instance, key, len] = numbers;
        let (ip, port) = (IpAddr::from(Ipv6Addr::from(at.0)).to_canonical(), at.1);
        let window = Advert { addr: 1 << 20, len: len >> 1, key, slot: 7, instance: 9 };
        EpEndpoint { addr: SocketAddr::new(ip, port), instance, window }
    }

    proptest! {
        #[test]
        fn a_card_survives_its_bytes(
            numbers: [u32; 4], longs: [u64; 4], ranks in 1u32.., host in proptest::array::uniform32(0u8..),
            far in proptest::option::of((any::<[u8; 16]>(), 1u16.., any::<[u64; 3]>())),
        ) {
            let [rank, pid, descriptor, generation] = numbers;
            let [pool, nonce, next_call, node] = longs;
            let mut id = [b'-'; HOST_LEN];
            id[..32].copy_from_slice(&host);
            let rank = rank % ranks;
            let endpoint = far.map(|(ip, port, numbers)| endpoint((ip, port), numbers));
            let card = EpCard {
                rank, ranks, pid, descriptor, pool, nonce, next_call, generation, node, host: id, endpoint,
            };
            prop_assert_eq!(EpCard::decode(&card.encode()), Ok(card));
        }

        #[test]
        fn any_bytes_are_refused_or_a_card(bytes in proptest::collection::vec(0u8.., 0..200)) {
            if let Ok(card) = EpCard::decode(&bytes) {
                prop_assert!(card.rank < card.ranks);
            }
        }
    }

    #[test]
    fn bytes_that_are_no_card_are_refused_with_the_reason() {
        assert_eq!(EpCard::decode(&[0; 3]), Err(EpCardError::WrongLength(3)));
        assert_eq!(EpCard::decode(&[0; EP_CARD_LEN]), Err(EpCardError::WrongMagic(0)));
        let mut bytes = [0; EP_CARD_LEN];
        bytes[..12].copy_from_slice(&[3, 0x45, 0x43, 0x55, 0, 0, 0, 0, 1, 0, 0, 0]);
        assert!(EpCard::decode(&bytes).is_ok_and(|card| card.endpoint.is_none()));
        bytes[20] = 1;
        assert!(matches!(EpCard::decode(&bytes), Err(EpCardError::Advert(_))));
    }
}
