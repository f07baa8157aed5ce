//! Operations that their caller waits for on the spot. They become part of a transfer only if they
//! take long.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::*},
};

use parking_lot::Mutex;
use uccl_fabric::lane::{Completion, OpResult};

/// Notes how such an operation ends.
#[derive(Default)]
pub(crate) struct InlineOp {
    ended: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    result: Option<OpResult>,
    /// The completion in the transfer that the operation has become a part of.
    successor: Option<Arc<dyn Completion>>,
}

impl InlineOp {
    /// Whether it has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Acquire)
    }

    /// How it ended, if it has.
    pub(crate) fn result(&self) -> Option<OpResult> {
        self.state.lock().result.clone()
    }

    /// Makes the operation part of a transfer, which must expect it: `successor` gets its result.
    pub(crate) fn hand_to(&self, successor: Arc<dyn Completion>) {
        let mut state = self.state.lock();
        match state.result.take() {
            Some(result) => {
                drop(state);
                successor.complete(result);
            }
            None => state.successor = Some(successor),
        }
    }
}

impl Completion for InlineOp {
    fn complete(self: Arc<Self>, result: OpResult) {
        let mut state = self.state.lock();
        match state.successor.take() {
            Some(successor) => {
                drop(state);
                successor.complete(result);
            }
            None => state.result = Some(result),
        }
        self.ended.store(true, Release);
    }
}
