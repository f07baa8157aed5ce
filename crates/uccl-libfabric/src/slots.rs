//! The requests in flight on a channel, each with the space that the provider needs for its own
//! notes.

use std::{cell::UnsafeCell, collections::VecDeque, ffi::c_void, ptr};

use uccl_fabric::lane::OpKind;

use super::raw;

/// The slots of requests in flight. Nothing is allocated after they are made.
pub(super) struct Slots {
    contexts: Box<[UnsafeCell<raw::Context>]>,
    taken: Box<[Option<SlotRequest>]>,
    /// Free slots; the one that was free for longest comes first. So a completion that comes twice
    /// does not at once hit the next request.
    free: VecDeque<u32>,
}

#[derive(Clone, Copy)]
struct SlotRequest {
    tag: u64,
    kind: OpKind,
}

// SAFETY: while a request is in flight, only the provider writes to its context, from any thread;
// nobody else ever reads it.
unsafe impl Send for Slots {}

impl Slots {
    pub(super) fn new(count: usize) -> Self {
        Self {
            contexts: (0..count).map(|_| UnsafeCell::new([ptr::null_mut(); 8])).collect(),
            taken: vec![None; count].into(),
            free: (0..count as u32).collect(),
        }
    }

    /// How many are in flight.
    pub(super) fn busy(&self) -> usize {
        self.taken.len() - self.free.len()
    }

    /// How many reads are in flight.
    pub(super) fn reads(&self) -> usize {
        self.taken.iter().flatten().filter(|taken| taken.kind == OpKind::Read).count()
    }

    /// Takes a slot for a request with this tag. `None` if all are taken.
    pub(super) fn take(&mut self, tag: u64, kind: OpKind) -> Option<u32> {
        let slot = self.free.pop_front()?;
        *self.taken.get_mut(slot as usize)? = Some(SlotRequest { tag, kind });
        Some(slot)
    }

    /// The context that the provider returns with the completion. The provider may write there
    /// until then.
    pub(super) fn context(&self, slot: u32) -> *mut c_void {
        self.contexts.get(slot as usize).map_or(ptr::null_mut(), |context| context.get().cast())
    }

    /// Frees the slot of the request that ended with this context, and returns its tag. `None` if
    /// no such request is in flight.
    pub(super) fn end(&mut self, context: *mut c_void) -> Option<u64> {
        let first = self.contexts.as_ptr() as usize;
        let offset = (context as usize).checked_sub(first)?;
        let size = size_of::<raw::Context>();
        if offset % size != 0 {
            return None;
        }
        let slot = offset / size;
        let taken = self.taken.get_mut(slot)?.take()?;
        self.free.push_back(slot as u32);
        Some(taken.tag)
    }

    /// Never frees the contexts, as the provider may still write there.
    pub(super) fn abandon(&mut self) {
        std::mem::forget(std::mem::take(&mut self.contexts));
    }
}

#[cfg(test)]
mod tests {
    use uccl_fabric::lane::OpKind::{Read, Write};

    use super::*;

    #[test]
    fn reads_are_counted_until_they_end() {
        let mut slots = Slots::new(3);
        let read = slots.take(1, Read).expect("room");
        slots.take(2, Write).expect("room");
        assert_eq!((slots.busy(), slots.reads()), (2, 1));
        slots.end(slots.context(read));
        assert_eq!((slots.busy(), slots.reads()), (1, 0));
    }

    #[test]
    fn each_request_ends_once() {
        let mut slots = Slots::new(2);
        let (a, b) = (slots.take(10, Write).expect("room"), slots.take(11, Write).expect("room"));
        assert_eq!((slots.take(12, Write), slots.busy()), (None, 2));
        let (at_a, at_b) = (slots.context(a), slots.context(b));
        assert_eq!(slots.end(at_b), Some(11));
        assert_eq!(slots.end(at_b), None);
        assert_eq!(slots.take(13, Write), Some(b));
        assert_eq!(slots.end(at_a), Some(10));
        assert_eq!(slots.busy(), 1);
    }

    #[test]
    fn a_slot_is_not_taken_again_at_once() {
        let mut slots = Slots::new(3);
        let first = slots.take(1, Write).expect("room");
        assert_eq!(slots.end(slots.context(first)), Some(1));
        assert_ne!(slots.take(2, Write), Some(first));
    }

    #[test]
    fn a_context_that_is_not_ours_ends_nothing() {
        let mut slots = Slots::new(2);
        let slot = slots.take(1, Write).expect("room");
        let inside = slots.context(slot).wrapping_byte_add(8);
        let beyond = slots.context(0).wrapping_byte_add(2 * size_of::<raw::Context>());
        for strange in [ptr::null_mut(), inside, beyond, usize::MAX as *mut c_void] {
            assert_eq!(slots.end(strange), None, "{strange:p}");
        }
    }
}
