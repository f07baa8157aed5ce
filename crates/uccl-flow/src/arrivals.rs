//! Flows that wait to be accepted.

use std::{collections::VecDeque, sync::Arc};

use parking_lot::Mutex;

use crate::sink::Sink;

/// The most connections that wait for `try_accept` at one listener.
const MOST_WAITING: usize = 4096;

/// New flows of a listener.
pub(crate) struct Arrivals {
    waiting: Mutex<VecDeque<Arc<Sink>>>,
    device: String,
}

impl Arrivals {
    pub(crate) fn new(device: String) -> Self {
        Self { waiting: Mutex::default(), device }
    }

    /// The next flow.
    pub(crate) fn pop(&self) -> Option<Arc<Sink>> {
        self.waiting.lock().pop_front()
    }

    pub(crate) fn is_full(&self) -> bool {
        self.waiting.lock().len() >= MOST_WAITING
    }

    /// The name of the listener's device.
    pub(crate) fn device(&self) -> &str {
        &self.device
    }

    pub(crate) fn push(&self, sink: Arc<Sink>) {
        self.waiting.lock().push_back(sink);
    }
}
