//! Cuts pieces into shares of about equal cost, one for each warp.

use super::params::{Cursor, Piece};

/// The cost of starting a piece, in bytes that could have been copied in that time: about one round
/// trip to memory, with one round of a warp in flight.
const PIECE_COST: i128 = 2048;
/// A share has at least this many bytes: one round of a warp.
pub(crate) const LEAST_SHARE: i128 = 4096;
/// If a share has room for fewer bytes than this, no piece is started in it.
const LEAST_CUT: i128 = 1024;
/// Cuts are at multiples of this many bytes in the destination, so that every store fills whole
/// sectors.
const GRAIN: u64 = 128;

/// How many warps the pieces can make use of.
pub(crate) fn warps_worth(pieces: &[Piece]) -> u64 {
    let bytes: u128 = pieces.iter().map(|piece| u128::from(piece.len_bytes)).sum();
    let shares = bytes.div_ceil(LEAST_SHARE as u128).max(pieces.len() as u128);
    u64::try_from(shares).unwrap_or(u64::MAX)
}

/// Cuts `pieces` into at most `most_warps` shares. `most_warps` is at least one. Fills the
/// beginning of `cursors`, with one more entry than there are shares, and returns the number of
/// shares: 0 if there are no bytes.
///
/// `cursors` must have room for `most_warps` + 1 entries.
pub(crate) fn partition(pieces: &[Piece], most_warps: u32, cursors: &mut [Cursor]) -> u32 {
    let most_warps = most_warps.min(cursors.len().saturating_sub(1) as u32);
    let cost: i128 = pieces.iter().map(cost).sum();
    if cost == 0 || most_warps == 0 {
        return 0;
    }
    let mut cuts = Cuts::new(cost, most_warps, cursors);
    for (index, piece) in pieces.iter().enumerate() {
        cuts.add(index as u32, piece);
    }
    cuts.end(pieces.len() as u32)
}

fn cost(piece: &Piece) -> i128 {
    if piece.len_bytes == 0 { 0 } else { i128::from(piece.len_bytes) + PIECE_COST }
}

/// The state of the cutting. If a share takes too much or too little, the difference is carried
/// over to the next. So the shares so far never have less than their part of the whole, except for
/// `LEAST_CUT` and the cost of a piece. That is why `most_warps` shares suffice.
struct Cuts<'a> {
    cursors: &'a mut [Cursor],
    warps: u32,
    share: i128,
    left: i128,
}

impl<'a> Cuts<'a> {
    fn new(cost: i128, most_warps: u32, cursors: &'a mut [Cursor]) -> Self {
        let most = i128::from(most_warps);
        // Each cut makes one more piece, and the last share may have some bytes left over.
        let whole = cost + most * PIECE_COST + PIECE_COST + LEAST_CUT;
        let share = ((whole + most - 1) / most).max(LEAST_SHARE + PIECE_COST);
        let mut cuts = Self { cursors, warps: 0, share, left: 0 };
        cuts.begin(0, 0);
        cuts
    }

    fn begin(&mut self, piece: u32, offset: u64) {
        if let Some(cursor) = self.cursors.get_mut(self.warps as usize) {
            *cursor = Cursor { offset, piece, zero: 0 };
        }
        self.warps += 1;
        self.left += self.share;
    }

    fn add(&mut self, index: u32, piece: &Piece) {
        let mut offset = 0;
        while offset < piece.len_bytes {
            let rest = i128::from(piece.len_bytes - offset) + PIECE_COST;
            if rest <= self.left + self.share / 8 {
                self.left -= rest;
                return;
            }
            let room = self.left - PIECE_COST;
            if room >= LEAST_CUT {
                let cut = whole_grains(piece.destination.wrapping_add(offset), room as u64);
                self.left -= i128::from(cut) + PIECE_COST;
                offset += cut;
            }
            self.begin(index, offset);
        }
    }

    fn end(self, pieces: u32) -> u32 {
        if let Some(cursor) = self.cursors.get_mut(self.warps as usize) {
            *cursor = Cursor { offset: 0, piece: pieces, zero: 0 };
        }
        self.warps
    }
}

/// The smallest number of bytes, at least `room`, after which a destination is at a multiple of
/// [`GRAIN`].
fn whole_grains(destination: u64, room: u64) -> u64 {
    room + (GRAIN - destination.wrapping_add(room) % GRAIN) % GRAIN
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The parts of pieces in each share, in the order in which a warp copies them.
    fn shares(pieces: &[Piece], most_warps: u32) -> Vec<Vec<(usize, u64, u64)>> {
        let mut cursors = vec![Cursor::default(); most_warps as usize + 1];
        let warps = partition(pieces, most_warps, &mut cursors) as usize;
        assert!(warps <= most_warps as usize, "{warps} warps are more than {most_warps}");
        let share = |warp: usize| {
            let (begin, end) = (cursors[warp], cursors[warp + 1]);
            let stop = if end.offset == 0 { end.piece } else { end.piece + 1 };
            let parts = (begin.piece..stop).map(|index| {
                let from = if index == begin.piece { begin.offset } else { 0 };
                let to = match index == end.piece {
                    true => end.offset,
                    false => pieces[index as usize].len_bytes,
                };
                (index as usize, from, to)
            });
            parts.collect()
        };
        (0..warps).map(share).collect()
    }

    fn pieces(lens: &[u64]) -> Vec<Piece> {
        let piece = |len: &u64| Piece { destination: *len % 129, source: 0, len_bytes: *len };
        lens.iter().map(piece).collect()
    }

    #[test]
    fn equal_pieces_are_one_for_each_warp() {
        let found = shares(&pieces(&[4096; 64]), 100);
        assert_eq!(found.len(), 64);
        assert!(found.iter().enumerate().all(|(index, share)| *share == [(index, 0, 4096)]));
    }

    #[test]
    fn one_large_piece_is_cut_for_all_warps() {
        let found = shares(&pieces(&[256 << 20]), 1056);
        assert!(found.len() > 1000, "{}", found.len());
        let longest = found.iter().flatten().map(|(_, from, to)| to - from).max();
        assert!(longest.is_some_and(|longest| longest < (256 << 20) / 900), "{longest:?}");
    }

    #[test]
    fn nothing_is_no_work() {
        assert!(shares(&pieces(&[]), 5).is_empty());
        assert!(shares(&pieces(&[0, 0]), 5).is_empty());
        assert_eq!(shares(&pieces(&[1]), 1), [[(0, 0, 1)]]);
        assert_eq!(warps_worth(&pieces(&[0, 1, 8192])), 3);
        assert_eq!(warps_worth(&pieces(&[u64::MAX; 3])), u64::MAX.div_ceil(4096) * 3);
    }

    proptest! {
        #[test]
        fn every_byte_is_in_one_share(
            lens in proptest::collection::vec(
                prop_oneof![Just(0), 1..200_u64, 1..20_000_u64, 1..4_000_000_u64, Just(u64::MAX / 4)],
                0..300,
            ),
            most_warps in 1..1200_u32,
        ) {
            let pieces = pieces(&lens);
            let found = shares(&pieces, most_warps);
            let mut next = vec![0; lens.len()];
            for (index, from, to) in found.into_iter().flatten() {
                prop_assert_eq!(from, next[index]);
                prop_assert!(from <= to && to <= lens[index]);
                next[index] = to;
            }
            prop_assert_eq!(next, lens);
        }

        #[test]
        fn no_share_is_far_above_the_mean(
            lens in proptest::collection::vec(1..2_000_000_u64, 1..300),
            most_warps in 1..1200_u32,
        ) {
            let found = shares(&pieces(&lens), most_warps);
            let cost = |share: &Vec<(usize, u64, u64)>| {
                share.iter().map(|(_, from, to)| to - from + 2048).sum::<u64>()
            };
            let all: u64 = lens.iter().map(|len| len + 2048).sum();
            let mean = all / u64::from(most_warps) + 2048;
            let most = found.iter().map(cost).max().unwrap_or(0);
            prop_assert!(most <= 2 * mean.max(6144) + 4096, "{} of {}", most, mean);
        }
    }
}
