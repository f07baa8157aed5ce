//! Memory that is registered with devices.

mod chain;
mod narrow;

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::*},
    },
};

use parking_lot::Mutex;
use uccl_device::MemoryKind;
use uccl_fabric::rail::{Rail, RailError, Registration, RemoteKey};
use uccl_fabric::{lane::Moves, mem::Span, region::Rights};

use self::{chain::Chain, narrow::Narrow};

/// For each rail, the registration or why there is none.
type ByRail = Vec<Result<Box<dyn Registration>, RailError>>;

/// Memory that is registered with every device that takes it.
pub(super) struct PinnedRegion {
    /// Its number, which no other registration of this endpoint has.
    pub(super) number: u64,
    span: Span,
    kind: MemoryKind,
    rights: Rights,
    by_rail: Vec<Chain>,
    renewing: Mutex<Renewal>,
    /// How the memory moves, as far as our own devices decide that.
    moves: Moves,
    /// Registrations of the same memory for peers with fewer rights: read only, and write only.
    /// Made when the first such peer asks.
    narrow: [Narrow; 2],
    is_retired: AtomicBool,
}

/// Whether the memory is being registered once more: with devices that were lost and opened again,
/// or for channels.
#[derive(Default)]
struct Renewal {
    /// How many such registrations are being made.
    count: usize,
    /// It is not to be registered any more.
    is_over: bool,
}

/// While this exists, the registrations of some memory do not end.
pub(super) struct PinGuard(Arc<PinnedRegion>);

impl Drop for PinGuard {
    fn drop(&mut self) {
        self.0.renewing.lock().count -= 1;
    }
}

/// Memory that is to be registered.
#[derive(Clone, Copy)]
pub(super) struct PinRequest {
    pub(super) span: Span,
    pub(super) kind: MemoryKind,
    /// The rights of peers to it.
    pub(super) rights: Rights,
}

/// Whether one piece of memory contains another.
pub(super) fn covers(outer: Span, inner: Span) -> bool {
    let offset = inner.addr.checked_sub(outer.addr);
    offset.is_some_and(|offset| offset <= outer.len && inner.len <= outer.len - offset)
}

impl PinnedRegion {
    pub(super) fn new(number: u64, memory: PinRequest, by_rail: ByRail, moves: Moves) -> Self {
        let PinRequest { span, kind, rights } = memory;
        let narrow = [(); 2].map(|()| Narrow::new(by_rail.len()));
        let (is_retired, renewing) = (AtomicBool::new(false), Mutex::default());
        let by_rail = by_rail.into_iter().map(Chain::new).collect();
        Self { number, span, kind, rights, by_rail, renewing, moves, narrow, is_retired }
    }

    /// Registers the memory again with a device that was lost and has been opened again. One thread
    /// at a time does so for a device.
    pub(super) fn renew(
        self: &Arc<Self>,
        at: usize,
        rail: &Arc<dyn Rail>,
    ) -> Result<(), RailError> {
        let Some(chain) = self.by_rail.get(at) else { return Ok(()) };
        let Some(_held) = self.hold() else { return Ok(()) };
        let made = rail.register(self.span, self.kind, self.rights);
        let why = made.as_ref().map(drop).map_err(Clone::clone);
        chain.renew(made);
        self.narrow.iter().for_each(|narrow| narrow.forget(at));
        why
    }

    /// Keeps the registrations from ending. None if they are about to end.
    pub(super) fn hold(self: &Arc<Self>) -> Option<PinGuard> {
        let mut renewing = self.renewing.lock();
        if renewing.is_over || self.is_retired() {
            return None;
        }
        renewing.count += 1;
        Some(PinGuard(Arc::clone(self)))
    }

    /// The device's registration, if it took the memory.
    pub(super) fn with(&self, rail: usize) -> Option<&dyn Registration> {
        self.by_rail.get(rail)?.now()
    }

    /// The registration with the key that gives a peer exactly these rights: our own, or one that
    /// was [made](Self::narrow) for peers with fewer rights.
    pub(super) fn for_peer(&self, rail: usize, rights: Rights) -> Option<&dyn Registration> {
        let whole = self.with(rail)?;
        if rights == self.rights { Some(whole) } else { self.narrow_of(rights)?.with(rail) }
    }

    /// Starts to make, on another thread, the registrations that [`Self::for_peer`] will need and
    /// that are missing. True while they are being made.
    pub(super) fn narrow(&self, rails: &[Arc<dyn Rail>], rights: Rights) -> bool {
        let Self { span, kind, .. } = *self;
        let takes = |rail| self.with(rail).is_some();
        let needed = self.narrow_of(rights).filter(|_| rights != self.rights && !self.is_retired());
        needed.is_some_and(|narrow| narrow.make(PinRequest { span, kind, rights }, rails, takes))
    }

    /// Whether a registration is being made for peers with these rights.
    pub(super) fn is_narrowing(&self, rights: Rights) -> bool {
        self.narrow_of(rights).is_some_and(Narrow::is_making)
    }

    /// Whether a registration is being made: for any peer, for a channel, or with a device that was
    /// lost.
    pub(super) fn is_busy(&self) -> bool {
        self.renewing.lock().count > 0 || self.narrow.iter().any(Narrow::is_making)
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
        covers(self.span, span)
    }

    /// The address at which peers reach memory that this registration covers, when they use this
    /// key.
    pub(super) fn base_of(&self, addr: usize, key: &RemoteKey) -> u64 {
        key.base.wrapping_add((addr - self.span.addr) as u64)
    }

    /// Marks the registration as retired: no new request uses it, though earlier ones may be under
    /// way. True the first time.
    pub(super) fn retire(&self) -> bool {
        !self.is_retired.swap(true, AcqRel)
    }

    pub(super) fn is_retired(&self) -> bool {
        self.is_retired.load(Acquire)
    }

    /// Ends the registration with every device.
    ///
    /// # Errors
    /// The error of the first device that failed. It may still reach the memory; call this again.
    pub(super) fn end(&self) -> Result<(), RailError> {
        self.retire();
        {
            let mut renewing = self.renewing.lock();
            renewing.is_over = true;
            if renewing.count > 0 {
                return Err(RailError::Unavailable(
                    "its memory is being registered again, or for a channel".into(),
                ));
            }
        }
        let all = self.by_rail.iter().flat_map(Chain::all);
        let whole = all.map(|registration| registration.end());
        // Ends each of them, even if others fail.
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

/// All registrations of an endpoint.
#[derive(Default)]
pub(super) struct PinRegistry {
    regions: HashMap<u32, Arc<PinnedRegion>>,
    /// How many regions do not move directly: the staged ones, and those that go over TCP.
    slow: [usize; 2],
    /// All registrations by class of length, address and number. A lookup searches each class by
    /// itself, so long regions do not make it walk through all the short ones.
    by_class: BTreeMap<(u32, usize, u64), Arc<PinnedRegion>>,
    /// How many registrations each class has.
    in_class: BTreeMap<u32, usize>,
}

/// The class of a length: the number of its bits. Within a class, no length is twice another or
/// more.
fn class_of(len: usize) -> u32 {
    usize::BITS - len.leading_zeros()
}

fn place_of(pinned: &PinnedRegion) -> (u32, usize, u64) {
    (class_of(pinned.span.len), pinned.span.addr, pinned.number)
}

impl PinRegistry {
    pub(super) fn add(&mut self, pinned: &Arc<PinnedRegion>) {
        let place = place_of(pinned);
        if self.by_class.insert(place, Arc::clone(pinned)).is_none() {
            *self.in_class.entry(place.0).or_default() += 1;
        }
    }

    /// Adds a region's registration. False if the region has one already.
    pub(super) fn add_region(&mut self, slot: u32, pinned: &Arc<PinnedRegion>) -> bool {
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

    pub(super) fn of_slot(&self, slot: u32) -> Option<&Arc<PinnedRegion>> {
        self.regions.get(&slot)
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Arc<PinnedRegion>> {
        self.by_class.values()
    }

    pub(super) fn remove(&mut self, pinned: &PinnedRegion) {
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

    fn slow_like(&mut self, pinned: &PinnedRegion) -> Option<&mut usize> {
        match pinned.moves {
            Moves::Direct => None,
            Moves::Staged => Some(&mut self.slow[0]),
            Moves::Tcp => Some(&mut self.slow[1]),
        }
    }

    /// The slowest way in which any region moves.
    pub(super) fn slowest(&self) -> Moves {
        match self.slow {
            [0, 0] => Moves::Direct,
            [_, 0] => Moves::Staged,
            _ => Moves::Tcp,
        }
    }

    /// The shortest registration that covers this memory and is not retired.
    pub(super) fn over(&self, span: Span) -> Option<&Arc<PinnedRegion>> {
        let covers = |pinned: &&Arc<PinnedRegion>| pinned.covers(span) && !pinned.is_retired();
        let classes = self.in_class.range(class_of(span.len)..);
        let mut shortest = classes.map(|(class, _)| {
            self.near(*class, span.addr).filter(covers).min_by_key(|p| p.span.len)
        });
        shortest.find_map(|shortest| shortest)
    }

    /// The registrations of this class that begin near enough before an address to possibly reach
    /// it.
    fn near(&self, class: u32, addr: usize) -> impl Iterator<Item = &Arc<PinnedRegion>> {
        let longest = usize::MAX.checked_shr(usize::BITS - class).unwrap_or(0);
        let first = addr.saturating_sub(longest);
        self.by_class.range((class, first, 0)..=(class, addr, u64::MAX)).map(|(_, pinned)| pinned)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pinned(number: u64, addr: usize, len: usize) -> Arc<PinnedRegion> {
        let (span, kind) = (Span { addr, len }, MemoryKind::Host);
        let memory = PinRequest { span, kind, rights: Rights::ALL };
        Arc::new(PinnedRegion::new(number, memory, Vec::new(), Moves::Direct))
    }

    #[test]
    fn a_long_region_has_no_other_looked_through() {
        let mut book = PinRegistry::default();
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
    fn the_shortest_registration_is_found() {
        let mut rng = fastrand::Rng::with_seed(1);
        let (mut book, mut all): (_, Vec<Arc<PinnedRegion>>) = (PinRegistry::default(), Vec::new());
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
