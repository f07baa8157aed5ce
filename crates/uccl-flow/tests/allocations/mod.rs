//! An allocator that counts, for tests that nothing is allocated.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

/// Counts the allocations of each thread.
struct Counter;

// SAFETY: all calls go to the system's allocator as they are.
unsafe impl GlobalAlloc for Counter {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.set(COUNT.get() + 1);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static COUNTER: Counter = Counter;

/// The number of this thread's allocations until now.
pub(crate) fn count() -> usize {
    COUNT.get()
}
