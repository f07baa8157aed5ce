//! Gates that hold back a step while a test looks.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::SeqCst},
};

use parking_lot::{Condvar, Mutex};

/// A place where a step waits while it is held.
#[derive(Default)]
pub(super) struct Gate {
    held: Mutex<bool>,
    released: Condvar,
    waiting: AtomicBool,
}

impl Gate {
    pub(super) fn pass(&self) {
        let mut held = self.held.lock();
        while *held {
            self.waiting.store(true, SeqCst);
            self.released.wait(&mut held);
        }
    }

    pub(super) fn hold(self: &Arc<Self>) -> GateHold {
        *self.held.lock() = true;
        GateHold(Arc::clone(self))
    }
}

/// Holds back a step until this is dropped.
pub struct GateHold(Arc<Gate>);

impl GateHold {
    /// Whether a thread has come to the held step.
    pub fn is_waited_for(&self) -> bool {
        self.0.waiting.load(SeqCst)
    }

    /// Lets the step be taken, and later ones.
    pub fn release(&self) {
        *self.0.held.lock() = false;
        self.0.released.notify_all();
    }
}

impl Drop for GateHold {
    fn drop(&mut self) {
        self.release();
    }
}
