//! The path of a small message does not allocate.

mod common;

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};

use common::{pair, post_recv, post_send, until};
use uccl_flow::{Flows, Settings};

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

#[test]
fn small_messages_allocate_nothing() {
    let flows = Flows::new(Settings::default()).expect("flows over loopback");
    let (send, recv) = pair(&flows, &flows);
    let (data, mut room) = (vec![3u8; 4096], vec![0u8; 4096]);
    let mut exchange = || {
        let receive = post_recv(&recv, &mut room).expect("a slot");
        let message = post_send(&send, &data).expect("a slot");
        until(|| send.test(message).expect("no error"));
        until(|| recv.test(receive).expect("no error"));
    };
    // The first receives take room in lists that keep it.
    (0..40).for_each(|_| exchange());
    let before = COUNT.get();
    (0..100).for_each(|_| exchange());
    assert_eq!(COUNT.get() - before, 0);
}
