//! Congestion control for many paths: how many bytes of a connection may be under way, and how fast
//! they go out.
//!
//! Each algorithm is a file and an implementation of [`CongestionControl`]. The sender enforces the
//! answer of every one of them: the window before each chunk, and the rate by a pause after each.

mod credits;
mod cubic;
mod delay_and_marks;
mod fixed;
mod swift;
#[cfg(test)]
mod tests;
mod timely;

use std::fmt::Debug;

pub use credits::{CreditPacer, Credits, Grant};
pub use cubic::Cubic;
pub use delay_and_marks::DelayAndMarks;
pub use fixed::{FixedWindow, NoLimit};
pub use swift::Swift;
pub use timely::Timely;

/// The properties of a network from which an algorithm derives its constants.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LinkFacts {
    /// The speed of the host's own link, in bytes per second.
    pub bytes_per_s: f64,
    /// The round trip of a chunk and its acknowledgement through empty queues, in nanoseconds.
    pub base_rtt_ns: u64,
    /// Bytes of a chunk.
    pub chunk_len: u64,
}

impl LinkFacts {
    /// Bytes that keep the link busy for a round trip: its bandwidth-delay product.
    #[must_use]
    pub fn bdp_bytes(&self) -> f64 {
        self.bytes_per_s * self.base_rtt_ns as f64 / 1e9
    }
}

/// The news of an acknowledgement.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct AckSample {
    /// The time now, in nanoseconds of the caller's clock.
    pub now_ns: u64,
    /// Bytes that it acknowledges for the first time.
    pub bytes: u64,
    /// How many of these bytes had passed a queue that marked them (ECN).
    pub marked_bytes: u64,
    /// The round trip of its newest chunk, if that was measured.
    pub rtt_ns: Option<u64>,
    /// The least round trip of any path so far.
    pub least_rtt_ns: u64,
    /// Bytes under way before it.
    pub in_flight_bytes: u64,
}

/// An algorithm that limits the bytes of a connection under way.
pub trait CongestionControl: Debug + Send {
    /// Takes an acknowledgement.
    fn on_ack(&mut self, ack: &AckSample);

    /// Takes the loss of so many bytes.
    fn on_loss(&mut self, now_ns: u64, bytes: u64);

    /// The last loss was none: the chunk has come after all.
    fn on_undo(&mut self, _now_ns: u64) {}

    /// Nothing was heard from any path for two probe timeouts.
    fn on_silence(&mut self, _now_ns: u64) {}

    /// A chunk of this length goes out.
    fn on_send(&mut self, _now_ns: u64, _len: u64) {}

    /// The receiver has granted so many bytes since the beginning.
    fn on_credit(&mut self, _granted_bytes: u64) {}

    /// Bytes granted since the beginning, of an algorithm that asks the receiver for credits.
    fn granted_bytes(&self) -> Option<u64> {
        None
    }

    /// Bytes that may be under way.
    fn window_bytes(&self) -> u64;

    /// The speed at which chunks go out; `None` if only the window counts.
    fn bytes_per_s(&self) -> Option<f64> {
        None
    }

    /// Whether a chunk of this length may go out now. One chunk may always be under way.
    fn allows(&self, in_flight_bytes: u64, len: u64) -> bool {
        in_flight_bytes == 0 || in_flight_bytes.saturating_add(len) <= self.window_bytes()
    }
}

/// Names of the algorithms, as settings and `uccl sim` have them.
pub const CONTROL_NAMES: [&str; 7] =
    ["none", "fixed", "swift", "timely", "cubic", "delay-ecn", "eqds"];

/// The algorithm of this name.
#[must_use]
pub fn control_named(name: &str, link: &LinkFacts) -> Option<Box<dyn CongestionControl>> {
    Some(match name {
        "none" => Box::new(NoLimit),
        "fixed" => Box::new(FixedWindow::of_two_chunks_or_bdp(link)),
        "swift" => Box::new(Swift::new(link)),
        "timely" => Box::new(Timely::new(link)),
        "cubic" => Box::new(Cubic::new(link)),
        "delay-ecn" => Box::new(DelayAndMarks::new(link)),
        "eqds" => Box::new(Credits::new(link.chunk_len)),
        _ => return None,
    })
}
