//! Lists of pieces, walked and cut: one side of an operation, or both sides together.
//!
//! A slice of pieces is a list, and two lists that pair up are a list of pairs: `(&op.local[..],
//! &op.remote[..])`. Each part of a pair is contiguous on both sides. A [`Stretch`] says which
//! bytes of a list are meant. It borrows nothing, so it can be kept beside the list while the list
//! is used up.

mod list;

use uccl_wire::frame::Desc;

pub use self::list::{Memo, PieceList, firsts};
use crate::mem::{RemoteSpan, Span};

/// The pieces of both sides of an operation.
type Pair = (PieceList<Span>, PieceList<RemoteSpan>);

/// A piece of memory, or several of one length.
pub trait Piece: Copy {
    /// How long it is.
    fn len_bytes(&self) -> usize;

    /// `len` bytes of it, from `offset` on. Addresses wrap: one that a peer named may not have been
    /// checked yet.
    #[must_use]
    fn part(&self, offset: usize, len: usize) -> Self;
}

impl Piece for Span {
    #[inline]
    fn len_bytes(&self) -> usize {
        self.len
    }

    #[inline]
    fn part(&self, offset: usize, len: usize) -> Self {
        Self { addr: self.addr.wrapping_add(offset), len }
    }
}

impl Piece for RemoteSpan {
    #[inline]
    fn len_bytes(&self) -> usize {
        self.len as usize
    }

    #[inline]
    fn part(&self, offset: usize, len: usize) -> Self {
        Self { addr: self.addr.wrapping_add(offset as u64), len: len as u64, ..*self }
    }
}

impl Piece for Desc {
    #[inline]
    fn len_bytes(&self) -> usize {
        self.len as usize
    }

    #[inline]
    fn part(&self, offset: usize, len: usize) -> Self {
        Self { addr: self.addr.wrapping_add(offset as u64), len: len as u64, ..*self }
    }
}

impl<A: Piece, B: Piece> Piece for (A, B) {
    #[inline]
    fn len_bytes(&self) -> usize {
        self.0.len_bytes()
    }

    #[inline]
    fn part(&self, offset: usize, len: usize) -> Self {
        (self.0.part(offset, len), self.1.part(offset, len))
    }
}

/// Pieces in order.
pub trait Pieces: Copy {
    /// The type of a piece.
    type Piece: Piece;

    /// How many there are.
    fn count(self) -> usize;

    /// One of them.
    fn get(self, index: usize) -> Option<Self::Piece>;

    /// How long they are together.
    fn len_bytes(self) -> u64 {
        let pieces = (0..self.count()).filter_map(|index| self.get(index));
        pieces.map(|piece| piece.len_bytes() as u64).sum()
    }
}

impl<P: Piece> Pieces for &[P] {
    type Piece = P;

    #[inline]
    fn count(self) -> usize {
        self.len()
    }

    #[inline]
    fn get(self, index: usize) -> Option<P> {
        <[P]>::get(self, index).copied()
    }
}

/// Two lists that pair up: there are as many pieces in one as in the other, and each has the length
/// of its partner.
impl<A: Pieces, B: Pieces> Pieces for (A, B) {
    type Piece = (A::Piece, B::Piece);

    #[inline]
    fn count(self) -> usize {
        self.0.count()
    }

    #[inline]
    fn get(self, index: usize) -> Option<Self::Piece> {
        Some((self.0.get(index)?, self.1.get(index)?))
    }
}

/// A position in a list: a piece, and an offset in bytes. The end of a piece is written as the
/// start of the next.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Place {
    index: usize,
    offset: usize,
}

/// The bytes of a list of pieces from one place to another, and the empty pieces among them. All
/// methods that take a list expect the one that the stretch was made for.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Stretch {
    from: Place,
    to: Place,
}

impl Stretch {
    /// All of a list.
    pub fn all(pieces: impl Pieces) -> Self {
        Self { from: Place::default(), to: Place { index: pieces.count(), offset: 0 } }
    }

    /// Whether there is no piece in it, not even an empty one.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.from >= self.to
    }

    /// Its first piece, as far as it is in the stretch.
    pub fn first<L: Pieces>(self, pieces: L) -> Option<L::Piece> {
        if self.is_empty() {
            return None;
        }
        let Place { index, offset } = self.from;
        let piece = pieces.get(index)?;
        let end = if index == self.to.index { self.to.offset } else { piece.len_bytes() };
        Some(piece.part(offset, end - offset))
    }

    /// Takes the first piece out, or the first `most` bytes of it.
    #[inline]
    pub fn take_first<L: Pieces>(&mut self, pieces: L, most: usize) -> Option<L::Piece> {
        let Place { index, offset } = self.from;
        // The first piece is mostly taken whole, and with many short pieces each nanosecond counts.
        if offset == 0 && index < self.to.index {
            let piece = pieces.get(index)?;
            if piece.len_bytes() <= most {
                self.from.index += 1;
                return Some(piece);
            }
        }
        let (piece, from) = self.some_of_first(pieces, most)?;
        self.from = from;
        Some(piece)
    }

    /// The first `most` bytes of the first piece, and the place of the bytes behind them. A
    /// separate function, with `self` by value, so that loops over whole pieces stay short and keep
    /// their place in registers.
    #[inline(never)]
    fn some_of_first<L: Pieces>(self, pieces: L, most: usize) -> Option<(L::Piece, Place)> {
        let piece = self.first(pieces)?;
        let (len, Place { index, offset }) = (piece.len_bytes().min(most), self.from);
        let from = match len == piece.len_bytes() && index < self.to.index {
            true => Place { index: index + 1, offset: 0 },
            false => Place { index, offset: offset + len },
        };
        Some((piece.part(0, len), from))
    }

    /// Takes the last piece out, or the last `most` bytes of it. Returns how many bytes.
    fn drop_last(&mut self, pieces: impl Pieces, most: usize) -> Option<usize> {
        if self.is_empty() {
            return None;
        }
        let Place { index, offset } = self.to;
        let index = if offset > 0 { index } else { index - 1 };
        let end = if offset > 0 { offset } else { pieces.get(index)?.len_bytes() };
        let start = if index == self.from.index { self.from.offset } else { 0 };
        let len = (end - start).min(most);
        self.to = Place { index, offset: end - len };
        Some(len)
    }

    /// Takes out the first `most` bytes, and the empty pieces that follow them, piece by piece. A
    /// piece that the caller does not take from the iterator stays in the stretch.
    pub fn take_parts<L: Pieces>(
        &mut self,
        pieces: L,
        most: usize,
    ) -> impl Iterator<Item = L::Piece> {
        let mut left = most;
        std::iter::from_fn(move || {
            if left == 0 && self.first(pieces)?.len_bytes() > 0 {
                return None;
            }
            let piece = self.take_first(pieces, left)?;
            left -= piece.len_bytes();
            Some(piece)
        })
    }

    /// Takes out the same bytes as [`take_parts`](Self::take_parts), as a stretch.
    pub fn cut(&mut self, pieces: impl Pieces, most: usize) -> Self {
        self.cut_few(pieces, most, usize::MAX)
    }

    /// As [`cut`](Self::cut), but of at most `count` pieces.
    pub fn cut_few(&mut self, pieces: impl Pieces, most: usize, count: usize) -> Self {
        let mut rest = *self;
        rest.take_parts(pieces, most).take(count).for_each(drop);
        let cut = Self { from: self.from, to: rest.from };
        *self = rest;
        cut
    }

    /// Takes out the last `most` bytes, of at most `count` pieces.
    pub fn cut_back(&mut self, pieces: impl Pieces, most: usize, count: usize) -> Self {
        let (to, mut left) = (self.to, most);
        for _ in 0..count {
            if left == 0 {
                break;
            }
            left -= self.drop_last(pieces, left).unwrap_or(left);
        }
        Self { from: self.to, to }
    }

    /// Its pieces, of which the first and the last may be partial.
    pub fn parts<L: Pieces>(mut self, pieces: L) -> impl Iterator<Item = L::Piece> + Clone {
        std::iter::from_fn(move || self.take_first(pieces, usize::MAX))
    }

    /// Its pieces as lists of their own.
    pub fn to_lists(self, pieces: (&[Span], &[RemoteSpan])) -> Pair {
        let Self { from, to } = self;
        let count = (to.index + usize::from(to.offset > 0)).saturating_sub(from.index);
        let (mut local, mut remote) =
            (PieceList::with_capacity(count), PieceList::with_capacity(count));
        for (here, there) in self.parts(pieces) {
            local.push(here);
            remote.push(there);
        }
        (local, remote)
    }
}

/// Groups pairs by their `key`. The groups are in the order of their first pairs.
pub fn group<K: PartialEq>(
    pieces: (&[Span], &[RemoteSpan]),
    mut key: impl FnMut(Span, RemoteSpan) -> K,
) -> Vec<(K, Pair)> {
    let mut groups: Vec<(K, Pair)> = Vec::new();
    for (here, there) in Stretch::all(pieces).parts(pieces) {
        let its = key(here, there);
        let at = groups.iter().position(|(key, _)| *key == its).unwrap_or_else(|| {
            groups.push((its, Default::default()));
            groups.len() - 1
        });
        let (local, remote) = &mut groups[at].1;
        local.push(here);
        remote.push(there);
    }
    groups
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    type Lists = (Vec<Span>, Vec<RemoteSpan>);

    /// Pieces of these lengths, none of them adjacent. The remote address of each byte is the local
    /// one plus 7.
    fn lists(lens: &[usize]) -> Lists {
        let local = lens.iter().enumerate().map(|(i, &len)| Span { addr: i << 20, len });
        let there = |(i, &len): (usize, &usize)| {
            let (addr, len) = ((i << 20) as u64 + 7, len as u64);
            RemoteSpan { addr, len, key: i as u64, slot: i as u32 }
        };
        (local.collect(), lens.iter().enumerate().map(there).collect())
    }

    fn both((local, remote): &Lists) -> (&[Span], &[RemoteSpan]) {
        (local, remote)
    }

    /// The local addresses and lengths, after a check of the remote ones.
    fn seen(stretch: Stretch, lists: &Lists) -> Vec<(usize, usize)> {
        let (local, remote) = stretch.to_lists(both(lists));
        assert!(stretch.parts(both(lists)).eq(local.iter().copied().zip(remote.iter().copied())));
        for (here, there) in local.iter().zip(&remote) {
            assert_eq!((here.addr as u64 + 7, here.len as u64), (there.addr, there.len));
            assert_eq!((there.key, u64::from(there.slot)), (here.addr as u64 >> 20, there.key));
        }
        local.iter().map(|here| (here.addr, here.len)).collect()
    }

    #[test]
    fn a_cut_goes_through_a_piece_and_takes_the_empty_ones_behind_it() {
        let (lists, at) = (lists(&[10, 0, 20, 0]), |index: usize| index << 20);
        let (pieces, mut rest) = (both(&lists), Stretch::all(both(&lists)));
        assert_eq!(seen(rest.cut(pieces, 4), &lists), [(at(0), 4)]);
        assert_eq!(seen(rest.cut(pieces, 6), &lists), [(at(0) + 4, 6), (at(1), 0)]);
        assert_eq!(seen(rest.cut(pieces, 99), &lists), [(at(2), 20), (at(3), 0)]);
        assert!(rest.is_empty() && rest.first(pieces).is_none());
    }

    #[test]
    fn a_list_that_has_shrunk_has_nothing_more() {
        let lists = lists(&[5, 5]).0;
        let mut rest = Stretch::all(&lists[..]);
        rest.cut(&lists[..], 7);
        assert_eq!(rest.first(&lists[..1]), None);
        assert!(rest.cut(&lists[..1], 3).is_empty() && rest.cut_back(&lists[..1], 3, 9).is_empty());
    }

    #[test]
    fn a_part_of_a_forged_piece_does_not_overflow() {
        let forged = RemoteSpan { addr: u64::MAX, len: u64::MAX, key: 1, slot: 1 };
        assert_eq!(forged.part(2, 3), RemoteSpan { addr: 1, len: 3, ..forged });
    }

    #[test]
    fn groups_keep_the_order_of_their_pairs() {
        let lists = lists(&[1, 2, 3, 4, 0]);
        let seen = group(both(&lists), |here, there| (here.len as u64 + there.len) / 2 % 2);
        let lens =
            |(key, (local, _)): &(u64, Pair)| (*key, local.iter().map(|here| here.len).collect());
        assert_eq!(
            seen.iter().map(lens).collect::<Vec<_>>(),
            [(1, vec![1, 3]), (0, vec![2, 4, 0])]
        );
    }

    /// The end at which a cut is made, and the most bytes and pieces that it takes.
    fn cuts() -> impl Strategy<Value = Vec<(bool, usize, usize)>> {
        vec((any::<bool>(), 1usize..5000, 1usize..9), 1..20)
    }

    proptest! {
        #[test]
        fn cuts_from_both_ends_take_every_byte_and_every_piece_once(
            lens in vec(prop_oneof![1 => Just(0usize), 3 => 1usize..3000], 0..40),
            cuts in cuts(),
        ) {
            let lists = lists(&lens);
            let (pieces, mut rest) = (both(&lists), Stretch::all(both(&lists)));
            let (mut front, mut back) = (Vec::new(), Vec::new());
            for (is_front, most, count) in cuts.into_iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                let cut = match is_front {
                    true => rest.cut_few(pieces, most, count),
                    false => rest.cut_back(pieces, most, count),
                };
                let taken = seen(cut, &lists);
                let len: usize = taken.iter().map(|(_, len)| len).sum();
                prop_assert!(!taken.is_empty() && taken.len() <= count && len <= most);
                prop_assert!(len == most || taken.len() == count || rest.is_empty(), "too short");
                match is_front {
                    true => front.extend(taken),
                    false => back.splice(..0, taken).for_each(drop),
                }
            }
            // Joined, the parts are the pieces again, in order.
            front.append(&mut back);
            front.dedup_by(|next, last| {
                let follows = last.0 + last.1 == next.0;
                last.1 += if follows { next.1 } else { 0 };
                follows
            });
            let whole: Vec<_> = lens.iter().enumerate().map(|(i, &len)| (i << 20, len)).collect();
            prop_assert_eq!(front, whole);
        }
    }
}
