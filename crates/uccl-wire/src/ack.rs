//! Acknowledgements of numbered packets: the largest number that came, and which of those before
//! it.
//!
//! | offset | type | field |
//! | --- | --- | --- |
//! | 0 | u32 | magic (upper 24 bits) and version (lower 8) |
//! | 4 | u32 | the largest packet number that has come |
//! | 8 | u32 | how long it had been there when this was written, in nanoseconds; `u32::MAX`: that or more |
//! | 12 | u32 | 0 |
//! | 16 | 4 x u64 | bit i, counted from the lowest bit of the first word: number largest - 1 - i has come |
//!
//! All numbers are little endian. Packet numbers wrap; `uccl-tran` defines their meaning.

use std::time::Duration;

use crate::cursor::{Reader, ShortInput};

/// Bytes of an acknowledgement.
pub const ACK_LEN: usize = 48;
/// The span of an acknowledgement: packet numbers before the largest.
pub const ACK_SPAN: u32 = 256;

const MAGIC: u32 = 0x5543_4b00;
const VERSION: u8 = 1;

/// Which packets have come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ack {
    /// The largest packet number that has come.
    pub largest: u32,
    /// How long it had been there when this was written, in nanoseconds, or `u32::MAX`.
    pub delay_ns: u32,
    /// Which of the [`ACK_SPAN`] numbers before it have come; see [`Ack::has`].
    pub before: [u64; 4],
}

/// Why bytes are not an acknowledgement.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AckError {
    /// They end too early.
    #[error(transparent)]
    Truncated(#[from] ShortInput),
    /// More follows.
    #[error("{0} bytes follow the acknowledgement")]
    TooLong(usize),
    /// The bytes are something else.
    #[error("not an acknowledgement: its magic is {0:#010x}")]
    WrongMagic(u32),
    /// One of another version of this library.
    #[error("the acknowledgement has version {0}, this library reads version {VERSION}")]
    WrongVersion(u8),
    /// A field that must be 0 is not.
    #[error("{0:#010x} where 0 must be")]
    NotZero(u32),
}

impl Ack {
    /// Whether the packet `back` numbers before the largest has come, by this acknowledgement.
    #[must_use]
    pub fn has(&self, back: u32) -> bool {
        let Some(bit) = back.checked_sub(1) else { return true };
        self.before.get(bit as usize / 64).is_some_and(|word| word >> (bit % 64) & 1 == 1)
    }

    /// How far before the largest the earliest packet is that has come, by this acknowledgement.
    #[must_use]
    pub fn reach(&self) -> u32 {
        let words = [4, 3, 2, 1].into_iter().zip(self.before.into_iter().rev());
        let mut reach =
            words.filter(|(_, word)| *word != 0).map(|(n, word)| n * 64 - word.leading_zeros());
        reach.next().unwrap_or(0)
    }

    /// How long the largest had been there when this was written.
    #[must_use]
    pub fn delay(&self) -> Duration {
        Duration::from_nanos(self.delay_ns.into())
    }

    /// Its bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; ACK_LEN] {
        let mut out = [0; ACK_LEN];
        let words = [MAGIC | u32::from(VERSION), self.largest, self.delay_ns, 0];
        let (head, bitmap) = out.split_at_mut(16);
        for (bytes, word) in head.chunks_exact_mut(4).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        for (bytes, word) in bitmap.chunks_exact_mut(8).zip(self.before) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        out
    }

    /// Reads an acknowledgement.
    ///
    /// # Errors
    /// The bytes are not exactly one, of this version.
    pub fn decode(bytes: &[u8]) -> Result<Self, AckError> {
        let mut reader = Reader::new(bytes);
        let magic = reader.u32_le()?;
        if magic & !0xff != MAGIC {
            return Err(AckError::WrongMagic(magic));
        }
        if magic as u8 != VERSION {
            return Err(AckError::WrongVersion(magic as u8));
        }
        let (largest, delay_ns, zero) = (reader.u32_le()?, reader.u32_le()?, reader.u32_le()?);
        let mut before = [0; 4];
        for word in &mut before {
            *word = reader.u64_le()?;
        }
        if zero != 0 {
            return Err(AckError::NotZero(zero));
        }
        match reader.remaining() {
            0 => Ok(Self { largest, delay_ns, before }),
            more => Err(AckError::TooLong(more)),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn round_trips(largest: u32, delay_ns: u32, before: [u64; 4]) {
            let ack = Ack { largest, delay_ns, before };
            prop_assert_eq!(Ack::decode(&ack.encode()), Ok(ack));
        }

        #[test]
        fn reach_is_the_earliest_that_came(before: [u64; 4], keep in 0u32..=256) {
            let cut = |word: u32| u64::MAX.checked_shl(keep.saturating_sub(word * 64)).map_or(0, |m| !m);
            let cut = |word: u32| if keep >= (word + 1) * 64 { u64::MAX } else { cut(word) };
            let before = [0, 1, 2, 3].map(|word| before[word as usize] & cut(word));
            let ack = Ack { largest: 0, delay_ns: 0, before };
            let earliest = (0..=300).rev().find(|back| ack.has(*back));
            prop_assert_eq!(Some(ack.reach()), earliest);
        }

        #[test]
        fn other_lengths_are_refused(before: [u64; 4], len in 0usize..100) {
            prop_assume!(len != ACK_LEN);
            let mut bytes = Ack { largest: 1, delay_ns: 2, before }.encode().to_vec();
            bytes.resize(len, 0);
            prop_assert!(Ack::decode(&bytes).is_err());
        }

        #[test]
        fn any_bytes_never_panic(bytes: Vec<u8>, block: [u8; 16]) {
            let _ = Ack::decode(&bytes);
            let _ = Ack::decode(&[block, block, block].concat());
        }
    }

    #[test]
    fn layout() {
        let bytes = Ack { largest: 0x0102_0304, delay_ns: 5, before: [1, 0, 0, 1 << 63] }.encode();
        assert_eq!(bytes[..16], *b"\x01KCU\x04\x03\x02\x01\x05\0\0\0\0\0\0\0");
        assert_eq!(bytes[16..24], [1, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes[40..], [0, 0, 0, 0, 0, 0, 0, 0x80]);
    }

    #[test]
    fn another_version_and_filled_gaps_are_refused() {
        let good = Ack { largest: 1, delay_ns: 2, before: [3; 4] }.encode();
        let with = |at: usize, byte| {
            let mut bytes = good;
            bytes[at] = byte;
            Ack::decode(&bytes)
        };
        assert_eq!(with(0, 2), Err(AckError::WrongVersion(2)));
        assert_eq!(with(3, 0), Err(AckError::WrongMagic(0x0043_4b01)));
        assert_eq!(with(13, 1), Err(AckError::NotZero(0x100)));
    }
}
