//! Memory as devices know it.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::*},
    },
};

use uccl_device::MemoryKind;

use super::{
    narrow::Narrow,
    rail::{Rail, RailError, Registration, RemoteKey},
};
use crate::{lane::Moves, mem::Span, region::Rights};

/// One a rail, or why there is none.
type ByRail = Vec<Result<Box<dyn Registration>, RailError>>;

/// Memory that is registered with every device that takes it.
pub(super) struct Pinned {
    /// Tells it from all others.
    pub(super) number: u64,
    span: Span,
    kind: MemoryKind,
    rights: Rights,
    by_rail: ByRail,
    /// How the memory moves, as far as that is up to the devices here.
    moves: Moves,
    /// The same for peers that may do less: for reading, and for writing. Made when the first of them asks.
    narrow: [Narrow; 2],
    is_retired: AtomicBool,
}

/// Memory that is to be registered.
#[derive(Clone, Copy)]
pub(super) struct ToPin {
    pub(super) span: Span,
    pub(super) kind: MemoryKind,
    /// What peers may do with it.
    pub(super) rights: Rights,
}

impl Pinned {
    pub(super) fn new(number: u64, memory: ToPin, by_rail: ByRail, moves: Moves) -> Self {
        let ToPin { span, kind, rights } = memory;
        let narrow = [(); 2].map(|()| Narrow::new(by_rail.len()));
        let is_retired = AtomicBool::new(false);
        Self { number, span, kind, rights, by_rail, moves, narrow, is_retired }
    }

    /// The device's registration, if it took the memory.
    pub(super) fn with(&self, rail: usize) -> Option<&dyn Registration> {
        self.by_rail.get(rail)?.as_deref().ok()
    }

    /// The registration whose key lets a peer do just this: the same one as ours, or one that was [made](Self::narrow)
    /// for those who may do less.
    pub(super) fn for_peer(&self, rail: usize, rights: Rights) -> Option<&dyn Registration> {
        let whole = self.with(rail)?;
        if rights == self.rights { Some(whole) } else { self.narrow_of(rights)?.with(rail) }
    }

    /// Has what [`Self::for_peer`] will need made aside, where it lacks. True while that lasts.
    pub(super) fn narrow(&self, rails: &[Arc<dyn Rail>], rights: Rights) -> bool {
        let Self { span, kind, .. } = *self;
        let takes = |rail| self.with(rail).is_some();
        let needed = self.narrow_of(rights).filter(|_| rights != self.rights && !self.is_retired());
        needed.is_some_and(|narrow| narrow.make(ToPin { span, kind, rights }, rails, takes))
    }

    /// Whether something is being made of it for peers that may do so much.
    pub(super) fn is_narrowing(&self, rights: Rights) -> bool {
        self.narrow_of(rights).is_some_and(Narrow::is_making)
    }

    /// Whether something is being made of it for any peer.
    pub(super) fn is_busy(&self) -> bool {
        self.narrow.iter().any(Narrow::is_making)
    }

    fn narrow_of(&self, rights: Rights) -> Option<&Narrow> {
        match rights {
            Rights::READ => Some(&self.narrow[0]),
            Rights::WRITE => Some(&self.narrow[1]),
            _ => None,
        }
    }

    /// Whether the memory is covered.
    pub(super) fn covers(&self, span: Span) -> bool {
        let offset = span.addr.checked_sub(self.span.addr);
        offset.is_some_and(|offset| offset <= self.span.len && span.len <= self.span.len - offset)
    }

    /// Where memory that is covered is for peers, if this is how they name what is registered.
    pub(super) fn base_of(&self, addr: usize, key: &RemoteKey) -> u64 {
        key.base.wrapping_add((addr - self.span.addr) as u64)
    }

    /// Nothing is requested with it any more, though something may be under way. True if that is new.
    pub(super) fn retire(&self) -> bool {
        !self.is_retired.swap(true, AcqRel)
    }

    pub(super) fn is_retired(&self) -> bool {
        self.is_retired.load(Acquire)
    }

    /// Has every device let go of the memory.
    ///
    /// # Errors
    /// What the first device said that did not: it may still reach the memory. To be tried again.
    pub(super) fn end(&self) -> Result<(), RailError> {
        self.retire();
        let whole = self.by_rail.iter().flatten().map(|registration| registration.end());
        // Each of them, whatever the others say.
        let ended = whole.fold(Ok(()), Result::and);
        self.narrow.iter().map(end_narrow).fold(ended, Result::and)
    }
}

fn end_narrow(narrow: &Narrow) -> Result<(), RailError> {
    let made = narrow.end().ok_or_else(|| {
        RailError::Unavailable("its memory is being registered for a peer right now".into())
    })?;
    made.map(|registration| registration.end()).fold(Ok(()), Result::and)
}

/// What is registered with the devices of an endpoint.
#[derive(Default)]
pub(super) struct Book {
    regions: HashMap<u32, Arc<Pinned>>,
    /// How many of these do not move directly: the staged ones, and those that go over TCP.
    slow: [usize; 2],
    /// All of it, by how long it is and where it begins: what is long is not looked for among all that is short.
    by_class: BTreeMap<(u32, usize, u64), Arc<Pinned>>,
    /// How much there is of each length.
    in_class: BTreeMap<u32, usize>,
}

/// Lengths of which each is less than twice any other: those below 2 to the power of this, and not of a smaller.
fn class_of(len: usize) -> u32 {
    usize::BITS - len.leading_zeros()
}

fn place_of(pinned: &Pinned) -> (u32, usize, u64) {
    (class_of(pinned.span.len), pinned.span.addr, pinned.number)
}

impl Book {
    pub(super) fn add(&mut self, pinned: &Arc<Pinned>) {
        let place = place_of(pinned);
        if self.by_class.insert(place, Arc::clone(pinned)).is_none() {
            *self.in_class.entry(place.0).or_default() += 1;
        }
    }

    /// Adds a region's; false where it has one.
    pub(super) fn add_region(&mut self, slot: u32, pinned: &Arc<Pinned>) -> bool {
        let is_new = !self.regions.contains_key(&slot);
        if is_new {
            self.regions.insert(slot, Arc::clone(pinned));
            self.add(pinned);
            if let Some(count) = self.slow_like(pinned) {
                *count += 1;
            }
        }
        is_new
    }

    pub(super) fn of_slot(&self, slot: u32) -> Option<&Arc<Pinned>> {
        self.regions.get(&slot)
    }

    pub(super) fn remove(&mut self, pinned: &Pinned) {
        let place = place_of(pinned);
        if self.by_class.remove(&place).is_some()
            && let Some(count) = self.in_class.get_mut(&place.0)
        {
            *count -= 1;
            if *count == 0 {
                self.in_class.remove(&place.0);
            }
        }
    }

    pub(super) fn remove_region(&mut self, slot: u32) {
        if let Some(pinned) = self.regions.remove(&slot) {
            self.remove(&pinned);
            if let Some(count) = self.slow_like(&pinned) {
                *count -= 1;
            }
        }
    }

    fn slow_like(&mut self, pinned: &Pinned) -> Option<&mut usize> {
        match pinned.moves {
            Moves::Direct => None,
            Moves::Staged => Some(&mut self.slow[0]),
            Moves::Tcp => Some(&mut self.slow[1]),
        }
    }

    /// Of the ways in which regions move, the slowest.
    pub(super) fn slowest(&self) -> Moves {
        match self.slow {
            [0, 0] => Moves::Direct,
            [_, 0] => Moves::Staged,
            _ => Moves::Tcp,
        }
    }

    /// The shortest that covers this memory, and is not on its way out.
    pub(super) fn over(&self, span: Span) -> Option<&Arc<Pinned>> {
        let covers = |pinned: &&Arc<Pinned>| pinned.covers(span) && !pinned.is_retired();
        let classes = self.in_class.range(class_of(span.len)..);
        let mut shortest = classes.map(|(class, _)| {
            self.near(*class, span.addr).filter(covers).min_by_key(|p| p.span.len)
        });
        shortest.find_map(|shortest| shortest)
    }

    /// What of these lengths begins so near that it may reach an address.
    fn near(&self, class: u32, addr: usize) -> impl Iterator<Item = &Arc<Pinned>> {
        let longest = usize::MAX.checked_shr(usize::BITS - class).unwrap_or(0);
        let first = addr.saturating_sub(longest);
        self.by_class.range((class, first, 0)..=(class, addr, u64::MAX)).map(|(_, pinned)| pinned)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pinned(number: u64, addr: usize, len: usize) -> Arc<Pinned> {
        let (span, kind) = (Span { addr, len }, MemoryKind::Host);
        let memory = ToPin { span, kind, rights: Rights::ALL };
        Arc::new(Pinned::new(number, memory, Vec::new(), Moves::Direct))
    }

    #[test]
    fn a_long_region_has_no_other_looked_through() {
        let mut book = Book::default();
        book.add(&pinned(0, 0, 1 << 40));
        for n in 1..1000 {
            book.add(&pinned(n as u64, n << 12, 4096));
        }
        let looked =
            |addr| book.in_class.keys().map(|c| book.near(*c, addr).count()).sum::<usize>();
        assert!((0..1000).all(|n: usize| looked(n << 12) <= 4));
        let over = |addr, len| book.over(Span { addr, len }).map(|pinned| pinned.number);
        assert_eq!((over(700 << 12, 4096), over(700 << 12, 4097)), (Some(700), Some(0)));
        assert_eq!(over(1 << 40, 1), None);
    }

    #[test]
    fn what_is_found_is_the_shortest() {
        let mut rng = fastrand::Rng::with_seed(1);
        let (mut book, mut all): (_, Vec<Arc<Pinned>>) = (Book::default(), Vec::new());
        for number in 0..2000 {
            let new = pinned(number, rng.usize(0..300), 1 << rng.u32(0..9) | rng.usize(0..64));
            book.add(&new);
            all.push(new);
            if rng.bool() {
                let old = all.swap_remove(rng.usize(0..all.len()));
                book.remove(&old);
            }
            if let Some(any) = all.get(rng.usize(0..20)) {
                any.retire();
            }
            let span = Span { addr: rng.usize(0..300), len: rng.usize(0..300) };
            let living = all.iter().filter(|one| one.covers(span) && !one.is_retired());
            let expected = living.map(|one| one.span.len).min();
            assert_eq!(book.over(span).map(|one| one.span.len), expected, "{span:?}");
        }
        all.iter().for_each(|one| book.remove(one));
        assert!(book.by_class.is_empty() && book.in_class.is_empty());
    }
}
