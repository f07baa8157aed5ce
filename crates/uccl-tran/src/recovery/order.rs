//! Loss by order.

use super::{AttemptView, Fate, LossDetection, PathProgress};

/// On a path that keeps order, a number is lost as soon as one has come that is more than `reorder`
/// after it. That is a proof.
#[derive(Clone, Copy, Default, Debug)]
pub struct OrderDetection {
    reorder: u32,
}

impl OrderDetection {
    /// By how many numbers attempts may overtake each other.
    #[must_use]
    pub fn new(reorder: u32) -> Self {
        Self { reorder }
    }
}

impl LossDetection for OrderDetection {
    fn judge(&self, attempt: &AttemptView, path: &PathProgress, _now_ns: u64) -> Fate {
        if path.largest > attempt.number + u64::from(self.reorder) {
            Fate::Lost
        } else {
            Fate::Waits
        }
    }
}
