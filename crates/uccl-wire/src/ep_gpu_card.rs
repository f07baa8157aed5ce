//! The card of a rank with its window in GPU memory, for the other ranks of its group.
//!
//! | offset | type | field |
//! | --- | --- | --- |
//! | 0 | u32 | magic and version |
//! | 4 | u32 | rank |
//! | 8 | u32 | ranks of the group |
//! | 12 | u32 | bytes of marks between the window's words and its pool |
//! | 16 | u64 | bytes of the pool |
//! | 24 | u64 | nonce, which the window has too |
//! | 32 | u64 | a random number of its process |
//! | 40 | 36 B | the kernel's boot id, as text |
//! | 76 | 64 B | the handle by which other processes open the window |
//! | 140 | u32 | its process, as its host numbers it |
//! | 144 | u64 | when that process was started, in ticks since the host was |
//! | 152 | u64 | the number of the rank's next call |
//! | 160 | u32 | the number of its meetings with others before |
//! | 164 | u32 | the kind of the handle: 0 for processes of the host, 1 for those of the NVLink domain |
//! | 168 | u64 | bytes to map, for a handle of kind 1 |
//!
//! All numbers are little endian. A process that has the handle can write to the window.

use crate::ep_card::{EpCardError, HOST_LEN};

/// Bytes of a card.
pub const EP_GPU_CARD_LEN: usize = 176;

const MAGIC: u32 = 0x5543_4705;

/// The kind of a handle.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EpGpuHandleKind {
    /// Processes of the same host open it.
    Host,
    /// Processes of the same NVLink domain open it, on any host, and map this number of bytes.
    Fabric {
        /// Bytes to map.
        len: u64,
    },
}

impl EpGpuHandleKind {
    fn to_words(self) -> (u32, u64) {
        match self {
            Self::Host => (0, 0),
            Self::Fabric { len } => (1, len),
        }
    }

    fn of_words(kind: u32, len: u64) -> Result<Self, EpCardError> {
        match kind {
            0 => Ok(Self::Host),
            1 => Ok(Self::Fabric { len }),
            kind => Err(EpCardError::WrongHandle(kind)),
        }
    }
}

/// A card; see the module.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct EpGpuCard {
    /// Which rank it is.
    pub rank: u32,
    /// How many ranks there are.
    pub ranks: u32,
    /// Bytes of the marks that are before its pool.
    pub marks: u32,
    /// Bytes of its pool.
    pub pool: u64,
    /// A random number that the window has too.
    pub nonce: u64,
    /// A random number that its process has.
    pub process: u64,
    /// The boot id of its kernel.
    pub host: [u8; HOST_LEN],
    /// The handle by which other processes open the window.
    pub handle: [u8; 64],
    /// The kind of the handle.
    pub kind: EpGpuHandleKind,
    /// Its process's number.
    pub pid: u32,
    /// When its process was started: another one with this number was started at another time.
    pub started: u64,
    /// The number of its next call.
    pub next_call: u64,
    /// How often it has met others before.
    pub generation: u32,
}

impl EpGpuCard {
    /// As bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; EP_GPU_CARD_LEN] {
        let mut out = [0; EP_GPU_CARD_LEN];
        for (word, out) in
            [MAGIC, self.rank, self.ranks, self.marks].iter().zip(out.as_chunks_mut::<4>().0)
        {
            *out = word.to_le_bytes();
        }
        let longs = [self.pool, self.nonce, self.process];
        for (long, out) in longs.iter().zip(out[16..40].as_chunks_mut::<8>().0) {
            *out = long.to_le_bytes();
        }
        out[40..76].copy_from_slice(&self.host);
        out[76..140].copy_from_slice(&self.handle);
        out[140..144].copy_from_slice(&self.pid.to_le_bytes());
        out[144..152].copy_from_slice(&self.started.to_le_bytes());
        out[152..160].copy_from_slice(&self.next_call.to_le_bytes());
        out[160..164].copy_from_slice(&self.generation.to_le_bytes());
        let (kind, len) = self.kind.to_words();
        out[164..168].copy_from_slice(&kind.to_le_bytes());
        out[168..].copy_from_slice(&len.to_le_bytes());
        out
    }

    /// Reads a card.
    ///
    /// # Errors
    /// The bytes are not a card.
    pub fn decode(bytes: &[u8]) -> Result<Self, EpCardError> {
        let Ok(bytes) = <&[u8; EP_GPU_CARD_LEN]>::try_from(bytes) else {
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
        let [rank, ranks, marks] = [1, 2, 3].map(word);
        if rank >= ranks {
            return Err(EpCardError::NoSuchRank { rank, ranks });
        }
        let [pool, nonce, process, started, next_call] = [16, 24, 32, 144, 152].map(long);
        let [pid, generation] = [35, 40].map(word);
        let kind = EpGpuHandleKind::of_words(word(41), long(168))?;
        let host = bytes[40..].first_chunk().copied().unwrap_or([0; HOST_LEN]);
        let handle = bytes[76..].first_chunk().copied().unwrap_or([0; 64]);
        Ok(Self {
            rank,
            ranks,
            marks,
            pool,
            nonce,
            process,
            host,
            handle,
            kind,
            pid,
            started,
            next_call,
            generation,
        })
    }
}

impl std::fmt::Debug for EpGpuCard {
    /// Without the handle, which is a secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { rank, ranks, pool, .. } = self;
        write!(f, "EpGpuCard {{ rank: {rank}, ranks: {ranks}, pool: {pool}, .. }}")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_card_survives_its_bytes(
            rank: u32, longs: [u64; 5], pid: u32, ranks in 1u32.., marks: u32, generation: u32,
            host in proptest::array::uniform32(0u8..), fabric: Option<u64>,
        ) {
            let mut id = [b'-'; HOST_LEN];
            id[..32].copy_from_slice(&host);
            let mut handle = [7; 64];
            handle[..32].copy_from_slice(&host);
            let [pool, nonce, process, started, next_call] = longs;
            let rank = rank % ranks;
            let host = id;
            let kind = fabric.map_or(EpGpuHandleKind::Host, |len| EpGpuHandleKind::Fabric { len });
            let card = EpGpuCard {
                rank, ranks, marks, pool, nonce, process, host, handle, kind, pid, started, next_call,
                generation,
            };
            prop_assert_eq!(EpGpuCard::decode(&card.encode()), Ok(card));
        }

        #[test]
        fn any_bytes_are_refused_or_a_card(bytes in proptest::collection::vec(0u8.., 0..200)) {
            if let Ok(card) = EpGpuCard::decode(&bytes) {
                prop_assert!(card.rank < card.ranks);
            }
        }
    }

    #[test]
    fn bytes_that_are_no_card_are_refused_with_the_reason() {
        assert_eq!(EpGpuCard::decode(&[0; 3]), Err(EpCardError::WrongLength(3)));
        let cpu = EpGpuCard::decode(&[0; EP_GPU_CARD_LEN]);
        assert_eq!(cpu, Err(EpCardError::WrongMagic(0)));
        let mut card = [0; EP_GPU_CARD_LEN];
        card[..4].copy_from_slice(&MAGIC.to_le_bytes());
        card[8] = 1;
        assert!(EpGpuCard::decode(&card).is_ok());
        card[164] = 9;
        assert_eq!(EpGpuCard::decode(&card), Err(EpCardError::WrongHandle(9)));
    }
}
