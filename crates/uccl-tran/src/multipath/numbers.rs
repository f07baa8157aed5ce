//! The numbers of a path that have come.

use uccl_wire::ack::{ACK_SPAN, Ack};

use super::PathAck;
use crate::receiver::shift;

/// The furthest that a number may be ahead of the last acknowledged one. A path that is opened
/// again after a silence goes on with its numbers, and each silence may use up a window of them.
const MOST_AHEAD: u64 = 1 << 16;

/// The result of a number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum NumberState {
    New,
    Again,
    /// It is too old to be told of, or nobody can have sent it.
    Stale,
}

#[derive(Clone, Debug, Default)]
pub(super) struct PathNumbers {
    /// One after the largest number that has come.
    next: u64,
    before: [u64; 4],
    largest_ns: u64,
    /// One after the largest number that was acknowledged.
    acked: u64,
    marked: u32,
    pub(super) waiting: u32,
    pub(super) is_urgent: bool,
}

impl PathNumbers {
    /// Looks a number up and changes nothing.
    pub(super) fn look(&self, number: u32) -> NumberState {
        match self.expand(number) {
            Some(number) if number >= self.next => NumberState::New,
            Some(number) => match self.next - 1 - number {
                0 => NumberState::Again,
                back if back > u64::from(ACK_SPAN) => NumberState::Stale,
                back if self.has(back) => NumberState::Again,
                _ => NumberState::New,
            },
            None => NumberState::Stale,
        }
    }

    /// Records a number for which [`PathNumbers::look`] has not said that it is stale.
    pub(super) fn record(&mut self, now_ns: u64, number: u32, is_marked: bool) {
        let seen = self.look(number);
        let Some(number) = self.expand(number).filter(|_| seen != NumberState::Stale) else {
            return;
        };
        self.waiting += 1;
        if seen == NumberState::Again {
            self.is_urgent = true;
            return;
        }
        self.marked = self.marked.wrapping_add(is_marked.into());
        if number < self.next {
            let bit = (self.next - 2 - number) as usize;
            self.before[bit / 64] |= 1 << (bit % 64);
            self.is_urgent = true;
            return;
        }
        let by = number + 1 - self.next;
        shift(&mut self.before, by);
        if self.next > 0 && by <= u64::from(ACK_SPAN) {
            let bit = (by - 1) as usize;
            self.before[bit / 64] |= 1 << (bit % 64);
        }
        self.is_urgent |= by > 1;
        (self.next, self.largest_ns) = (number + 1, now_ns);
    }

    /// An acknowledgement of all that has come.
    pub(super) fn write(&mut self, now_ns: u64, path: u16) -> Option<PathAck> {
        (self.waiting, self.is_urgent) = (0, false);
        let largest = self.next.checked_sub(1)? as u32;
        self.acked = self.next;
        let held_ns = now_ns.saturating_sub(self.largest_ns);
        let delay_ns = u32::try_from(held_ns).unwrap_or(u32::MAX);
        let ack = Ack { largest, delay_ns, before: self.before };
        Some(PathAck { path, marked: self.marked, ack })
    }

    fn has(&self, back: u64) -> bool {
        let bit = (back - 1) as usize;
        self.before.get(bit / 64).is_some_and(|word| word >> (bit % 64) & 1 == 1)
    }

    /// The number in full; `None` if nobody can have sent it.
    fn expand(&self, number: u32) -> Option<u64> {
        let ahead = number.wrapping_sub(self.next as u32) as i32;
        let number = self.next.checked_add_signed(ahead.into())?;
        (number <= self.acked + MOST_AHEAD).then_some(number)
    }
}
