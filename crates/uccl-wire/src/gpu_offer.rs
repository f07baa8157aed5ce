//! GPU offers: a process offers GPU memory for other processes of its host to open.
//!
//! | offset | type | field |
//! | --- | --- | --- |
//! | 0 | u32 | id, to which regions in this memory refer |
//! | 4 | u32 | number of pieces that travel as file descriptors; 0: the handle names all of it |
//! | 8 | 16 B | UUID of the GPU |
//! | 24 | u64 | where the memory starts in its owner's process |
//! | 32 | u64 | its length in bytes |
//! | 40 | 64 B | IPC handle, or zeros |
//! | 104 | u64 each | lengths of the pieces, in bytes |
//!
//! All numbers are little endian.

use crate::cursor::{Reader, ShortInput};

/// Bytes before the lengths of the pieces.
const HEAD_LEN: usize = 104;
/// Most pieces of an offer: one message can carry as many descriptors, with some to spare.
pub const MAX_OFFER_PIECES: usize = 64;

/// GPU memory that peers of the same host can open.
#[derive(Clone, PartialEq, Eq)]
pub struct GpuOffer {
    /// The id to which regions in this memory refer.
    pub id: u32,
    /// UUID of the GPU.
    pub gpu: [u8; 16],
    /// Where the memory starts in its owner's process.
    pub base: u64,
    /// Its length in bytes.
    pub len: u64,
    /// How it is named.
    pub means: Means,
}

/// How offered GPU memory is named.
#[derive(Clone, PartialEq, Eq)]
pub enum Means {
    /// File descriptors travel with the offer, one a piece; these are the pieces' lengths in bytes.
    Descriptors(Vec<u64>),
    /// An IPC handle names the whole allocation.
    Handle([u8; 64]),
}

/// A process that has a handle can write to the memory: it is as secret as the memory's contents.
impl std::fmt::Debug for GpuOffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { id, base, len, .. } = self;
        write!(f, "GpuOffer({id}: {len} bytes at {base:#x})")
    }
}

/// Why bytes are not a GPU offer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GpuOfferError {
    /// They end too early.
    #[error(transparent)]
    Truncated(#[from] ShortInput),
    /// More follows than was announced.
    #[error("{0} bytes follow the offer")]
    TooLong(usize),
    /// More pieces than an offer has.
    #[error("{0} pieces; an offer has at most {MAX_OFFER_PIECES}")]
    TooManyPieces(u32),
    /// The pieces do not add up, or the range has no end.
    #[error("the lengths make no sense")]
    Lengths,
}

impl GpuOffer {
    /// The offer's bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let (pieces, handle): (&[u64], _) = match &self.means {
            Means::Descriptors(pieces) => (pieces, [0; 64]),
            Means::Handle(handle) => (&[], *handle),
        };
        let mut out = Vec::with_capacity(HEAD_LEN + 8 * pieces.len());
        out.extend_from_slice(&self.id.to_le_bytes());
        out.extend_from_slice(&(pieces.len() as u32).to_le_bytes());
        out.extend_from_slice(&self.gpu);
        out.extend_from_slice(&self.base.to_le_bytes());
        out.extend_from_slice(&self.len.to_le_bytes());
        out.extend_from_slice(&handle);
        pieces.iter().for_each(|len| out.extend_from_slice(&len.to_le_bytes()));
        out
    }

    /// Reads an offer.
    ///
    /// # Errors
    /// When the bytes are not one. The pieces are known to add up to the length, and the range to
    /// have an end.
    pub fn decode(bytes: &[u8]) -> Result<Self, GpuOfferError> {
        let mut reader = Reader::new(bytes);
        let id = reader.u32_le()?;
        let count = reader.u32_le()?;
        let gpu = reader.array()?;
        let (base, len) = (reader.u64_le()?, reader.u64_le()?);
        let handle = reader.array()?;
        if count as usize > MAX_OFFER_PIECES {
            return Err(GpuOfferError::TooManyPieces(count));
        }
        let pieces = (0..count).map(|_| reader.u64_le()).collect::<Result<Vec<_>, _>>()?;
        if reader.remaining() > 0 {
            return Err(GpuOfferError::TooLong(reader.remaining()));
        }
        let sum = pieces.iter().try_fold(0u64, |sum, len| sum.checked_add(*len));
        let adds_up = count == 0 || sum == Some(len);
        if !adds_up || len == 0 || base.checked_add(len).is_none() {
            return Err(GpuOfferError::Lengths);
        }
        let means = if count == 0 { Means::Handle(handle) } else { Means::Descriptors(pieces) };
        Ok(Self { id, gpu, base, len, means })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn offers_survive_the_wire(
            id: u32, gpu: [u8; 16], base in 0u64..1 << 48,
            handle: [u8; 32], pieces in prop::collection::vec(1u64..1 << 40, 0..20),
        ) {
            let means = if pieces.is_empty() {
                let mut whole = [7; 64];
                whole[..32].copy_from_slice(&handle);
                Means::Handle(whole)
            } else {
                Means::Descriptors(pieces.clone())
            };
            let len = pieces.iter().sum::<u64>().max(1);
            let offer = GpuOffer { id, gpu, base, len, means };
            prop_assert_eq!(GpuOffer::decode(&offer.encode()), Ok(offer));
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            if let Ok(offer) = GpuOffer::decode(&bytes) {
                prop_assert_eq!(GpuOffer::decode(&offer.encode()), Ok(offer));
            }
        }
    }

    #[test]
    fn an_offer_that_does_not_add_up_is_refused() {
        let whole = GpuOffer {
            id: 1,
            gpu: [2; 16],
            base: 4096,
            len: 30,
            means: Means::Descriptors(vec![10, 20]),
        };
        let refused = |change: fn(&mut GpuOffer)| {
            let mut offer = whole.clone();
            change(&mut offer);
            GpuOffer::decode(&offer.encode())
        };
        assert!(refused(|_| {}).is_ok());
        assert_eq!(refused(|offer| offer.len = 31), Err(GpuOfferError::Lengths));
        assert_eq!(refused(|offer| offer.base = u64::MAX - 5), Err(GpuOfferError::Lengths));
        let many = refused(|offer| offer.means = Means::Descriptors(vec![1; 65]));
        assert_eq!(many, Err(GpuOfferError::TooManyPieces(65)));
        let bytes = whole.encode();
        for cut in 0..bytes.len() {
            assert!(GpuOffer::decode(&bytes[..cut]).is_err());
        }
        let mut long = bytes;
        long.push(0);
        assert_eq!(GpuOffer::decode(&long), Err(GpuOfferError::TooLong(1)));
    }
}
