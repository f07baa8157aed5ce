//! The receiver: counts the messages that arrive.

use std::time::Instant;

use uccl_wire::ack::{ACK_SPAN, Ack};

use crate::{Params, ParamsError};

/// The furthest that a number may be ahead of the last acknowledged one: a window, the allowed
/// reordering, and two rounds of probes.
const LEAD: u32 = 2 * ACK_SPAN;

/// The result of a number that has arrived.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// It arrives for the first time.
    New,
    /// It is a probe that has come before.
    Duplicate,
    /// It is before the first number, so the sender cannot have sent it. It does not count.
    TooOld,
    /// It is further ahead than a sender with these parameters can be. It does not count.
    TooNew,
}

/// The path does not keep the order that the protocol relies on. This shows only afterwards: a
/// message may have landed after its end was reported. The path must not be used any more, nor any
/// other over the same network.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OutOfOrder {
    /// A message that may have been taken for lost has arrived after all.
    #[error(
        "the path does not keep order: {by} messages overtook one, where at most {allowed} may"
    )]
    Overtaken {
        /// How far the largest number that came before it is ahead of it.
        by: u64,
        /// [`Params::reorder`].
        allowed: u32,
    },
    /// A message that had landed has landed once more.
    #[error("the path repeats messages: number {imm:#x} has come twice")]
    Repeated {
        /// Its immediate.
        imm: u32,
    },
}

/// The receiving end of a path: counts the messages that arrive, and writes acknowledgements.
#[derive(Debug)]
pub struct Receiver {
    params: Params,
    /// One after the largest number that has come.
    next: u64,
    /// Which of the numbers before the largest have come, in the format of an [`Ack`].
    before: [u64; 4],
    /// When the largest came.
    largest_at: Option<Instant>,
    /// One after the largest number that was acknowledged.
    acked: u64,
    /// How many messages have come since the last acknowledgement, and when the first of them came.
    waiting: u32,
    waiting_since: Option<Instant>,
    at_once: bool,
}

impl Receiver {
    /// Makes the receiving end of a path.
    ///
    /// # Errors
    /// When the parameters cannot be used.
    pub fn new(params: Params) -> Result<Self, ParamsError> {
        Ok(Self {
            params: params.checked()?,
            next: 0,
            before: [0; 4],
            largest_at: None,
            acked: 0,
            waiting: 0,
            waiting_since: None,
            at_once: false,
        })
    }

    /// Records that a message with this immediate has come.
    ///
    /// # Errors
    /// When the path has not kept the order. It must not be used any more.
    pub fn on_packet(&mut self, now: Instant, imm: u32) -> Result<Verdict, OutOfOrder> {
        let verdict = self.record(now, imm)?;
        match verdict {
            Verdict::New => {
                self.waiting += 1;
                self.waiting_since.get_or_insert(now);
            }
            Verdict::Duplicate => return Err(OutOfOrder::Repeated { imm }),
            Verdict::TooOld | Verdict::TooNew => {}
        }
        Ok(verdict)
    }

    /// Records that a probe has come: a message of length 0 with this immediate. The sender has
    /// heard nothing for a while and waits for an acknowledgement. A probe may come more than once.
    ///
    /// # Errors
    /// When the path has not kept the order. It must not be used any more.
    pub fn on_probe(&mut self, now: Instant, imm: u32) -> Result<Verdict, OutOfOrder> {
        let verdict = self.record(now, imm)?;
        self.at_once |= !matches!(verdict, Verdict::TooNew);
        Ok(verdict)
    }

    /// The acknowledgement that is due, if one is.
    pub fn poll_ack(&mut self, now: Instant) -> Option<Ack> {
        let due = self.next_timeout().is_some_and(|at| at <= now);
        if self.at_once || self.waiting >= self.params.ack_every || due {
            self.write(now)
        } else {
            None
        }
    }

    /// An acknowledgement of everything that has come since the last one, due or not; none if
    /// nothing has. For callers with nothing else to do: a lone message is then acknowledged
    /// without delay.
    pub fn flush(&mut self, now: Instant) -> Option<Ack> {
        if self.at_once || self.waiting > 0 { self.write(now) } else { None }
    }

    /// When to call [`Receiver::poll_ack`] if no message comes before.
    #[must_use]
    pub fn next_timeout(&self) -> Option<Instant> {
        self.waiting_since.map(|since| since + self.params.ack_delay)
    }

    fn record(&mut self, now: Instant, imm: u32) -> Result<Verdict, OutOfOrder> {
        let expected = self.params.first.wrapping_add(self.next as u32);
        // How far it is after the expected number, or before it if negative.
        let ahead = imm.wrapping_sub(expected) as i32;
        let Some(number) = self.next.checked_add_signed(ahead.into()) else {
            return Ok(Verdict::TooOld);
        };
        // The sender goes no further beyond the last acknowledged number than its window and its
        // probes.
        if number > self.acked + u64::from(LEAD) {
            return Ok(Verdict::TooNew);
        }
        if number < self.next {
            return self.record_earlier(self.next - 1 - number);
        }
        self.advance(number);
        self.at_once |= self.found_missing();
        self.largest_at = Some(now);
        Ok(Verdict::New)
    }

    /// Records a number that is `back` before the largest.
    fn record_earlier(&mut self, back: u64) -> Result<Verdict, OutOfOrder> {
        let allowed = self.params.reorder;
        let late = OutOfOrder::Overtaken { by: back, allowed };
        let bit = match back.checked_sub(1) {
            Some(bit) if bit < u64::from(ACK_SPAN) => bit as usize,
            // It is too old to be remembered: it has come too late, or twice.
            Some(_) => return Err(late),
            None => {
                self.at_once = true;
                return Ok(Verdict::Duplicate);
            }
        };
        let (word, mask) = (&mut self.before[bit / 64], 1 << (bit % 64));
        if *word & mask != 0 {
            self.at_once = true;
            return Ok(Verdict::Duplicate);
        }
        if back > u64::from(allowed) {
            // The sender may have reported this message as lost for good.
            return Err(late);
        }
        *word |= mask;
        Ok(Verdict::New)
    }

    /// Makes `number` the largest. It is not below `next`.
    fn advance(&mut self, number: u64) {
        let by = number + 1 - self.next;
        shift(&mut self.before, by);
        if self.next > 0 && by <= u64::from(ACK_SPAN) {
            let bit = (by - 1) as usize;
            self.before[bit / 64] |= 1 << (bit % 64);
        }
        self.next = number + 1;
    }

    /// Whether the number `reorder` + 1 before the largest is missing. Then it is lost, and the
    /// sender should know.
    fn found_missing(&self) -> bool {
        let back = self.params.reorder + 1;
        u64::from(back) < self.next && !self.ack(0).has(back)
    }

    fn ack(&self, delay_ns: u32) -> Ack {
        let largest = self.params.first.wrapping_add(self.next as u32).wrapping_sub(1);
        Ack { largest, delay_ns, before: self.before }
    }

    fn write(&mut self, now: Instant) -> Option<Ack> {
        let held = now.saturating_duration_since(self.largest_at?);
        (self.waiting, self.waiting_since, self.at_once) = (0, None, false);
        self.acked = self.next;
        Some(self.ack(u32::try_from(held.as_nanos()).unwrap_or(u32::MAX)))
    }
}

/// Shifts the bits towards the end, by any number of places.
pub(crate) fn shift(words: &mut [u64; 4], by: u64) {
    let (whole, bits) = (by / 64, by % 64);
    let old = *words;
    let word = |at: Option<usize>| at.and_then(|at| old.get(at)).copied().unwrap_or(0);
    for (at, new) in words.iter_mut().enumerate() {
        let from = at.checked_sub(usize::try_from(whole).unwrap_or(usize::MAX));
        let below = from.and_then(|from| from.checked_sub(1));
        let carried = if bits == 0 { 0 } else { word(below) >> (64 - bits) };
        *new = word(from) << bits | carried;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn receiver(change: impl Fn(&mut Params)) -> Receiver {
        let mut params = Params { first: u32::MAX - 2, ..Params::default() };
        change(&mut params);
        Receiver::new(params).unwrap()
    }

    /// The immediate of a number.
    fn imm(number: u32) -> u32 {
        number.wrapping_add(u32::MAX - 2)
    }

    #[test]
    fn acknowledges_after_so_many_or_so_long() {
        let (mut receiver, now) = (receiver(|_| ()), Instant::now());
        for number in 0..3 {
            assert_eq!(receiver.on_packet(now, imm(number)), Ok(Verdict::New));
            assert_eq!(receiver.poll_ack(now), None);
        }
        let due = receiver.next_timeout().unwrap();
        assert_eq!(due, now + Params::default().ack_delay);
        let ack = receiver.poll_ack(due).unwrap();
        assert_eq!((ack.largest, ack.before), (imm(2), [0b11, 0, 0, 0]));
        assert_eq!(ack.delay(), due - now);
        assert_eq!((receiver.next_timeout(), receiver.flush(due)), (None, None));
        for number in 3..7 {
            receiver.on_packet(due, imm(number)).unwrap();
        }
        assert_eq!(receiver.poll_ack(due).unwrap().before, [0b11_1111, 0, 0, 0]);
    }

    #[test]
    fn a_gap_and_a_probe_are_acknowledged_at_once() {
        let (mut receiver, now) = (receiver(|_| ()), Instant::now());
        assert_eq!(receiver.on_packet(now, imm(1)), Ok(Verdict::New));
        assert_eq!(receiver.poll_ack(now).unwrap().before, [0; 4]);
        assert_eq!(receiver.on_packet(now, imm(2)), Ok(Verdict::New));
        assert_eq!(receiver.poll_ack(now), None, "no new gap");
        assert_eq!(receiver.on_probe(now, imm(3)), Ok(Verdict::New));
        assert!(receiver.poll_ack(now).is_some());
        assert_eq!(receiver.on_probe(now, imm(3)), Ok(Verdict::Duplicate));
        assert!(receiver.poll_ack(now).is_some());
        assert_eq!(receiver.poll_ack(now + Duration::from_secs(1)), None);
    }

    #[test]
    fn a_path_that_reorders_has_a_gap_only_after_its_distance() {
        let (mut receiver, now) = (receiver(|p| p.reorder = 2), Instant::now());
        for number in [0, 2, 3] {
            receiver.on_packet(now, imm(number)).unwrap();
            assert_eq!(receiver.poll_ack(now), None, "{number}");
        }
        receiver.on_packet(now, imm(4)).unwrap();
        assert!(receiver.poll_ack(now).is_some(), "1 is missing");
    }

    #[test]
    fn numbers_that_nobody_sent_do_not_count() {
        let (mut receiver, now) = (receiver(|_| ()), Instant::now());
        assert_eq!(receiver.on_packet(now, imm(513)), Ok(Verdict::TooNew));
        assert_eq!(receiver.on_packet(now, imm(u32::MAX)), Ok(Verdict::TooOld));
        assert_eq!(receiver.flush(now), None);
        assert_eq!(receiver.on_packet(now, imm(512)), Ok(Verdict::New));
        assert_eq!(receiver.on_packet(now, imm(513)), Ok(Verdict::TooNew), "not acknowledged");
        receiver.flush(now).unwrap();
        assert_eq!(receiver.on_packet(now, imm(513)), Ok(Verdict::New));
        let late = OutOfOrder::Overtaken { by: 513, allowed: 0 };
        assert_eq!(receiver.on_packet(now, imm(0)), Err(late), "not remembered");
    }

    #[test]
    fn a_packet_that_comes_too_late_or_twice_breaks_the_path() {
        for allowed in [0, 2] {
            let (mut receiver, now) = (receiver(|p| p.reorder = allowed), Instant::now());
            let last = allowed + 2;
            for number in 1..=last {
                assert_eq!(receiver.on_packet(now, imm(number)), Ok(Verdict::New));
            }
            let late = OutOfOrder::Overtaken { by: last.into(), allowed };
            assert_eq!(receiver.on_packet(now, imm(0)), Err(late));
            assert_eq!(receiver.on_probe(now, imm(0)), Err(late));
            let twice = OutOfOrder::Repeated { imm: imm(1) };
            assert_eq!(receiver.on_packet(now, imm(1)), Err(twice));
            assert!(twice.to_string().contains("twice") && late.to_string().contains("order"));
        }
    }

    proptest! {
        /// Compares the receiver with a set of all numbers that came.
        #[test]
        fn acknowledgements_name_the_packets_that_came(
            steps in prop::collection::vec((0u64..300, any::<bool>()), 1..200),
        ) {
            const REORDER: u64 = 64;
            let mut receiver = receiver(|p| (p.window, p.reorder) = (192, 64));
            let now = Instant::now();
            let (mut came, mut next) = (std::collections::BTreeSet::new(), 0u64);
            for (step, back) in steps {
                receiver.flush(now);
                let number = if back { next.saturating_sub(step) } else { next + step % 20 };
                let imm_here = imm(number as u32);
                let verdict = receiver.on_packet(now, imm_here);
                let by = next.saturating_sub(number + 1);
                let late = OutOfOrder::Overtaken { by, allowed: REORDER as u32 };
                let want = match came.contains(&number) {
                    _ if by > 256 => Err(late),
                    true => Err(OutOfOrder::Repeated { imm: imm_here }),
                    false if by > REORDER => Err(late),
                    false => Ok(Verdict::New),
                };
                prop_assert_eq!(verdict, want);
                if verdict == Ok(Verdict::New) {
                    came.insert(number);
                    next = next.max(number + 1);
                }
                let ack = receiver.ack(0);
                prop_assert_eq!(ack.largest, imm(next as u32 - 1));
                for back in 1..=256u32 {
                    let number = (next - 1).checked_sub(back.into());
                    prop_assert_eq!(ack.has(back), number.is_some_and(|n| came.contains(&n)));
                }
            }
        }
    }
}
