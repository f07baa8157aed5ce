//! Operations that are posted in several parts, each on its own path, under one name.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use parking_lot::Mutex;
use smallvec::SmallVec;
use uccl_fabric::lane::{Completion, LaneError, OpError, OpName, OpResult, PostOutcome};

use super::SPLIT;

type PartNames = SmallVec<[OpName; 4]>;

/// Split operations that have not ended.
#[derive(Default)]
pub(super) struct Splits {
    open: Mutex<HashMap<OpName, Arc<Split>>>,
    count: AtomicU64,
}

/// A split operation. It is the completion of each of its parts, and ends with the last of them.
pub(super) struct Split {
    name: OpName,
    among: Arc<Splits>,
    done: Arc<dyn Completion>,
    state: Mutex<State>,
}

struct State {
    /// The parts that did not end when they were posted.
    names: PartNames,
    left: usize,
    error: Option<OpError>,
}

impl Splits {
    /// An operation of `count` parts, at least one, which are to be posted now.
    pub(super) fn begin(self: &Arc<Self>, count: usize, done: &Arc<dyn Completion>) -> Arc<Split> {
        let name = OpName(self.count.fetch_add(1, Relaxed) | SPLIT);
        let state = State { names: PartNames::new(), left: count, error: None };
        let (among, done) = (Arc::clone(self), Arc::clone(done));
        let split = Arc::new(Split { name, among, done, state: Mutex::new(state) });
        self.open.lock().insert(name, Arc::clone(&split));
        split
    }

    /// The parts of an operation; none when it has ended. Some of them may have.
    pub(super) fn parts_of(&self, name: OpName) -> PartNames {
        let split = self.open.lock().get(&name).cloned();
        split.map_or_else(PartNames::new, |split| split.state.lock().names.clone())
    }
}

impl Split {
    /// The completion that each part must call.
    pub(super) fn done(self: &Arc<Self>) -> Arc<dyn Completion> {
        Arc::clone(self) as Arc<dyn Completion>
    }

    /// Records the outcome of posting a part.
    pub(super) fn add(self: &Arc<Self>, posted: Result<PostOutcome, LaneError>) {
        match posted {
            Ok(PostOutcome::Pending(name)) => self.state.lock().names.push(name),
            Ok(PostOutcome::Done(result)) => Arc::clone(self).complete(result),
            Err(_) => Arc::clone(self).complete(Err(OpError::LaneDown)),
        }
    }

    /// The outcome of posting the whole operation. Call it when all parts have been posted.
    pub(super) fn posted(&self) -> PostOutcome {
        PostOutcome::Pending(self.name)
    }
}

impl Completion for Split {
    fn complete(self: Arc<Self>, result: OpResult) {
        let mut state = self.state.lock();
        if let Err(e) = result {
            state.error.get_or_insert(e);
        }
        state.left -= 1;
        if state.left > 0 {
            return;
        }
        let result = state.error.take().map_or(Ok(()), Err);
        drop(state);
        self.among.open.lock().remove(&self.name);
        Arc::clone(&self.done).complete(result);
    }
}
