//! A ring of commands that emulated threads push to, and a test pops from.

use std::{
    ffi::c_void,
    mem,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use super::{LIBRARY, Library, find};

/// Where the proxy's count is, and where slots begin, in words.
const TAIL: usize = 16;
const SLOTS_AT: usize = 32;
const LAP: u64 = 1 << 63;

pub(crate) struct Ring {
    words: Vec<AtomicU64>,
    slots: u64,
    pusher: *mut c_void,
    push: extern "C" fn(*mut c_void, u32, u32, u32) -> u32,
    poison: extern "C" fn(*mut c_void, u32),
    free: extern "C" fn(*mut c_void),
}

// SAFETY: words that several threads change are atomic; one launch at a time pushes.
unsafe impl Sync for Ring {}

impl Ring {
    pub(crate) fn new(slots: u64, timeout: Duration) -> Self {
        let words: Vec<_> =
            (0..SLOTS_AT + 2 * slots as usize + 1).map(|_| AtomicU64::new(0)).collect();
        let Library(library) = *LIBRARY;
        let found = |name| find(library, name);
        // SAFETY: the types are those in emulator.cpp; the library stays loaded.
        unsafe {
            let make = mem::transmute::<*const c_void, extern "C" fn(u64, u32, u64) -> *mut c_void>(
                found(c"emulated_pusher"),
            );
            // Slots are aligned to 16 bytes.
            let skipped = words.as_ptr().addr() / 8 % 2;
            let at = words.as_ptr().add(skipped).addr() as u64;
            Self {
                pusher: make(at, slots as u32, timeout.as_nanos() as u64),
                words,
                slots,
                push: mem::transmute::<
                    *const c_void,
                    extern "C" fn(*mut c_void, u32, u32, u32) -> u32,
                >(found(c"emulated_push")),
                poison: mem::transmute::<*const c_void, extern "C" fn(*mut c_void, u32)>(found(
                    c"emulated_poison",
                )),
                free: mem::transmute::<*const c_void, extern "C" fn(*mut c_void)>(found(
                    c"emulated_pusher_free",
                )),
            }
        }
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        &self.words[self.words.as_ptr().addr() / 8 % 2 + at]
    }

    /// Makes each thread of some blocks push `each` commands. Not 0: the state of a thread that
    /// could not.
    pub(crate) fn push(&self, (blocks, threads): (u32, u32), each: u32) -> u32 {
        (self.push)(self.pusher, blocks, threads, each)
    }

    /// Ends all waits, as the host does.
    pub(crate) fn poison(&self, yes: bool) {
        (self.poison)(self.pusher, u32::from(yes));
    }

    /// The command with a number, if both of its halves are there. Both must be equal.
    pub(crate) fn pop(&self, number: u64) -> Option<u64> {
        let lap = if number & self.slots == 0 { LAP } else { 0 };
        let slot = SLOTS_AT + 2 * (number & (self.slots - 1)) as usize;
        let halves = [slot, slot + 1].map(|at| self.word(at).load(Ordering::Acquire));
        if halves.iter().any(|half| half & LAP != lap) {
            return None;
        }
        assert_eq!(halves[0], halves[1], "command {number} is two");
        Some(halves[0] & !LAP)
    }

    /// Publishes the number of popped commands to the threads.
    pub(crate) fn tell(&self, popped: u64) {
        self.word(TAIL).store(popped, Ordering::Release);
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        (self.free)(self.pusher);
    }
}
