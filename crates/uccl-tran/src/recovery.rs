//! Loss: which attempts of a path are taken for lost, and when.
//!
//! Each technique is a file and an implementation of [`LossDetection`]. Two more parts serve all of
//! them: [`TailProbe`], since nothing follows the last chunk by which its loss could show, and
//! [`Undo`], since a chunk that was taken for lost may come after all.

mod order;
mod tail_probe;
#[cfg(test)]
mod tests;
mod time;
mod undo;

use std::fmt::Debug;

pub use order::OrderDetection;
pub use tail_probe::TailProbe;
pub use time::TimeDetection;
pub use undo::Undo;

/// An attempt that was not acknowledged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AttemptView {
    /// Its number on its path.
    pub number: u64,
    /// When it was sent, in nanoseconds.
    pub sent_ns: u64,
}

/// The progress of a path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PathProgress {
    /// The largest number that was acknowledged.
    pub largest: u64,
    /// When the newest acknowledged attempt was sent, in nanoseconds.
    pub newest_sent_ns: u64,
    /// The last round trip, in nanoseconds.
    pub rtt_ns: u64,
    /// The least round trip, in nanoseconds.
    pub least_rtt_ns: u64,
    /// The smoothed round trip, in nanoseconds.
    pub smoothed_rtt_ns: u64,
}

/// The judgement on an attempt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fate {
    /// It may still come.
    Waits,
    /// It is lost if it has not come by then.
    LostAt(u64),
    /// It is taken for lost.
    Lost,
}

/// A technique of finding losses.
pub trait LossDetection: Debug + Send {
    /// Judges an attempt before the largest acknowledged number of its path.
    fn judge(&self, attempt: &AttemptView, path: &PathProgress, now_ns: u64) -> Fate;

    /// An attempt that was taken for lost has come.
    fn on_undo(&mut self, _now_ns: u64) {}

    /// A round trip has passed without such a mistake.
    fn on_round(&mut self) {}
}

/// Names of the techniques, as settings and `uccl sim` have them.
pub const LOSS_NAMES: [&str; 2] = ["order", "time"];

/// The technique of this name.
#[must_use]
pub fn loss_named(name: &str) -> Option<Box<dyn LossDetection>> {
    Some(match name {
        "order" => Box::new(OrderDetection::new(0)),
        "time" => Box::new(TimeDetection::default()),
        _ => return None,
    })
}
