//! The peer's published regions that were looked up. A connection keeps them.

use parking_lot::RwLock;
use uccl_wire::message::Source;

use super::addresses::{Addresses, Entry, RegionKey};

/// Most regions of a peer's that are kept.
const MAX_KEPT: usize = 1 << 18;

/// Regions of the peer's that were looked up.
#[derive(Default)]
pub(crate) struct LookupCache(RwLock<Addresses<RegionKey>>);

impl LookupCache {
    /// Calls `with` for the regions that are known.
    pub(crate) fn with<T>(&self, with: impl FnOnce(&Addresses<RegionKey>) -> T) -> T {
        with(&self.0.read())
    }

    /// Drops regions that the peer may have ended.
    pub(crate) fn forget(&self, doubted: &[Entry<RegionKey>]) {
        let mut known = self.0.write();
        doubted.iter().for_each(|region| _ = known.remove(region.addr, region.value.key));
    }

    /// Drops all regions that share bytes with a range.
    pub(crate) fn forget_range(&self, addr: u64, len: u64) {
        let mut known = self.0.write();
        for (addr, number) in known.overlapping(addr, len) {
            known.remove(addr, number);
        }
    }

    pub(super) fn add(&self, regions: impl ExactSizeIterator<Item = Source>) {
        let mut known = self.0.write();
        if known.len() + regions.len() > MAX_KEPT {
            known.clear();
        }
        for Source { addr, len, key, slot } in regions {
            known.insert(key, Entry { addr, len, value: RegionKey { key, slot } });
        }
    }
}

#[cfg(test)]
mod tests {
    use uccl_wire::message::MAX_FOUND;

    use super::*;

    #[test]
    fn regions_that_are_doubted_are_dropped_and_others_stay() {
        let known = LookupCache::default();
        let region = |addr, key| Source { addr, len: 10, key, slot: 1 };
        known.add([region(0, 7), region(0, 8), region(20, 9)].into_iter());
        let at = |addr| known.with(|known| known.at(addr).copied());
        let first = at(0).expect("it is known");
        known.forget(&[first]);
        let second = at(0).expect("the other one");
        assert_ne!(first.value, second.value);
        // A thread that was refused with the same key.
        known.forget(&[first]);
        assert_eq!(at(0), Some(second));
        known.forget(&[second]);
        assert!(at(0).is_none() && at(20).is_some());
    }

    #[test]
    fn a_peer_cannot_fill_the_memory_with_answers() {
        let known = LookupCache::default();
        for batch in 0..MAX_KEPT / MAX_FOUND + 2 {
            let first = (batch * MAX_FOUND) as u64;
            let regions: Vec<_> = (first..first + MAX_FOUND as u64)
                .map(|key| Source { addr: key, len: 1, key, slot: 1 })
                .collect();
            known.add(regions.into_iter());
            assert!(known.with(Addresses::len) <= MAX_KEPT);
            assert!(known.with(|known| known.at(first).is_some()), "the newest are kept");
        }
    }
}
