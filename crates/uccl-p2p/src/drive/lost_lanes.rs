//! Which lanes of a connection are lost, for threads that check often.

use std::sync::atomic::{AtomicU64, Ordering::*};

/// The lost lanes. The session decides how their operations go on.
#[derive(Default)]
pub(crate) struct LostLanes {
    /// Lost lanes, one bit each: they must not be used any more.
    lost: AtomicU64,
    /// Lost lanes that a thread has begun to kill, or has killed.
    ending: AtomicU64,
}

impl LostLanes {
    /// Whether a lane is lost.
    pub(crate) fn has(&self, lane: usize) -> bool {
        self.lost.load(Acquire) & bit(lane) != 0
    }

    /// Whether any lane is lost.
    pub(super) fn any(&self) -> bool {
        self.lost.load(Acquire) != 0
    }

    /// Notes that a lane is lost; false if that was known.
    pub(super) fn add(&self, lane: usize) -> bool {
        self.lost.fetch_or(bit(lane), AcqRel) & bit(lane) == 0
    }

    /// Notes that the calling thread kills a lost lane; false if another one does, or has.
    pub(super) fn begin_end(&self, lane: usize) -> bool {
        self.ending.fetch_or(bit(lane), AcqRel) & bit(lane) == 0
    }

    /// Whether a lane is lost and a thread has at least begun to kill it.
    pub(crate) fn ending(&self, lane: usize) -> bool {
        self.ending.load(Acquire) & bit(lane) != 0
    }

    /// Whether a lost lane still has to be killed.
    pub(crate) fn to_be_ended(&self) -> bool {
        self.lost.load(Acquire) & !self.ending.load(Acquire) != 0
    }
}

/// The bit that stands for a lane.
pub(super) fn bit(lane: usize) -> u64 {
    // A connection has fewer lanes than a word has bits (`greeting.rs`). A lane that it does not
    // have is not lost.
    u32::try_from(lane).ok().and_then(|lane| 1u64.checked_shl(lane)).unwrap_or(0)
}
