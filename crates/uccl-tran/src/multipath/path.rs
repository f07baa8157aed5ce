//! A path of a sender: its attempts under way, in order, and its times.

use std::collections::VecDeque;

use super::{MOST_CHUNKS, MOST_NUMBERS, PathAck, PathAckError, round_trip::RoundTrip};
use crate::recovery::PathProgress;

/// The place of a probe, in place of a chunk's.
pub(super) const PROBE: u32 = u32::MAX;

/// Numbers for which an attempt that was taken for lost is remembered after the largest that came.
const MEMORY: u64 = 64;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SentState {
    /// Under way.
    Waiting,
    /// A probe that was sent more than once.
    Repeated,
    /// Taken for lost by a guess; it may come.
    Lost,
    /// It has come, or never will.
    Over,
}

/// An attempt.
#[derive(Clone, Copy, Debug)]
pub(super) struct PathAttempt {
    /// Its chunk, or [`PROBE`].
    pub(super) slot: u32,
    pub(super) len: u32,
    pub(super) sent_ns: u64,
    pub(super) state: SentState,
}

/// An attempt that has come.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrival {
    pub(super) slot: u32,
    pub(super) len: u32,
    pub(super) was_lost: bool,
}

/// The news of an acknowledgement.
#[derive(Clone, Copy, Debug)]
pub(super) struct News {
    pub(super) rtt_ns: Option<u64>,
    pub(super) marked: u32,
}

/// Whether a path may be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum PathLife {
    Up,
    /// It was given up. Its attempts may still come.
    Dead,
    /// Nothing of it can come any more.
    Closed,
}

#[derive(Debug)]
pub(super) struct Path {
    /// Attempts from `first` on.
    ring: VecDeque<PathAttempt>,
    first: u64,
    pub(super) life: PathLife,
    pub(super) progress: Option<PathProgress>,
    pub(super) rtt: RoundTrip,
    /// When anything was last heard, or got under way after nothing was.
    pub(super) heard_ns: u64,
    /// Since when it is silent, for the next probe.
    pub(super) quiet_ns: u64,
    /// Probe timeouts since anything was heard.
    pub(super) silences: u32,
    /// Chunks under way, and their bytes.
    pub(super) waiting: u32,
    pub(super) bytes: u64,
    marked: u32,
    pub(super) is_probe_due: bool,
}

impl Path {
    pub(super) fn new(initial_rtt_ns: u64, now_ns: u64) -> Self {
        Self {
            ring: VecDeque::new(),
            first: 0,
            life: PathLife::Up,
            progress: None,
            rtt: RoundTrip::new(initial_rtt_ns),
            heard_ns: now_ns,
            quiet_ns: now_ns,
            silences: 0,
            waiting: 0,
            bytes: 0,
            marked: 0,
            is_probe_due: false,
        }
    }

    /// Whether a chunk fits among the outstanding numbers, and the path answers.
    pub(super) fn can_take(&self) -> bool {
        self.life == PathLife::Up && self.silences < 2 && (self.ring.len() as u64) < MOST_CHUNKS
    }

    /// Whether the path is waited for.
    pub(super) fn is_awaited(&self) -> bool {
        self.life == PathLife::Up && (self.waiting > 0 || self.silences > 0)
    }

    fn next(&self) -> u64 {
        self.first + self.ring.len() as u64
    }

    /// Sends a chunk, and returns its number.
    pub(super) fn push(&mut self, slot: u32, len: u32, now_ns: u64) -> u32 {
        if !self.is_awaited() {
            self.wake(now_ns);
        }
        self.waiting += 1;
        self.bytes += u64::from(len);
        self.add(PathAttempt { slot, len, sent_ns: now_ns, state: SentState::Waiting })
    }

    /// Sends a probe: the last number again if that is a probe, else the next one.
    pub(super) fn push_probe(&mut self, now_ns: u64) -> Option<u32> {
        let last = self.next().wrapping_sub(1) as u32;
        let is_full = self.ring.len() as u64 >= MOST_NUMBERS;
        match self.ring.back_mut() {
            Some(sent) if sent.slot == PROBE && sent.state != SentState::Over => {
                sent.state = SentState::Repeated;
                Some(last)
            }
            _ if is_full => None,
            _ => {
                let state = SentState::Waiting;
                Some(self.add(PathAttempt { slot: PROBE, len: 0, sent_ns: now_ns, state }))
            }
        }
    }

    fn add(&mut self, sent: PathAttempt) -> u32 {
        let number = self.next() as u32;
        self.ring.push_back(sent);
        number
    }

    /// Takes an acknowledgement. The attempts that have come by it are added to `came`.
    pub(super) fn acknowledge(
        &mut self,
        now_ns: u64,
        ack: &PathAck,
        came: &mut Vec<Arrival>,
    ) -> Result<News, PathAckError> {
        let Some(largest) = self.expand(ack)? else {
            return Ok(News { rtt_ns: None, marked: 0 });
        };
        let before = came.len();
        let from = self.first.max(largest.saturating_sub(MOST_NUMBERS));
        let mut newest_ns = 0;
        for number in from..=largest {
            let has_come = ack.ack.has((largest - number) as u32);
            let sent = &mut self.ring[(number - self.first) as usize];
            if !has_come || sent.state == SentState::Over {
                continue;
            }
            newest_ns = newest_ns.max(sent.sent_ns);
            let was_lost = sent.state == SentState::Lost;
            came.push(Arrival { slot: sent.slot, len: sent.len, was_lost });
            let is_timed = number == largest && sent.state == SentState::Waiting;
            let sent_ns = sent.sent_ns;
            sent.state = SentState::Over;
            if let Some(arrival) = came.last().filter(|arrival| arrival.slot != PROBE)
                && !arrival.was_lost
            {
                self.waiting -= 1;
                self.bytes -= u64::from(arrival.len);
            }
            if is_timed {
                let whole_ns = now_ns.saturating_sub(sent_ns);
                self.rtt.record(whole_ns, ack.ack.delay_ns.into());
            }
        }
        if came.len() == before {
            return Ok(News { rtt_ns: None, marked: 0 });
        }
        let marked = ack.marked.wrapping_sub(self.marked).min((came.len() - before) as u32);
        self.marked = ack.marked;
        self.advance(largest, newest_ns);
        self.wake(now_ns);
        Ok(News { rtt_ns: self.rtt.is_measured.then_some(self.rtt.last_ns), marked })
    }

    fn advance(&mut self, largest: u64, newest_ns: u64) {
        let old = self.progress.map_or((0, 0), |old| (old.largest, old.newest_sent_ns));
        self.progress = Some(PathProgress {
            largest: largest.max(old.0),
            newest_sent_ns: newest_ns.max(old.1),
            rtt_ns: self.rtt.last_ns,
            least_rtt_ns: self.rtt.least_ns,
            smoothed_rtt_ns: self.rtt.smoothed_ns,
        });
    }

    /// Something was heard, or gets under way after nothing was.
    pub(super) fn wake(&mut self, now_ns: u64) {
        (self.heard_ns, self.quiet_ns, self.silences) = (now_ns, now_ns, 0);
    }

    /// Attempts under way up to `end`, by number.
    pub(super) fn waiting_before(&self, end: u64) -> impl Iterator<Item = (u64, PathAttempt)> {
        let numbers = (self.first..end.min(self.next())).zip(self.ring.iter());
        let waiting = |(_, sent): &(u64, &PathAttempt)| {
            matches!(sent.state, SentState::Waiting | SentState::Repeated)
        };
        numbers.filter(waiting).map(|(number, sent)| (number, *sent))
    }

    /// Takes an attempt for lost: for good, or by a guess.
    pub(super) fn lose(&mut self, number: u64, is_proven: bool) {
        let Some(at) = number.checked_sub(self.first) else { return };
        let Some(sent) = self.ring.get_mut(at as usize) else { return };
        let is_probe = sent.slot == PROBE;
        sent.state = if is_proven || is_probe { SentState::Over } else { SentState::Lost };
        if !is_probe {
            self.waiting -= 1;
            self.bytes -= u64::from(sent.len);
        }
    }

    /// Forgets the attempts at the front that are over, or were lost long ago. Those lost are added
    /// to `forgotten`.
    pub(super) fn trim(&mut self, forgotten: &mut Vec<u32>) {
        let largest = self.progress.map_or(0, |progress| progress.largest);
        while let Some(sent) = self.ring.front() {
            match sent.state {
                SentState::Over => {}
                SentState::Lost if self.first + MEMORY <= largest => forgotten.push(sent.slot),
                _ => return,
            }
            self.ring.pop_front();
            self.first += 1;
        }
    }

    /// Ends the path. Its attempts are returned, with whether each was under way.
    pub(super) fn close(&mut self) -> Vec<(u32, u32, bool)> {
        let end = self.next();
        let all = self.ring.drain(..).filter(|sent| sent.slot != PROBE);
        let open = all.filter(|sent| sent.state != SentState::Over);
        let closed = open.map(|sent| (sent.slot, sent.len, sent.state != SentState::Lost));
        let closed = closed.collect();
        (self.life, self.waiting, self.bytes) = (PathLife::Closed, 0, 0);
        (self.first, self.silences) = (end, 0);
        closed
    }

    /// Opens the path again. Its numbers go on.
    pub(super) fn open(&mut self, initial_rtt_ns: u64, now_ns: u64) {
        self.life = PathLife::Up;
        self.rtt = RoundTrip::new(initial_rtt_ns);
        self.wake(now_ns);
    }

    /// The largest number that an acknowledgement covers; `None` if all of that is over.
    fn expand(&self, ack: &PathAck) -> Result<Option<u64>, PathAckError> {
        let next = self.next();
        let back = (next as u32).wrapping_sub(ack.ack.largest).wrapping_sub(1);
        let refused =
            PathAckError::NeverSent { path: ack.path, acked: ack.ack.largest, next: next as u32 };
        if back > i32::MAX as u32 || u64::from(back) >= next {
            return Err(refused);
        }
        let largest = next - 1 - u64::from(back);
        if largest < MOST_NUMBERS && u64::from(ack.ack.reach()) > largest {
            return Err(refused);
        }
        Ok((largest >= self.first).then_some(largest))
    }
}
