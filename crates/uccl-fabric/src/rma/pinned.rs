//! Memory as devices know it.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering::*},
    },
};

use uccl_device::MemoryKind;

use super::rail::{Rail, RailError, Registration, RemoteKey};
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
    narrow: [OnceLock<ByRail>; 2],
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
        let (narrow, is_retired) = ([const { OnceLock::new() }; 2], AtomicBool::new(false));
        Self { number, span, kind, rights, by_rail, moves, narrow, is_retired }
    }

    /// The device's registration, if it took the memory.
    pub(super) fn with(&self, rail: usize) -> Option<&dyn Registration> {
        self.by_rail.get(rail)?.as_deref().ok()
    }

    /// The registration whose key lets a peer do just this: the same one as ours, or one that is made for those who
    /// may do less.
    pub(super) fn for_peer(
        &self,
        rails: &[Arc<dyn Rail>],
        rail: usize,
        rights: Rights,
    ) -> Option<&dyn Registration> {
        let whole = self.with(rail)?;
        if rights == self.rights {
            return Some(whole);
        }
        let narrow = match rights {
            Rights::READ => &self.narrow[0],
            Rights::WRITE => &self.narrow[1],
            _ => return None,
        };
        let Self { span, kind, .. } = *self;
        let register = |rail: &Arc<dyn Rail>| {
            let registered = rail.register(span, kind, rights);
            registered.inspect_err(|e| tracing::warn!("memory of which a part is lent: {e}"))
        };
        let by_rail = narrow.get_or_init(|| rails.iter().map(register).collect());
        by_rail.get(rail)?.as_deref().ok()
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

    /// Nothing is requested with it any more, though something may be under way.
    pub(super) fn retire(&self) {
        self.is_retired.store(true, Release);
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
        let narrow = self.narrow.iter().filter_map(OnceLock::get);
        let all = [&self.by_rail].into_iter().chain(narrow).flatten().flatten();
        // Each of them, whatever the others say.
        all.map(|registration| registration.end()).fold(Ok(()), Result::and)
    }
}

/// What is registered with the devices of an endpoint.
#[derive(Default)]
pub(super) struct Book {
    regions: HashMap<u32, Arc<Pinned>>,
    /// How many of these do not move directly: the staged ones, and those that go over TCP.
    slow: [usize; 2],
    /// All of it, by where it begins.
    by_start: BTreeMap<(usize, u64), Arc<Pinned>>,
    /// Nothing is longer.
    longest: usize,
}

impl Book {
    pub(super) fn add(&mut self, pinned: &Arc<Pinned>) {
        self.longest = self.longest.max(pinned.span.len);
        self.by_start.insert((pinned.span.addr, pinned.number), Arc::clone(pinned));
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
        self.by_start.remove(&(pinned.span.addr, pinned.number));
        if self.by_start.is_empty() {
            self.longest = 0;
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
        let first = span.addr.saturating_sub(self.longest);
        let near =
            self.by_start.range((first, 0)..=(span.addr, u64::MAX)).map(|(_, pinned)| pinned);
        let covers = |pinned: &&Arc<Pinned>| pinned.covers(span) && !pinned.is_retired();
        near.filter(covers).min_by_key(|pinned| pinned.span.len)
    }
}
