//! The pieces of one side of an operation, of its own or shared with other operations.

use std::{
    any::Any,
    fmt,
    ops::{Deref, DerefMut},
    slice,
    sync::Arc,
};

use parking_lot::Mutex;
use smallvec::SmallVec;

use super::{Piece, Pieces as _};
use crate::mem::{RemoteSpan, Span};

/// Pieces of one side of an operation, in order. One piece needs no allocation.
///
/// A list that many operations have in turn can be shared ([`PieceList::share`]). Then a clone
/// copies no piece, and nobody counts bytes or looks for regions piece by piece again.
pub struct PieceList<P> {
    /// Empty while the list shares pieces.
    own: SmallVec<[P; 1]>,
    shared: Option<Arc<SharedPieces<P>>>,
}

struct SharedPieces<P> {
    pieces: Box<[P]>,
    bytes: u64,
    /// Indices of remote pieces: of the first, and of each that is not in the region of the piece
    /// before it.
    firsts: Box<[u32]>,
    memo: Memo,
}

/// State of the link that posts a shared list: it lives as long as the list.
#[derive(Default)]
pub struct Memo(Mutex<Option<Arc<dyn Any + Send + Sync>>>);

impl Memo {
    /// The state, if there is one of this type.
    #[must_use]
    pub fn get<T: Any + Send + Sync>(&self) -> Option<Arc<T>> {
        self.0.lock().clone()?.downcast().ok()
    }

    /// Replaces the state.
    pub fn set<T: Any + Send + Sync>(&self, state: Arc<T>) {
        let before = self.0.lock().replace(state);
        // Its drop may call a driver.
        drop(before);
    }
}

impl<P> PieceList<P> {
    /// No pieces.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// No pieces, and room for this number.
    #[must_use]
    pub fn with_capacity(count: usize) -> Self {
        Self { own: SmallVec::with_capacity(count), shared: None }
    }

    /// The pieces as a slice.
    #[must_use]
    #[inline]
    pub fn as_slice(&self) -> &[P] {
        self.shared.as_ref().map_or(&self.own, |shared| &shared.pieces)
    }

    /// The state that all clones of a shared list have in common; `None` for a list of its own.
    #[must_use]
    pub fn memo(&self) -> Option<&Memo> {
        self.shared.as_ref().map(|shared| &shared.memo)
    }
}

impl<P: Copy> PieceList<P> {
    /// Adds a piece.
    #[inline]
    pub fn push(&mut self, piece: P) {
        self.own().push(piece);
    }

    /// Makes room for this number of further pieces.
    pub fn reserve(&mut self, count: usize) {
        self.own().reserve(count);
    }

    /// Moves all pieces of another list to the end of this one.
    pub fn append(&mut self, other: &mut Self) {
        self.own().append(other.own());
    }

    /// The list as one of its own, which can be changed.
    #[inline]
    fn own(&mut self) -> &mut SmallVec<[P; 1]> {
        if let Some(shared) = self.shared.take() {
            self.own = SmallVec::from_slice(&shared.pieces);
        }
        &mut self.own
    }
}

impl<P: Piece> PieceList<P> {
    /// The bytes of all pieces.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.shared.as_ref().map_or_else(|| self.own[..].len_bytes(), |shared| shared.bytes)
    }

    fn shared(self, firsts: Box<[u32]>) -> Self {
        if self.len() <= 1 || self.shared.is_some() {
            // One piece is as cheap to copy.
            return self;
        }
        let bytes = self.len_bytes();
        let (pieces, memo) = (self.own.into_boxed_slice(), Memo::default());
        let shared = SharedPieces { pieces, bytes, firsts, memo };
        Self { own: SmallVec::new(), shared: Some(Arc::new(shared)) }
    }
}

impl PieceList<Span> {
    /// The same pieces, of which clones are no copies.
    #[must_use]
    pub fn share(self) -> Self {
        self.shared(Box::default())
    }
}

impl PieceList<RemoteSpan> {
    /// The same pieces, of which clones are no copies.
    #[must_use]
    pub fn share(self) -> Self {
        let firsts = indices(&self).map(|at| at as u32).collect();
        self.shared(firsts)
    }

    /// One piece of each region: the first, and each that is not in the region of the piece before
    /// it. A region may come again.
    pub fn regions(&self) -> impl Iterator<Item = &RemoteSpan> {
        let known = self.shared.iter().flat_map(|shared| shared.firsts.iter());
        // Empty if the list shares pieces.
        known.map(|at| &self[*at as usize]).chain(firsts(&self.own))
    }
}

/// One piece of each region, as [`PieceList::regions`] has them.
pub fn firsts(pieces: &[RemoteSpan]) -> impl Iterator<Item = &RemoteSpan> {
    indices(pieces).map(|at| &pieces[at])
}

/// The indices of the first piece, and of each that is not in the region of the piece before it.
fn indices(pieces: &[RemoteSpan]) -> impl Iterator<Item = usize> {
    let region = |at: usize| (pieces[at].slot, pieces[at].key);
    (0..pieces.len()).filter(move |&at| at == 0 || region(at) != region(at - 1))
}

impl<P> Default for PieceList<P> {
    fn default() -> Self {
        Self { own: SmallVec::new(), shared: None }
    }
}

impl<P: Copy> Clone for PieceList<P> {
    fn clone(&self) -> Self {
        Self { own: SmallVec::from_slice(&self.own), shared: self.shared.clone() }
    }
}

impl<P> Deref for PieceList<P> {
    type Target = [P];

    #[inline]
    fn deref(&self) -> &[P] {
        self.as_slice()
    }
}

impl<P: Copy> DerefMut for PieceList<P> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [P] {
        self.own()
    }
}

impl<P: fmt::Debug> fmt::Debug for PieceList<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_slice().fmt(f)
    }
}

impl<P: PartialEq> PartialEq for PieceList<P> {
    fn eq(&self, other: &Self) -> bool {
        self.as_slice() == other.as_slice()
    }
}

impl<P: Copy> From<&[P]> for PieceList<P> {
    fn from(pieces: &[P]) -> Self {
        Self { own: SmallVec::from_slice(pieces), shared: None }
    }
}

impl<P: Copy, const N: usize> From<[P; N]> for PieceList<P> {
    fn from(pieces: [P; N]) -> Self {
        pieces[..].into()
    }
}

impl<P> FromIterator<P> for PieceList<P> {
    fn from_iter<I: IntoIterator<Item = P>>(pieces: I) -> Self {
        Self { own: pieces.into_iter().collect(), shared: None }
    }
}

impl<P: Copy> Extend<P> for PieceList<P> {
    fn extend<I: IntoIterator<Item = P>>(&mut self, pieces: I) {
        self.own().extend(pieces);
    }
}

impl<P: Copy> IntoIterator for PieceList<P> {
    type Item = P;
    type IntoIter = smallvec::IntoIter<[P; 1]>;

    fn into_iter(mut self) -> Self::IntoIter {
        std::mem::take(self.own()).into_iter()
    }
}

impl<'a, P> IntoIterator for &'a PieceList<P> {
    type Item = &'a P;
    type IntoIter = slice::Iter<'a, P>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn remote(slots: &[u32]) -> PieceList<RemoteSpan> {
        let piece = |(at, slot): (usize, &u32)| {
            let (addr, len) = (at as u64 * 100, at as u64);
            RemoteSpan { addr, len, key: u64::from(*slot), slot: *slot }
        };
        slots.iter().enumerate().map(piece).collect()
    }

    #[test]
    fn a_shared_list_says_the_same_as_one_of_its_own() {
        for slots in [&[][..], &[4], &[4, 4, 4], &[1, 1, 2, 1, 1, 3, 3]] {
            let own = remote(slots);
            let shared = own.clone().share();
            assert_eq!(own, shared);
            assert_eq!(own.len_bytes(), shared.len_bytes());
            let regions = |list: &PieceList<RemoteSpan>| -> Vec<RemoteSpan> {
                list.regions().copied().collect()
            };
            assert_eq!(regions(&own), regions(&shared), "{slots:?}");
            assert!(shared.clone().into_iter().eq(own));
        }
        let slots: Vec<_> =
            remote(&[1, 1, 2, 1, 1, 3, 3]).share().regions().map(|one| one.slot).collect();
        assert_eq!(slots, [1, 2, 1, 3]);
    }

    #[test]
    fn a_change_of_one_list_is_not_seen_by_those_that_share_its_pieces() {
        let first = [Span { addr: 1, len: 10 }, Span { addr: 20, len: 5 }];
        let shared = PieceList::from(first).share();
        let mut changed = shared.clone();
        changed.push(Span { addr: 30, len: 1 });
        changed[0].len = 2;
        assert_eq!(changed.len_bytes(), 8);
        assert_eq!((shared.as_slice(), shared.len_bytes()), (&first[..], 15));
    }

    #[test]
    fn clones_of_a_shared_list_copy_no_piece() {
        let shared = PieceList::from([Span { addr: 1, len: 10 }; 3]).share();
        assert!(std::ptr::eq(shared.as_slice(), shared.clone().as_slice()));
    }

    #[test]
    fn clones_of_a_shared_list_have_one_memo() {
        let own = PieceList::from([Span { addr: 1, len: 10 }; 3]);
        assert!(own.memo().is_none());
        let shared = own.share();
        let memo = shared.memo().expect("it is shared");
        assert!(memo.get::<u8>().is_none());
        memo.set(Arc::new(7_u8));
        let other = shared.clone();
        assert_eq!(other.memo().and_then(Memo::get::<u8>).as_deref(), Some(&7));
        assert!(memo.get::<u16>().is_none());
        let mut changed = shared;
        changed.push(Span { addr: 1, len: 1 });
        assert!(changed.memo().is_none());
    }
}
