//! Congestion control: how many bytes may be under way.
//!
//! It is based on delay, after Swift (Kumar et al., SIGCOMM 2020). Swift paces windows below one
//! message; here a minimum number of messages takes the place of that.

use std::time::{Duration, Instant};

use crate::{ParamsError, rtt::Rtt};

/// Parameters of the window, which limits the bytes under way and adapts to the path's delay and
/// losses.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Congestion {
    /// The window at the start, in bytes.
    pub start_bytes: u64,
    /// The least size of the window, in bytes.
    pub floor_bytes: u64,
    /// The largest size of the window, in bytes.
    pub ceiling_bytes: u64,
    /// This many messages may always be under way, however long they are.
    pub floor_messages: u32,
    /// Growth per round trip while the path is not full, in bytes.
    pub gain_bytes: u64,
    /// The target delay beyond the least round trip, which is time spent in queues, for a window of
    /// `start_bytes`. It is half of this for large windows and up to four times this for small
    /// ones.
    pub target: Duration,
    /// The largest fraction of the window that one round trip takes away, 0 to 1.
    pub max_decrease: f64,
    /// The fraction that a round trip with losses takes away, 0 to 1; 0 if losses are no sign of
    /// queues.
    pub loss_decrease: f64,
}

impl Default for Congestion {
    fn default() -> Self {
        Self {
            start_bytes: 1 << 20,
            floor_bytes: 64 << 10,
            ceiling_bytes: 1 << 30,
            floor_messages: 4,
            gain_bytes: 64 << 10,
            target: Duration::from_micros(200),
            max_decrease: 0.5,
            loss_decrease: 0.05,
        }
    }
}

impl Congestion {
    pub(crate) fn check(&self) -> Result<(), ParamsError> {
        for (name, zero) in [
            ("floor_bytes", self.floor_bytes == 0),
            ("floor_messages", self.floor_messages == 0),
            ("gain_bytes", self.gain_bytes == 0),
        ] {
            if zero {
                return Err(ParamsError::Zero(name));
            }
        }
        if self.ceiling_bytes < self.floor_bytes {
            return Err(ParamsError::Below("ceiling_bytes", "floor_bytes"));
        }
        for (name, part) in
            [("max_decrease", self.max_decrease), ("loss_decrease", self.loss_decrease)]
        {
            if !(0.0..=1.0).contains(&part) {
                return Err(ParamsError::Fraction(name, part));
            }
        }
        Ok(())
    }
}

/// The window itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    params: Congestion,
    bytes: f64,
    /// Until the path shows its limit for the first time, the window doubles each round trip.
    searching: bool,
    shrunk_at: Option<Instant>,
}

impl Window {
    pub(crate) fn new(params: Congestion) -> Self {
        let mut this = Self { params, bytes: 0.0, searching: true, shrunk_at: None };
        this.set(params.start_bytes as f64);
        this
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    pub(crate) fn floor_messages(&self) -> u32 {
        self.params.floor_messages
    }

    /// Adapts to `bytes` having landed, after `delay` if that was measured. `full` means that the
    /// window was the limit.
    pub(crate) fn landed(
        &mut self,
        now: Instant,
        bytes: u64,
        rtt: &Rtt,
        delay: Option<Duration>,
        full: bool,
    ) {
        let target = rtt.least() + self.queue_target();
        if let Some(delay) = delay
            && delay > target
        {
            let excess = (delay - target).as_secs_f64() / delay.as_secs_f64();
            self.shrink(now, rtt, excess.min(self.params.max_decrease));
        } else if full && self.searching {
            self.set(self.bytes + bytes as f64);
        } else if full {
            self.set(self.bytes + self.params.gain_bytes as f64 * bytes as f64 / self.bytes);
        }
    }

    /// Shrinks the window after a loss.
    pub(crate) fn lost(&mut self, now: Instant, rtt: &Rtt) {
        self.shrink(now, rtt, self.params.loss_decrease);
    }

    /// Two probe timeouts passed in silence: nothing is known of the path any more.
    pub(crate) fn silent(&mut self) {
        self.set(0.0);
    }

    /// The target for the time in queues. It is longer for small windows: otherwise a sender that
    /// measures the least round trip while others fill the queue would push them out for good.
    fn queue_target(&self) -> Duration {
        let smaller = (self.params.start_bytes as f64 / self.bytes).sqrt();
        self.params.target.mul_f64(smaller.clamp(0.5, 4.0))
    }

    /// Takes away a fraction of the window, at most once a round trip.
    fn shrink(&mut self, now: Instant, rtt: &Rtt, part: f64) {
        self.searching = false;
        let since = self.shrunk_at.map(|at| now.saturating_duration_since(at));
        if since.is_none_or(|since| since >= rtt.smoothed()) {
            self.shrunk_at = Some(now);
            self.set(self.bytes * (1.0 - part));
        }
    }

    fn set(&mut self, bytes: f64) {
        let (floor, ceiling) = (self.params.floor_bytes as f64, self.params.ceiling_bytes as f64);
        self.bytes = bytes.clamp(floor, ceiling);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: Duration = Duration::from_micros(1);

    #[test]
    fn grows_below_the_target_and_shrinks_above_it_once_a_round_trip() {
        let (params, now) = (Congestion::default(), Instant::now());
        let (mut window, mut rtt) = (Window::new(params), Rtt::new(10 * US));
        rtt.record(now, 10 * US, Duration::ZERO);
        let start = window.bytes();
        window.landed(now, 1000, &rtt, Some(10 * US), false);
        assert_eq!(window.bytes(), start, "it was not the limit");
        window.landed(now, 1000, &rtt, Some(10 * US), true);
        assert_eq!(window.bytes(), start + 1000);
        let late = params.target * 3;
        window.landed(now, 1000, &rtt, Some(late), true);
        assert_eq!(window.bytes(), (start + 1000) / 2);
        window.landed(now, 1000, &rtt, Some(late), true);
        assert_eq!(window.bytes(), (start + 1000) / 2, "once a round trip");
        window.landed(now, window.bytes(), &rtt, Some(10 * US), true);
        assert_eq!(window.bytes(), (start + 1000) / 2 + params.gain_bytes);
        window.silent();
        assert_eq!(window.bytes(), params.floor_bytes);
    }
}
