//! A cache of expensive registrations, each shared by all the regions within it.
//!
//! A region itself is cheap. The registration with which a link serves it may be expensive: memory
//! mapped by a peer, pages pinned for a NIC, an exported handle. Such a registration covers the
//! range that it was made for, or more (for example a whole allocation). All regions inside share
//! it, however they overlap, and it ends with the last of them.

use std::collections::BTreeMap;

use parking_lot::Mutex;

use crate::mem::Span;

/// All registrations of one kind that are in use. `T` is a handle, cheap to clone.
#[derive(Debug)]
pub struct RegCache<T> {
    /// Held while a registration is made or ended, which may take long.
    turn: Mutex<()>,
    /// Held only for a moment, so that a lookup does not wait for `turn`. A thread that takes both
    /// takes `turn` first.
    by_range: Mutex<ByRange<T>>,
}

/// Entries by the range that they cover: start, then length.
type ByRange<T> = BTreeMap<(usize, usize), Entry<T>>;

#[derive(Debug)]
struct Entry<T> {
    value: T,
    users: usize,
}

/// A use of a registration, to be [released](RegCache::release).
#[derive(Debug)]
#[must_use = "a registration that is not released stays"]
pub struct Registration<T> {
    span: Span,
    value: T,
}

impl<T> Registration<T> {
    /// The range that it covers.
    #[must_use]
    pub fn span(&self) -> Span {
        self.span
    }

    /// The handle that was made for it.
    #[must_use]
    pub fn value(&self) -> &T {
        &self.value
    }
}

impl<T> Default for RegCache<T> {
    fn default() -> Self {
        Self { turn: Mutex::default(), by_range: Mutex::default() }
    }
}

impl<T: Clone> RegCache<T> {
    /// Uses the smallest registration that covers `span`, or else has `make` make one. `make`
    /// returns the range that it covers and its handle. Registrations are made and ended one at a
    /// time, so others hear of them in order.
    ///
    /// # Errors
    /// Those of `make`.
    pub fn acquire<E>(
        &self,
        span: Span,
        make: impl FnOnce() -> Result<(Span, T), E>,
    ) -> Result<Registration<T>, E> {
        if let Some(found) = self.share(span) {
            return Ok(found);
        }
        let _turn = self.turn.lock();
        // Another thread may have made it meanwhile.
        if let Some(found) = self.share(span) {
            return Ok(found);
        }
        let (span, value) = make()?;
        let entry = Entry { value: value.clone(), users: 1 };
        self.by_range.lock().insert((span.addr, span.len), entry);
        Ok(Registration { span, value })
    }

    /// Uses an existing registration.
    fn share(&self, span: Span) -> Option<Registration<T>> {
        let mut by_range = self.by_range.lock();
        let ((addr, len), entry) = smallest_over(&mut by_range, span)?;
        entry.users += 1;
        Some(Registration { span: Span { addr, len }, value: entry.value.clone() })
    }

    /// Ends a use. With the last one the registration ends: `unmake` undoes it.
    pub fn release(&self, registration: Registration<T>, unmake: impl FnOnce(&T)) {
        let key = (registration.span.addr, registration.span.len);
        let _turn = self.turn.lock();
        let ended = {
            let mut by_range = self.by_range.lock();
            let Some(entry) = by_range.get_mut(&key) else { return };
            entry.users -= 1;
            if entry.users == 0 { by_range.remove(&key) } else { None }
        };
        if let Some(entry) = ended {
            unmake(&entry.value);
        }
    }

    /// All registrations in use. Waits while one is being made or ended: a caller that hears of all
    /// later changes misses none.
    #[must_use]
    pub fn all(&self) -> Vec<T> {
        let _turn = self.turn.lock();
        self.by_range.lock().values().map(|entry| entry.value.clone()).collect()
    }
}

fn smallest_over<T>(
    by_range: &mut ByRange<T>,
    span: Span,
) -> Option<((usize, usize), &mut Entry<T>)> {
    let end = span.addr.checked_add(span.len)?;
    by_range
        .range_mut(..=(span.addr, usize::MAX))
        .filter(|((addr, len), _)| addr.saturating_add(*len) >= end)
        .min_by_key(|((_, len), _)| *len)
        .map(|(key, entry)| (*key, entry))
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use proptest::prelude::*;

    use super::*;

    fn acquire(cache: &RegCache<u32>, span: Span, made: &mut u32) -> Registration<u32> {
        let make = || {
            *made += 1;
            Ok::<_, Infallible>((span, *made))
        };
        let Ok(found) = cache.acquire(span, make);
        found
    }

    #[test]
    fn a_range_inside_shares_and_one_that_sticks_out_does_not() {
        let (cache, mut made) = (RegCache::default(), 0);
        let mut value_of = |addr, len| acquire(&cache, Span { addr, len }, &mut made).value;
        assert_eq!(value_of(1000, 500), 1);
        assert_eq!(value_of(1000, 500), 1);
        assert_eq!(value_of(1499, 1), 1);
        assert_eq!(value_of(1499, 2), 2);
        assert_eq!(value_of(999, 2), 3);
    }

    #[test]
    fn a_caller_that_shares_a_registration_does_not_wait_for_another() {
        let cache = RegCache::<u32>::default();
        let (there, wanted) = (Span { addr: 4096, len: 8 }, Span { addr: 8192, len: 8 });
        let _one = acquire(&cache, there, &mut 0);
        let made = cache.acquire(wanted, || {
            let shared = acquire(&cache, there, &mut 1);
            assert_eq!(shared.value, 1, "nothing is made for it");
            Ok::<_, Infallible>((wanted, 2))
        });
        assert_eq!(made.map(|made| made.value), Ok(2));
        assert_eq!(cache.all(), [1, 2]);
    }

    #[test]
    fn a_registration_that_fails_leaves_nothing() {
        let cache = RegCache::<u32>::default();
        let span = Span { addr: 4096, len: 1 };
        assert_eq!(cache.acquire(span, || Err("no")).map(|_| ()), Err("no"));
        assert!(cache.all().is_empty());
    }

    proptest! {
        /// Compares with a list that is searched from end to end.
        #[test]
        fn the_smallest_that_covers_is_used_and_ends_with_its_last_use(
            steps in prop::collection::vec(
                (0usize..40, 0usize..40, any::<prop::sample::Index>(), any::<bool>()),
                1..80,
            )
        ) {
            let (cache, mut made) = (RegCache::default(), 0);
            let mut held: Vec<Registration<u32>> = Vec::new();
            for (addr, len, pick, let_go) in steps {
                if let_go && !held.is_empty() {
                    let gone = held.swap_remove(pick.index(held.len()));
                    let last = held.iter().all(|other| other.value != gone.value);
                    let mut ended = false;
                    cache.release(gone, |_| ended = true);
                    prop_assert_eq!(ended, last);
                    continue;
                }
                let covers = |other: &&Registration<u32>| {
                    let Span { addr: start, len: size } = other.span();
                    start <= addr && start + size >= addr + len
                };
                let expected = held.iter().filter(covers).map(|other| other.span().len).min();
                let before = made;
                let found = acquire(&cache, Span { addr, len }, &mut made);
                prop_assert_eq!(made == before, expected.is_some());
                prop_assert_eq!(found.span().len, expected.unwrap_or(len));
                held.push(found);
            }
            for gone in held {
                cache.release(gone, |_| {});
            }
            prop_assert!(cache.all().is_empty());
        }
    }
}
