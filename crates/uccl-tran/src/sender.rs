//! The sender: numbers the messages that are posted.

mod flight;
#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use uccl_wire::ack::{ACK_SPAN, Ack};

use crate::{
    Params, ParamsError,
    congestion::Window,
    loss::LossRate,
    rtt::Rtt,
    sender::flight::{Flight, PostedMessage, State},
};

/// The immediate of a message.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PacketNumber(pub u32);

/// An event that a [`Sender`] reports.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// The item has landed, and nothing of it is under way any more.
    Delivered(u64),
    /// The item has not landed and never will. It may be sent once more.
    Lost(u64),
    /// Post an empty write with this immediate, now.
    Probe(PacketNumber),
    /// The path was silent for too long. Reported once. [`Sender::unsettled`] lists the items that
    /// have not ended.
    PathDead,
}

/// Why a message cannot be sent now.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// The window is full. Try again after an acknowledgement, once [`Sender::poll`] has no more
    /// events.
    #[error("{messages} messages with {bytes} bytes are on their way, as many as may be")]
    Full {
        /// Messages that have not ended.
        messages: u32,
        /// Bytes of the messages under way.
        bytes: u64,
    },
    /// The path was given up.
    #[error("nothing was heard from the other end for {0:?}")]
    PathDead(Duration),
}

/// Why an acknowledgement was refused. A refused acknowledgement changes nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AckError {
    /// It covers a number that was not sent.
    #[error("{acked:#x} was acknowledged; {sent} numbers from {first:#x} on were sent")]
    NeverSent {
        /// The immediate of that number.
        acked: u32,
        /// The immediate of the first number.
        first: u32,
        /// How many were sent.
        sent: u64,
    },
    /// The path was given up.
    #[error("the path was given up")]
    PathDead,
}

/// The sending end of a path: numbers the messages that are posted, and learns from
/// acknowledgements how they ended.
#[derive(Debug)]
pub struct Sender {
    params: Params,
    flight: Flight,
    rtt: Rtt,
    loss: LossRate,
    window: Option<Window>,
    /// Since when the path is silent, for the probe timeout; and since when, for giving the path
    /// up.
    quiet_since: Instant,
    heard_at: Instant,
    /// How many probe timeouts have passed since something was heard.
    silences: u32,
    /// The number of the next probe, while a round of probes is being sent.
    probing: Option<u64>,
    life: Life,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Life {
    Alive,
    /// Given up, and not reported yet.
    Ending,
    Dead,
}

impl Sender {
    /// Makes the sending end of a path.
    ///
    /// # Errors
    /// When the parameters cannot be used.
    pub fn new(params: Params, now: Instant) -> Result<Self, ParamsError> {
        let params = params.checked()?;
        Ok(Self {
            params,
            flight: Flight::new(params.window + params.reorder + 1),
            rtt: Rtt::new(params.initial_rtt),
            loss: LossRate::default(),
            window: params.congestion.map(Window::new),
            quiet_since: now,
            heard_at: now,
            silences: 0,
            probing: None,
            life: Life::Alive,
        })
    }

    /// Whether [`Sender::send`] would take a message of this length.
    #[must_use]
    pub fn can_send(&self, bytes: u64) -> bool {
        self.life == Life::Alive
            && self.flight.span() < u64::from(self.params.window)
            && self.window.is_none_or(|window| {
                self.flight.messages() < window.floor_messages()
                    || self.flight.bytes().saturating_add(bytes) <= window.bytes()
            })
    }

    /// Registers a message of this length. The caller must post it, with the returned number as its
    /// immediate, before it sends or polls anything else. `item` is the caller's name for the
    /// message, which events repeat; it has no meaning here.
    ///
    /// # Errors
    /// When the message must not be posted now.
    pub fn send(&mut self, now: Instant, item: u64, bytes: u64) -> Result<PacketNumber, SendError> {
        if self.life != Life::Alive {
            return Err(SendError::PathDead(self.params.dead_after));
        }
        if !self.can_send(bytes) {
            let (messages, bytes) = (self.flight.messages(), self.flight.bytes());
            return Err(SendError::Full { messages, bytes });
        }
        if self.flight.messages() == 0 {
            (self.quiet_since, self.heard_at, self.silences) = (now, now, 0);
        }
        // This message, as the last one, serves as a probe.
        self.probing = None;
        let number =
            self.flight.push(PostedMessage { at: now, item, bytes, state: State::Message });
        Ok(self.wire(number))
    }

    /// Handles an acknowledgement. One without news changes nothing.
    ///
    /// # Errors
    /// When it covers numbers that were not sent, or the path was given up. Then it has changed
    /// nothing.
    pub fn on_ack(&mut self, now: Instant, ack: &Ack) -> Result<(), AckError> {
        if self.life != Life::Alive {
            return Err(AckError::PathDead);
        }
        let largest = self.expand(ack)?;
        let full = self.window.is_some_and(|window| self.flight.bytes() * 2 >= window.bytes());
        let sample = self.flight.get(largest).filter(|sent| sent.state.times()).map(|sent| sent.at);
        let landed = self.flight.land(largest, ack);
        if !landed.any {
            return Ok(());
        }
        (self.quiet_since, self.heard_at, self.silences) = (now, now, 0);
        self.probing = None;
        let delay =
            sample.map(|at| self.rtt.record(now, now.saturating_duration_since(at), ack.delay()));
        if let Some(window) = &mut self.window {
            window.landed(now, landed.bytes, &self.rtt, delay, full);
        }
        (0..landed.messages).for_each(|_| self.loss.record(false));
        let lost = self.flight.lose_before(self.params.reorder);
        (0..lost).for_each(|_| self.loss.record(true));
        if let Some(window) = self.window.as_mut().filter(|_| lost > 0) {
            window.lost(now, &self.rtt);
        }
        Ok(())
    }

    /// Call this when [`Sender::next_timeout`] has come. Earlier it does nothing.
    pub fn on_timeout(&mut self, now: Instant) {
        if self.next_timeout().is_none_or(|at| now < at) {
            return;
        }
        if now >= self.heard_at + self.params.dead_after {
            (self.life, self.probing) = (Life::Ending, None);
            return;
        }
        self.quiet_since = now;
        self.silences = self.silences.saturating_add(1);
        if let Some(window) = self.window.as_mut().filter(|_| self.silences == 2) {
            window.silent();
        }
        self.probing = Some(self.flight.first_probe_at_end());
    }

    /// When to call [`Sender::on_timeout`] if no acknowledgement comes before.
    #[must_use]
    pub fn next_timeout(&self) -> Option<Instant> {
        let waits = self.life == Life::Alive && self.flight.messages() > 0;
        waits.then(|| {
            let probe = self.quiet_since + self.probe_after();
            probe.min(self.heard_at + self.params.dead_after)
        })
    }

    /// The next event. Call this until it returns none.
    pub fn poll(&mut self, now: Instant) -> Option<Event> {
        if let Some(event) = self.flight.report() {
            return Some(event);
        }
        if self.life == Life::Ending {
            self.life = Life::Dead;
            return Some(Event::PathDead);
        }
        let number = self.next_probe(now)?;
        Some(Event::Probe(self.wire(number)))
    }

    /// The items that have not ended. Once the path is dead they never will. They may still land
    /// until the queue pair has been torn down; after that they can be sent another way.
    pub fn unsettled(&self) -> impl Iterator<Item = u64> {
        self.flight.unsettled()
    }

    /// How many messages are under way.
    #[must_use]
    pub fn in_flight(&self) -> u32 {
        self.flight.messages()
    }

    /// The fraction of messages that was lost lately, 0 to 1. A message is lost whole, so if this
    /// is high, shorter messages get through better.
    #[must_use]
    pub fn loss_rate(&self) -> f64 {
        self.loss.get()
    }

    /// The smoothed round trip.
    #[must_use]
    pub fn rtt(&self) -> Duration {
        self.rtt.smoothed()
    }

    /// How many bytes may be under way; `None` if only messages are counted.
    #[must_use]
    pub fn window_bytes(&self) -> Option<u64> {
        self.window.map(|window| window.bytes())
    }

    /// The next number of a round of probes. A round repeats the probes at the end, then adds new
    /// ones until there are enough to prove that everything posted before them is lost unless it
    /// has come.
    fn next_probe(&mut self, now: Instant) -> Option<u64> {
        let at = self.probing?.max(self.flight.first());
        if let Some(number) = self.flight.repeat_probe(at) {
            self.probing = Some(number + 1);
            return Some(number);
        }
        if self.flight.probes_at_end() > self.params.reorder {
            self.probing = None;
            return None;
        }
        let number =
            self.flight.push(PostedMessage { at: now, item: 0, bytes: 0, state: State::Probe });
        self.probing = Some(number + 1);
        Some(number)
    }

    fn probe_after(&self) -> Duration {
        let once = self.rtt.probe_after(self.params.ack_delay).max(self.params.min_probe);
        let factor = 1u32.checked_shl(self.silences).unwrap_or(u32::MAX);
        once.saturating_mul(factor).min(self.params.max_probe)
    }

    fn wire(&self, number: u64) -> PacketNumber {
        PacketNumber(self.params.first.wrapping_add(number as u32))
    }

    /// The largest number that an acknowledgement covers, if all that it covers was sent.
    fn expand(&self, ack: &Ack) -> Result<u64, AckError> {
        let sent = self.flight.next();
        let refused = |back: u32| AckError::NeverSent {
            acked: ack.largest.wrapping_sub(back),
            first: self.params.first,
            sent,
        };
        let end = self.wire(sent).0;
        // How far it is before the end. A number after the end wraps around to a distance larger
        // than any real one.
        let back = end.wrapping_sub(ack.largest).wrapping_sub(1);
        let known = back <= i32::MAX as u32 && u64::from(back) < sent;
        let largest = if known { sent - 1 - u64::from(back) } else { return Err(refused(0)) };
        let reach = if largest >= u64::from(ACK_SPAN) { 0 } else { ack.reach() };
        if u64::from(reach) > largest { Err(refused(reach)) } else { Ok(largest) }
    }
}
