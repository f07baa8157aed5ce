//! Streams with rates, stalls and deaths.

use std::collections::VecDeque;

use crate::core::Part;

/// Things that go wrong in a run.
#[derive(Clone, Copy, Debug)]
pub(super) enum Faults {
    None,
    /// All of them, at random.
    Random,
    Slow {
        stream: usize,
        by: u64,
    },
    Stall {
        stream: usize,
        from_us: u64,
        to_us: u64,
    },
    /// No stream moves, and none can be opened.
    Cut {
        from_us: u64,
        to_us: u64,
    },
}

/// A note from the receiver to the sender.
#[derive(Clone, Debug)]
pub(super) enum Note {
    Ack(u64),
    Posted { flow: u64, posted: u64 },
}

/// One stream, both directions.
pub(super) struct Line {
    pub(super) is_up: bool,
    /// When a line that is down may open.
    pub(super) opens_us: u64,
    /// Bytes for each millisecond.
    pub(super) rate: u64,
    delay_us: u64,
    stalled_to_us: u64,
    /// Bytes that it could have moved, of a piece.
    credit: u64,
    pub(super) parts: VecDeque<Part>,
    /// Bytes of the first part that have arrived.
    pub(super) arrived: u64,
    pub(super) notes: VecDeque<(u64, Note)>,
    /// Chunks that have arrived.
    pub(super) count: u64,
    pub(super) delivered: u64,
}

pub(super) struct Net {
    pub(super) lines: Vec<Line>,
    /// Bytes for each millisecond of all lines together, which they share evenly.
    pub(super) total: Option<u64>,
    pub(super) faults: Faults,
    rng: fastrand::Rng,
}

impl Net {
    pub(super) fn new(seed: u64, streams: usize) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut line = || Line {
            is_up: false,
            opens_us: rng.u64(0..2000),
            rate: rng.u64(50..2000),
            delay_us: rng.u64(10..3000),
            stalled_to_us: 0,
            credit: 0,
            parts: VecDeque::new(),
            arrived: 0,
            notes: VecDeque::new(),
            count: 0,
            delivered: 0,
        };
        let lines = (0..streams).map(|_| line()).collect();
        Self { lines, total: None, faults: Faults::None, rng }
    }

    /// Makes all lines alike.
    pub(super) fn set_rates(&mut self, rate: u64) {
        for line in &mut self.lines {
            (line.rate, line.delay_us, line.opens_us) = (rate, 100, 0);
        }
    }

    pub(super) fn delivered(&self) -> Vec<u64> {
        self.lines.iter().map(|line| line.delivered).collect()
    }

    pub(super) fn is_cut(&self, now_us: u64) -> bool {
        matches!(self.faults, Faults::Cut { from_us, to_us } if (from_us..to_us).contains(&now_us))
    }

    /// Bytes that a line moves in a step.
    pub(super) fn move_us(&mut self, at: usize, step_us: u64, now_us: u64) -> u64 {
        let is_stalled = match self.faults {
            Faults::Stall { stream, from_us, to_us } => {
                stream == at && (from_us..to_us).contains(&now_us)
            }
            _ => self.is_cut(now_us) || self.lines[at].stalled_to_us > now_us,
        };
        let by = match self.faults {
            Faults::Slow { stream, by } if stream == at => by,
            _ => 1,
        };
        let busy = self.lines.iter().filter(|line| !line.parts.is_empty()).count() as u64;
        let share = self.total.map_or(u64::MAX, |total| total / busy.max(1));
        let line = &mut self.lines[at];
        if is_stalled || !line.is_up {
            line.credit = 0;
            return 0;
        }
        line.credit += line.rate.min(share) * step_us / by;
        let bytes = line.credit / 1000;
        line.credit %= 1000;
        bytes
    }

    /// Something goes wrong with a line, perhaps. True if it dies.
    pub(super) fn misbehave(&mut self, at: usize, now_us: u64) -> bool {
        if !matches!(self.faults, Faults::Random) {
            return false;
        }
        let rng = &mut self.rng;
        let line = &mut self.lines[at];
        match rng.u32(0..2000) {
            0..3 => line.stalled_to_us = now_us + rng.u64(1_000..300_000),
            3..6 => line.rate = rng.u64(2..2000),
            6..8 => return line.is_up,
            _ => {}
        }
        false
    }

    pub(super) fn kill(&mut self, at: usize, now_us: u64) {
        let pause = self.rng.u64(0..20_000);
        let line = &mut self.lines[at];
        line.is_up = false;
        line.opens_us = now_us + pause;
        line.parts.clear();
        line.notes.clear();
        (line.arrived, line.count, line.stalled_to_us) = (0, 0, 0);
    }

    pub(super) fn note(&mut self, at: usize, note: Note, now_us: u64) {
        let line = &mut self.lines[at];
        if line.is_up {
            line.notes.push_back((now_us + line.delay_us, note));
        }
    }

    /// The next note that has arrived; none while the line stands still.
    pub(super) fn take_note(&mut self, at: usize, now_us: u64) -> Option<Note> {
        let is_still = self.is_cut(now_us) || self.lines[at].stalled_to_us > now_us;
        let notes = &mut self.lines[at].notes;
        let is_due = notes.front().is_some_and(|(due, _)| *due <= now_us);
        if is_due && !is_still { notes.pop_front().map(|(_, note)| note) } else { None }
    }
}
