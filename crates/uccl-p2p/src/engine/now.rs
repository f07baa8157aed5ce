//! Operations that their caller waits for on the spot: no transfer is made of them unless they take long.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::*},
};

use parking_lot::Mutex;
use uccl_fabric::lane::{Completion, OpResult};

use super::transfer::Transfer;

/// The end of such an operation.
#[derive(Default)]
pub(crate) struct Now {
    ended: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    result: Option<OpResult>,
    /// What the operation has become.
    transfer: Option<Arc<Transfer>>,
}

impl Now {
    /// Whether it has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Acquire)
    }

    /// How it ended, if it has.
    pub(crate) fn result(&self) -> Option<OpResult> {
        self.state.lock().result.take()
    }

    /// Makes it an operation of a transfer, which expects it.
    pub(crate) fn become_transfer(&self, transfer: &Arc<Transfer>) {
        let mut state = self.state.lock();
        match state.result.take() {
            Some(result) => {
                drop(state);
                Arc::clone(transfer).complete(result);
            }
            None => state.transfer = Some(Arc::clone(transfer)),
        }
    }
}

impl Completion for Now {
    fn complete(self: Arc<Self>, result: OpResult) {
        let mut state = self.state.lock();
        match state.transfer.take() {
            Some(transfer) => {
                drop(state);
                transfer.complete(result);
            }
            None => state.result = Some(result),
        }
        self.ended.store(true, Release);
    }
}
