//! The link: one queue for all paths that share it, and its faults.

use std::{
    ops::Range,
    time::{Duration, Instant},
};

use fastrand::Rng;

/// The properties of a path.
#[derive(Clone, Debug)]
pub(crate) struct Path {
    pub(crate) bytes_per_second: f64,
    /// Time from end to end, each way.
    pub(crate) delay: Duration,
    /// The most time that is added, each way.
    pub(crate) jitter: Duration,
    /// Bytes that queue before the link; messages that meet a full queue are dropped.
    pub(crate) queue_bytes: f64,
    /// Part of the messages that are dropped.
    pub(crate) loss: f64,
    /// Part of the packets of 4 KiB that are dropped; their messages are lost with them.
    pub(crate) packet_loss: f64,
    /// By how many numbers messages overtake each other.
    pub(crate) reorder: u32,
    /// Part of the messages that are held up, for at most `held_for`, while later ones overtake
    /// them.
    pub(crate) held: f64,
    pub(crate) held_for: Duration,
    /// Part of the acknowledgements that are dropped.
    pub(crate) ack_loss: f64,
    /// Part of the acknowledgements that come twice.
    pub(crate) ack_repeats: f64,
    /// Times since the start in which nothing gets through.
    pub(crate) holes: Vec<Range<Duration>>,
}

impl Default for Path {
    fn default() -> Self {
        Self {
            bytes_per_second: 10e9,
            delay: Duration::from_micros(5),
            jitter: Duration::ZERO,
            queue_bytes: f64::INFINITY,
            loss: 0.0,
            packet_loss: 0.0,
            reorder: 0,
            held: 0.0,
            held_for: Duration::ZERO,
            ack_loss: 0.0,
            ack_repeats: 0.0,
            holes: Vec::new(),
        }
    }
}

/// A path in use.
pub(crate) struct Link {
    pub(crate) path: Path,
    start: Instant,
    /// The time when the link has sent all queued bytes.
    free_at: Instant,
    /// The longest time that something waited.
    pub(crate) longest_wait: Duration,
}

impl Link {
    pub(crate) fn new(path: Path, start: Instant) -> Self {
        Self { path, start, free_at: start, longest_wait: Duration::ZERO }
    }

    /// When a message is through, if nothing holds it back, and whether it lands.
    pub(crate) fn carry(&mut self, now: Instant, bytes: u64, rng: &mut Rng) -> (Instant, bool) {
        let waits = self.free_at.saturating_duration_since(now);
        let queued = waits.as_secs_f64() * self.path.bytes_per_second;
        let packets = bytes.div_ceil(4096).max(1) as i32;
        let survives = (1.0 - self.path.loss) * (1.0 - self.path.packet_loss).powi(packets);
        let lands = queued <= self.path.queue_bytes && rng.f64() < survives && !self.in_hole(now);
        if queued <= self.path.queue_bytes {
            // 64 bytes of headers for a message of any length.
            let takes = (bytes + 64) as f64 / self.path.bytes_per_second;
            self.free_at = now + waits + Duration::from_secs_f64(takes);
            self.longest_wait = self.longest_wait.max(waits);
        }
        (self.free_at + self.delay(rng), lands)
    }

    /// How long a message is held up behind others, if it is one of those.
    pub(crate) fn hold_up(&self, rng: &mut Rng) -> Option<Duration> {
        (self.path.held > 0.0 && rng.f64() < self.path.held)
            .then(|| self.path.held_for.mul_f64(rng.f64()))
    }

    /// When copies of an acknowledgement arrive.
    pub(crate) fn carry_ack(&self, now: Instant, rng: &mut Rng) -> Vec<Instant> {
        if rng.f64() < self.path.ack_loss || self.in_hole(now) {
            return Vec::new();
        }
        let copies = if rng.f64() < self.path.ack_repeats { 2 } else { 1 };
        (0..copies).map(|_| now + self.delay(rng)).collect()
    }

    fn delay(&self, rng: &mut Rng) -> Duration {
        self.path.delay + self.path.jitter.mul_f64(rng.f64())
    }

    fn in_hole(&self, now: Instant) -> bool {
        self.path.holes.iter().any(|hole| hole.contains(&(now - self.start)))
    }
}
