//! Memory of messages that threads read.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use parking_lot::Mutex;

use crate::{error::FlowError, socket::Span};

/// The part of a sending flow that threads touch.
#[derive(Default)]
pub(crate) struct Outbox {
    /// A bit for each slot with a large message that has ended.
    pub(crate) ended: AtomicU32,
    /// System calls that may read messages of the flow.
    reading: AtomicU32,
    pub(crate) failure: Mutex<Option<FlowError>>,
}

impl Outbox {
    /// Waits for the system calls that read messages. They do not block, and end by themselves.
    pub(super) fn wait_for_reads(&self) {
        while self.reading.load(Ordering::Acquire) > 0 {
            std::thread::yield_now();
        }
    }
}

/// Memory of a message.
pub(super) struct Source {
    pub(super) payload: Span,
    slot: usize,
    outbox: Arc<Outbox>,
}

impl Source {
    pub(super) fn new(payload: Span, slot: usize, outbox: &Arc<Outbox>) -> Self {
        Self { payload, slot, outbox: Arc::clone(outbox) }
    }

    /// The bytes of a part, behind the first `done` ones.
    pub(super) fn lease(&self, offset: u64, len: u64, done: u64) -> Lease {
        let end = (offset + len) as usize;
        let rest = Span { len: end, ..self.payload }.after((offset + done) as usize);
        self.outbox.reading.fetch_add(1, Ordering::Acquire);
        Lease::Memory(rest, ReadGuard(Arc::clone(&self.outbox)))
    }

    /// The message has ended.
    pub(super) fn end(&self) {
        self.outbox.ended.fetch_or(1 << self.slot, Ordering::Release);
    }

    pub(super) fn fail(&self, failure: &FlowError) {
        self.outbox.failure.lock().get_or_insert_with(|| failure.clone());
    }
}

/// The bytes that a stream sends next of its chunk.
pub(crate) enum Lease {
    /// These, from the place that was asked for; [`Lease::end`] follows the system call.
    Memory(Span, ReadGuard),
    /// Any, since the receiver has the chunk.
    Filler,
}

/// Keeps memory from its owner while a system call reads it.
pub(crate) struct ReadGuard(Arc<Outbox>);

impl Drop for ReadGuard {
    fn drop(&mut self) {
        self.0.reading.fetch_sub(1, Ordering::Release);
    }
}
