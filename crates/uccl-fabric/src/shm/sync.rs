//! The atomic word that the shared structures are made of.
//!
//! The structures are generic over [`Word`], so that loom explores the code that runs: with
//! [`core::sync::atomic::AtomicU64`] they lie in shared memory, with loom's atomics under its
//! scheduler.

use core::sync::atomic::{AtomicU64, Ordering};

/// A 64-bit atomic word, and the fence that goes with it.
pub trait Word: Send + Sync {
    /// A word outside of shared memory.
    fn new(value: u64) -> Self;
    /// Its value.
    fn load(&self, order: Ordering) -> u64;
    /// Stores a value.
    fn store(&self, value: u64, order: Ordering);
    /// Stores a value and returns the old one.
    fn swap(&self, value: u64, order: Ordering) -> u64;
    /// Stores `new` if the value is `current`. Returns the old value, as an error if it was
    /// another. Sequentially consistent.
    fn compare_exchange(&self, current: u64, new: u64) -> Result<u64, u64>;
    /// Orders accesses, also to other words.
    fn fence(order: Ordering);
    /// Orders a sequentially consistent read-modify-write before a sequentially consistent load.
    ///
    /// The two accesses do that by themselves, except under loom, which gives sequentially
    /// consistent accesses the meaning of acquire and release only and wants a fence.
    fn fence_for_loom();
}

impl Word for AtomicU64 {
    fn new(value: u64) -> Self {
        Self::new(value)
    }

    #[inline(always)]
    fn load(&self, order: Ordering) -> u64 {
        Self::load(self, order)
    }

    #[inline(always)]
    fn store(&self, value: u64, order: Ordering) {
        Self::store(self, value, order);
    }

    #[inline(always)]
    fn swap(&self, value: u64, order: Ordering) -> u64 {
        Self::swap(self, value, order)
    }

    #[inline(always)]
    fn compare_exchange(&self, current: u64, new: u64) -> Result<u64, u64> {
        Self::compare_exchange(self, current, new, Ordering::SeqCst, Ordering::Relaxed)
    }

    #[inline(always)]
    fn fence(order: Ordering) {
        core::sync::atomic::fence(order);
    }

    #[inline(always)]
    fn fence_for_loom() {}
}

#[cfg(loom)]
impl Word for loom::sync::atomic::AtomicU64 {
    fn new(value: u64) -> Self {
        Self::new(value)
    }

    fn load(&self, order: Ordering) -> u64 {
        Self::load(self, order)
    }

    fn store(&self, value: u64, order: Ordering) {
        Self::store(self, value, order);
    }

    fn swap(&self, value: u64, order: Ordering) -> u64 {
        Self::swap(self, value, order)
    }

    fn compare_exchange(&self, current: u64, new: u64) -> Result<u64, u64> {
        Self::compare_exchange(self, current, new, Ordering::SeqCst, Ordering::Relaxed)
    }

    fn fence(order: Ordering) {
        loom::sync::atomic::fence(order);
    }

    fn fence_for_loom() {
        loom::sync::atomic::fence(Ordering::SeqCst);
    }
}

/// Explores the interleavings with up to three preemptions; all interleavings would take minutes.
#[cfg(loom)]
pub fn explore(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}
