//! Which lanes of a connection are lost, for those who look often.

use std::sync::atomic::{AtomicU64, Ordering::*};

/// The lanes that are lost. The session knows what becomes of their operations.
#[derive(Default)]
pub(crate) struct Lanes {
    /// Lanes not to be used any more, one bit each.
    pub(super) lost: AtomicU64,
    /// Those of them that somebody has begun to kill, or has killed.
    pub(super) ending: AtomicU64,
}

impl Lanes {
    /// Whether a lane is lost.
    pub(crate) fn lost(&self, lane: usize) -> bool {
        self.lost.load(Acquire) & bit(lane) != 0
    }

    /// Whether a lane is lost, and its killing at least begun.
    pub(crate) fn ending(&self, lane: usize) -> bool {
        self.ending.load(Acquire) & bit(lane) != 0
    }

    /// Whether some lane waits to be killed.
    pub(crate) fn to_be_ended(&self) -> bool {
        self.lost.load(Acquire) & !self.ending.load(Acquire) != 0
    }
}

/// The bit that stands for a lane.
pub(super) fn bit(lane: usize) -> u64 {
    // A connection has no more lanes than bits; what it has not is not lost.
    u32::try_from(lane).ok().and_then(|lane| 1u64.checked_shl(lane)).unwrap_or(0)
}
