//! Results of operations.

use std::sync::Arc;

use parking_lot::Mutex;
use uccl_fabric::lane::{Completion, LaneError, OpError, OpName, OpResult, PostOutcome};

use crate::memory::Memory;

/// A completion that records the result of an operation. It must be called once.
pub(crate) struct ResultSlot {
    state: Mutex<State>,
    lands: Option<Lands>,
}

/// The bytes that a write must have put into memory when it ends well.
pub(crate) struct Lands {
    pub(crate) memory: Arc<Memory>,
    pub(crate) at: usize,
    pub(crate) bytes: Vec<u8>,
}

#[derive(Default)]
struct State {
    name: Option<OpName>,
    result: Option<OpResult>,
}

impl ResultSlot {
    pub(crate) fn new(lands: Option<Lands>) -> Arc<Self> {
        Arc::new(Self { state: Mutex::default(), lands })
    }

    pub(crate) fn result(&self) -> Option<OpResult> {
        self.state.lock().result.clone()
    }

    /// The name to cancel the operation by, if it did not end at once.
    pub(crate) fn name(&self) -> Option<OpName> {
        self.state.lock().name
    }

    /// Records the result of posting the operation.
    pub(crate) fn is_posted(self: &Arc<Self>, posted: Result<PostOutcome, LaneError>) {
        match posted {
            Ok(PostOutcome::Pending(name)) => self.state.lock().name = Some(name),
            Ok(PostOutcome::Done(result)) => Arc::clone(self).complete(result),
            Err(_) => Arc::clone(self).complete(Err(OpError::LaneDown)),
        }
    }
}

impl Completion for ResultSlot {
    fn complete(self: Arc<Self>, result: OpResult) {
        if let (Some(Lands { memory, at, bytes }), Ok(())) = (&self.lands, &result) {
            let there = memory.bytes_of(*at, bytes.len());
            assert!(there == *bytes, "a write has ended whose bytes are not there");
        }
        let before = self.state.lock().result.replace(result);
        assert!(before.is_none(), "an operation ended twice: first as {before:?}");
    }
}
