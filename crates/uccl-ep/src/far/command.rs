//! Commands of producers to a proxy: 128 bits each.
//!
//! | half | bits | write | signal |
//! | --- | --- | --- | --- |
//! | 0 | 63 | lap | lap |
//! | 0 | 62 | 0 | 1 |
//! | 0 | 46 to 61 | peer | peer |
//! | 0 | 0 to 31 | source, in units | word of the peer's window |
//! | 1 | 63 | lap | lap |
//! | 1 | 31 to 62 | target, in units | mark, from bit 0 |
//! | 1 | 0 to 30 | length, in units | |
//!
//! The lap is the ring's (see [`fifo`](super::fifo)). Units have [`UNIT`] bytes, so offsets reach
//! 128 GiB and lengths 64 GiB.

/// Bytes of a unit of offsets and lengths.
pub(crate) const UNIT: usize = 32;
/// The bit of each half that belongs to the ring.
pub(crate) const LAP: u64 = 1 << 63;

pub(crate) const IS_SIGNAL: u64 = 1 << 62;
pub(crate) const PEER_AT: u32 = 46;
pub(crate) const TARGET_AT: u32 = 31;
const MAX_LEN: u64 = (1 << TARGET_AT) - 1;

/// A command to a proxy. Offsets and lengths are in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Command {
    /// Copies from this rank's memory into a peer's window.
    Write {
        /// The peer's rank.
        peer: u16,
        /// The offset of the bytes in the memory that was registered to send from.
        source: usize,
        /// The offset of their target in the window.
        target: usize,
        /// The number of bytes.
        len: usize,
    },
    /// Sets a word of a peer's window when all writes to it that came before are there.
    Signal {
        /// The peer's rank.
        peer: u16,
        /// The index of a word of eight bytes in the window.
        word: u32,
        /// Its new value, less than 2^63.
        mark: u64,
    },
}

impl Command {
    /// The command as two halves, with the ring's bits clear. `None`: a value is out of its range,
    /// or no multiple of a unit.
    pub(crate) fn to_halves(self) -> Option<[u64; 2]> {
        match self {
            Self::Write { peer, source, target, len } => {
                let [source, target] = [source, target].map(|at| units(at, u32::MAX.into()));
                let len = units(len, MAX_LEN)?;
                Some([u64::from(peer) << PEER_AT | source?, target? << TARGET_AT | len])
            }
            Self::Signal { peer, word, mark } => {
                let first = IS_SIGNAL | u64::from(peer) << PEER_AT | u64::from(word);
                (mark < LAP).then_some([first, mark])
            }
        }
    }

    /// The command in two halves; the ring's bits are ignored.
    pub(crate) fn of_halves([first, second]: [u64; 2]) -> Self {
        let peer = (first >> PEER_AT) as u16;
        let low = first as u32;
        match first & IS_SIGNAL {
            0 => Self::Write {
                peer,
                source: low as usize * UNIT,
                target: ((second & !LAP) >> TARGET_AT) as usize * UNIT,
                len: (second & MAX_LEN) as usize * UNIT,
            },
            _ => Self::Signal { peer, word: low, mark: second & !LAP },
        }
    }
}

fn units(bytes: usize, most: u64) -> Option<u64> {
    let units = (bytes / UNIT) as u64;
    (bytes.is_multiple_of(UNIT) && units <= most).then_some(units)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_command_survives_its_halves(
            peer: u16, source: u32, target: u32, len in 0..=MAX_LEN, word: u32, mark in 0..LAP, laps: [bool; 2],
        ) {
            let bytes = |units: u64| units as usize * UNIT;
            let write = Command::Write {
                peer, source: bytes(source.into()), target: bytes(target.into()), len: bytes(len),
            };
            for command in [write, Command::Signal { peer, word, mark }] {
                let mut halves = command.to_halves().unwrap();
                prop_assert!(halves.iter().all(|half| half & LAP == 0));
                halves.iter_mut().zip(laps).for_each(|(half, lap)| *half |= u64::from(lap) << 63);
                prop_assert_eq!(Command::of_halves(halves), command);
            }
        }
    }

    #[test]
    fn offsets_and_lengths_reach_64_gib_and_no_further_than_their_bits() {
        const GIB: usize = 1 << 30;
        let write = |source, target, len| Command::Write { peer: 4095, source, target, len };
        assert!(write(127 * GIB, 127 * GIB, 64 * GIB - UNIT).to_halves().is_some());
        for refused in [
            write(128 * GIB, 0, 0),
            write(0, 128 * GIB, 0),
            write(0, 0, 64 * GIB),
            write(0, 16, 0),
            Command::Signal { peer: 0, word: 0, mark: LAP },
        ] {
            assert_eq!(refused.to_halves(), None, "{refused:?}");
        }
    }
}
