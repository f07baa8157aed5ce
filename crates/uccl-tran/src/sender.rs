//! The side that posts.

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
    sender::flight::{Flight, Sent, State},
};

/// The immediate of a message.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PacketNumber(pub u32);

/// What a [`Sender`] has to say.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// This item has landed, and nothing of it is on its way.
    Delivered(u64),
    /// This item has not landed and never will: to be sent again.
    Lost(u64),
    /// Post an empty write with this immediate, now.
    Probe(PacketNumber),
    /// Nothing has been heard for too long. Said once; what has not ended is in [`Sender::unsettled`].
    PathDead,
}

/// Why a message cannot be sent now.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// To be tried again after an acknowledgement, and after [`Sender::poll`] has nothing more to say.
    #[error("{messages} messages with {bytes} bytes are on their way, as many as may be")]
    Full {
        /// Messages that have not ended.
        messages: u32,
        /// Bytes of those that are on their way.
        bytes: u64,
    },
    /// The path was given up.
    #[error("nothing was heard from the other end for {0:?}")]
    PathDead(Duration),
}

/// Why an acknowledgement was refused. Nothing has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Refused {
    /// It is about a number that was not sent.
    #[error("{acked:#x} was acknowledged; {sent} numbers from {first:#x} on were sent")]
    NeverSent {
        /// The number.
        acked: u32,
        /// The first number.
        first: u32,
        /// How many were sent.
        sent: u64,
    },
    /// The path was given up.
    #[error("the path was given up")]
    PathDead,
}

/// Numbers the messages that are posted to a path, and learns from acknowledgements how they ended.
#[derive(Debug)]
pub struct Sender {
    params: Params,
    flight: Flight,
    rtt: Rtt,
    loss: LossRate,
    window: Option<Window>,
    /// When the silence began that the probe timeout counts from, and that before death.
    quiet_since: Instant,
    heard_at: Instant,
    /// Probe timeouts since something was heard.
    silences: u32,
    /// The next of the probes that are being sent.
    probing: Option<u64>,
    life: Life,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Life {
    Alive,
    /// Given up, and that is still to be said.
    Ending,
    Dead,
}

impl Sender {
    /// The sending end of a path.
    ///
    /// # Errors
    /// The parameters cannot be used.
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

    /// Takes a message of this length, to be posted before anything else is sent or polled; its number is its
    /// immediate. `item` is what events call it, and means nothing here.
    ///
    /// # Errors
    /// It must not be posted now.
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
        // What comes last does what a probe would.
        self.probing = None;
        let number = self.flight.push(Sent { at: now, item, bytes, state: State::Message });
        Ok(self.wire(number))
    }

    /// Takes an acknowledgement. One that has nothing new to say changes nothing.
    ///
    /// # Errors
    /// It is about numbers that were not sent, and has changed nothing.
    pub fn on_ack(&mut self, now: Instant, ack: &Ack) -> Result<(), Refused> {
        if self.life != Life::Alive {
            return Err(Refused::PathDead);
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

    /// To be called when [`Sender::next_timeout`] has come; earlier it does nothing.
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

    /// When [`Sender::on_timeout`] is to be called, if no acknowledgement comes before.
    #[must_use]
    pub fn next_timeout(&self) -> Option<Instant> {
        let waits = self.life == Life::Alive && self.flight.messages() > 0;
        waits.then(|| {
            let probe = self.quiet_since + self.probe_after();
            probe.min(self.heard_at + self.params.dead_after)
        })
    }

    /// What has happened; to be asked until there is nothing.
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

    /// Items that have not ended. Once the path is dead they never will: they can go another way when the queue
    /// pair has been torn down, since until then they may still land.
    pub fn unsettled(&self) -> impl Iterator<Item = u64> {
        self.flight.unsettled()
    }

    /// Messages on their way.
    #[must_use]
    pub fn in_flight(&self) -> u32 {
        self.flight.messages()
    }

    /// The part of messages that was lost lately, 0 to 1: a message is lost whole, so where this is much, shorter ones
    /// get through better.
    #[must_use]
    pub fn loss_rate(&self) -> f64 {
        self.loss.get()
    }

    /// The round trip, smoothed.
    #[must_use]
    pub fn rtt(&self) -> Duration {
        self.rtt.smoothed()
    }

    /// The bytes that may be on their way; `None` if only messages are counted.
    #[must_use]
    pub fn window_bytes(&self) -> Option<u64> {
        self.window.map(|window| window.bytes())
    }

    /// The next number of a round of probes: those at the end again, and new ones until as many are there as prove
    /// that what was posted before is lost.
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
        let number = self.flight.push(Sent { at: now, item: 0, bytes: 0, state: State::Probe });
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

    /// The largest number that an acknowledgement is about, if all that it is about was sent.
    fn expand(&self, ack: &Ack) -> Result<u64, Refused> {
        let sent = self.flight.next();
        let refused = |back: u32| Refused::NeverSent {
            acked: ack.largest.wrapping_sub(back),
            first: self.params.first,
            sent,
        };
        let end = self.wire(sent).0;
        // How far before the end; what is after it is further back than anything could be.
        let back = end.wrapping_sub(ack.largest).wrapping_sub(1);
        let known = back <= i32::MAX as u32 && u64::from(back) < sent;
        let largest = if known { sent - 1 - u64::from(back) } else { return Err(refused(0)) };
        let reach = if largest >= u64::from(ACK_SPAN) { 0 } else { ack.reach() };
        if u64::from(reach) > largest { Err(refused(reach)) } else { Ok(largest) }
    }
}
