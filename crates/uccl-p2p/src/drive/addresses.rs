//! Spans of memory that are found by an address that lies in them.

use std::collections::BTreeMap;

/// The right to a region, as an advert has it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct RegionKey {
    pub(crate) key: u64,
    pub(crate) slot: u32,
}

/// A span with its value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Entry<T> {
    pub(crate) addr: u64,
    pub(crate) len: u64,
    pub(crate) value: T,
}

impl<T> Entry<T> {
    fn end(&self) -> u64 {
        self.addr.saturating_add(self.len)
    }

    pub(crate) fn contains(&self, addr: u64) -> bool {
        self.addr <= addr && addr < self.end()
    }

    /// How many of its bytes lie at `addr` and behind it.
    pub(crate) fn left_at(&self, addr: u64) -> u64 {
        self.end().saturating_sub(addr)
    }
}

/// Spans, which may overlap. Each has a number that no other with the same start has.
///
/// A look-up takes logarithmic time however the spans overlap: it searches only the spans that lie
/// in no other. The starts and the ends of these rise together, so the last one that begins at or
/// before an address reaches further behind it than all others.
pub(crate) struct Addresses<T> {
    /// All, by start and number.
    all: BTreeMap<(u64, u64), Entry<T>>,
    /// The numbers and ends of the spans that lie in no other, by start.
    outer: BTreeMap<u64, (u64, u64)>,
}

impl<T> Default for Addresses<T> {
    fn default() -> Self {
        Self { all: BTreeMap::new(), outer: BTreeMap::new() }
    }
}

impl<T: Copy> Addresses<T> {
    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Adds a span. An empty one contains no address.
    pub(crate) fn insert(&mut self, number: u64, entry: Entry<T>) {
        self.all.insert((entry.addr, number), entry);
        self.surface(number, entry.addr, entry.end());
    }

    /// Takes a span out.
    pub(crate) fn remove(&mut self, addr: u64, number: u64) -> Option<T> {
        let entry = self.all.remove(&(addr, number))?;
        if self.outer.get(&addr).is_some_and(|(_, outer)| *outer == number) {
            self.outer.remove(&addr);
            // The spans that lay in it.
            let inner: Vec<_> = self
                .all
                .range((addr, 0)..(entry.end(), 0))
                .map(|((_, number), inner)| (*number, inner.addr, inner.end()))
                .collect();
            inner.into_iter().for_each(|(number, addr, end)| self.surface(number, addr, end));
        }
        Some(entry.value)
    }

    /// Of the spans that contain an address, the one that reaches furthest behind it.
    pub(crate) fn at(&self, addr: u64) -> Option<&Entry<T>> {
        let (start, (_, number)) = self.outer.range(..=addr).next_back()?;
        self.all.get(&(*start, *number)).filter(|entry| entry.contains(addr))
    }

    /// The starts and numbers of the spans that share bytes with the `len` bytes at `addr`.
    pub(crate) fn overlapping(&self, addr: u64, len: u64) -> Vec<(u64, u64)> {
        let end = addr.saturating_add(len);
        // Spans that begin before the range reach into it only if an outer one does.
        let outer = self.outer.range(..=addr).next_back().map_or(addr, |(start, _)| *start);
        let first = self.outer.range(..outer).rev().take_while(|(_, (reach, _))| *reach > addr);
        let first = first.last().map_or(outer, |(start, _)| *start);
        let spans = self.all.range((first, 0)..(end, 0));
        let shares = |span: &Entry<T>| len > 0 && span.len > 0 && span.end() > addr;
        spans.filter(|(_, span)| shares(span)).map(|(name, _)| *name).collect()
    }

    /// Lists a span among those that lie in no other, if it is one.
    fn surface(&mut self, number: u64, addr: u64, end: u64) {
        let before = self.outer.range(..=addr).next_back();
        if addr == end || before.is_some_and(|(_, (reach, _))| *reach >= end) {
            return;
        }
        let within = |(_, (reach, _)): &(&u64, &(u64, u64))| *reach <= end;
        while let Some((&start, _)) = self.outer.range(addr..).next().filter(within) {
            self.outer.remove(&start);
        }
        self.outer.insert(addr, (end, number));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of these spans, how far the memory at an address reaches.
    fn reach(spans: &[(u64, u64, u64)], addr: u64) -> Option<u64> {
        let around = spans.iter().filter(|(_, start, len)| *start <= addr && addr < start + len);
        around.map(|(_, start, len)| start + len).max()
    }

    #[test]
    fn the_span_that_reaches_furthest_is_found() {
        for seed in 0..400 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let (mut addresses, mut spans) = (Addresses::default(), Vec::new());
            for number in 0..60 {
                if rng.u8(..3) == 0 && !spans.is_empty() {
                    let (number, addr, _) = spans.swap_remove(rng.usize(..spans.len()));
                    assert_eq!(addresses.remove(addr, number), Some(number), "seed {seed}");
                    assert_eq!(addresses.remove(addr, number), None, "seed {seed}");
                } else {
                    let (addr, len) = (rng.u64(..40), rng.u64(..12));
                    spans.push((number, addr, len));
                    addresses.insert(number, Entry { addr, len, value: number });
                }
                assert_eq!(addresses.len(), spans.len());
                let (at, len) = (rng.u64(..50), rng.u64(..12));
                let mut overlapping = addresses.overlapping(at, len);
                overlapping.sort_unstable();
                let shares = |(_, addr, size): &&(u64, u64, u64)| {
                    len > 0 && *size > 0 && *addr < at + len && at < addr + size
                };
                let shared = spans.iter().filter(shares);
                let mut wanted: Vec<_> = shared.map(|(number, addr, _)| (*addr, *number)).collect();
                wanted.sort_unstable();
                assert_eq!(overlapping, wanted, "seed {seed}: {len} at {at}");
                for addr in 0..55 {
                    let found = addresses.at(addr);
                    assert_eq!(found.map(Entry::end), reach(&spans, addr), "seed {seed}");
                    if let Some(&Entry { addr, len, value }) = found {
                        assert!(spans.contains(&(value, addr, len)), "seed {seed}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_span_at_the_end_of_the_address_space_is_found() {
        let mut addresses = Addresses::default();
        addresses.insert(1, Entry { addr: u64::MAX - 8, len: 8, value: () });
        assert_eq!(addresses.at(u64::MAX - 1).map(|entry| entry.left_at(u64::MAX - 1)), Some(1));
        assert!(addresses.at(u64::MAX).is_none());
    }
}
