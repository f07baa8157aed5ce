//! What a rank of a group of experts tells the others, so that they find its window.
//!
//! | offset | type | field |
//! | --- | --- | --- |
//! | 0 | u32 | magic and version |
//! | 4 | u32 | rank |
//! | 8 | u32 | ranks of the group |
//! | 12 | u32 | process |
//! | 16 | u32 | descriptor of the window there |
//! | 20 | u32 | 0 |
//! | 24 | u64 | bytes of the pool |
//! | 32 | u64 | nonce, which the window has too |
//! | 40 | u64 | number of the next call |
//! | 48 | 36 B | the kernel's boot id, as text |
//!
//! All numbers are little endian.

/// Bytes of a card.
pub const EP_CARD_LEN: usize = 84;
/// Bytes of a boot id.
pub const HOST_LEN: usize = 36;

const MAGIC: u32 = 0x5543_4501;

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
    /// The boot id of its kernel.
    pub host: [u8; HOST_LEN],
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
        /// The rank it says.
        rank: u32,
        /// The ranks it says there are.
        ranks: u32,
    },
}

impl EpCard {
    /// As bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; EP_CARD_LEN] {
        let mut out = [0; EP_CARD_LEN];
        let words = [MAGIC, self.rank, self.ranks, self.pid, self.descriptor, 0];
        for (word, out) in words.iter().zip(out.as_chunks_mut::<4>().0) {
            *out = word.to_le_bytes();
        }
        let longs = [self.pool, self.nonce, self.next_call];
        for (long, out) in longs.iter().zip(out[24..48].as_chunks_mut::<8>().0) {
            *out = long.to_le_bytes();
        }
        out[48..].copy_from_slice(&self.host);
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
        let word = |at: usize| {
            u32::from_le_bytes(bytes[4 * at..].first_chunk().copied().unwrap_or_default())
        };
        let long =
            |at: usize| u64::from_le_bytes(bytes[at..].first_chunk().copied().unwrap_or_default());
        if word(0) != MAGIC {
            return Err(EpCardError::WrongMagic(word(0)));
        }
        let [rank, ranks, pid, descriptor] = [1, 2, 3, 4].map(word);
        if rank >= ranks {
            return Err(EpCardError::NoSuchRank { rank, ranks });
        }
        let [pool, nonce, next_call] = [24, 32, 40].map(long);
        let host = bytes[48..].first_chunk().copied().unwrap_or([0; HOST_LEN]);
        Ok(Self { rank, ranks, pid, descriptor, pool, nonce, next_call, host })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_card_survives_its_bytes(
            numbers: [u32; 3], longs: [u64; 3], ranks in 1u32.., host in proptest::array::uniform32(0u8..),
        ) {
            let [rank, pid, descriptor] = numbers;
            let [pool, nonce, next_call] = longs;
            let mut id = [b'-'; HOST_LEN];
            id[..32].copy_from_slice(&host);
            let rank = rank % ranks;
            let card = EpCard { rank, ranks, pid, descriptor, pool, nonce, next_call, host: id };
            prop_assert_eq!(EpCard::decode(&card.encode()), Ok(card));
        }

        #[test]
        fn any_bytes_are_refused_or_a_card(bytes in proptest::collection::vec(0u8.., 0..100)) {
            if let Ok(card) = EpCard::decode(&bytes) {
                prop_assert!(card.rank < card.ranks);
            }
        }
    }

    #[test]
    fn what_is_no_card_is_named() {
        assert_eq!(EpCard::decode(&[0; 3]), Err(EpCardError::WrongLength(3)));
        assert_eq!(EpCard::decode(&[0; EP_CARD_LEN]), Err(EpCardError::WrongMagic(0)));
    }
}
