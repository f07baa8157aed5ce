//! The state of a stream: its chunks under way, and its speed.

use std::collections::VecDeque;

use super::{measure::Measure, params::Params, width::Census};

/// A chunk under way over a stream.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flight {
    /// The chunk.
    pub(super) chunk: usize,
    pub(super) len: u64,
    /// When the stream got it.
    pub(super) since_us: u64,
}

/// A stream of the sender.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) is_up: bool,
    /// It has not moved for so long that its chunks go over others.
    pub(super) is_late: bool,
    /// It gets no chunk: others are enough.
    pub(super) rests: bool,
    pub(super) flight: VecDeque<Flight>,
    /// Bytes under way.
    pub(super) bytes: u64,
    /// Chunks that have been acknowledged.
    pub(super) acked: u64,
    pub(super) measure: Measure,
    /// When it last got a chunk.
    pub(super) given_us: u64,
    /// When it last was acknowledged something, or got work after it had none.
    pub(super) heard_us: u64,
    /// When bytes last moved, acknowledged or not.
    pub(super) moved_us: u64,
    /// It carries a question that is not answered.
    pub(super) is_asked: bool,
}

impl Stream {
    pub(super) fn down() -> Self {
        Self {
            is_up: false,
            is_late: false,
            rests: false,
            flight: VecDeque::new(),
            bytes: 0,
            acked: 0,
            measure: Measure::default(),
            given_us: 0,
            heard_us: 0,
            moved_us: 0,
            is_asked: false,
        }
    }

    pub(super) fn open(&mut self, now_us: u64) {
        *self = Self { is_up: true, heard_us: now_us, moved_us: now_us, ..Self::down() };
    }

    pub(super) fn is_good(&self) -> bool {
        self.is_up && !self.is_late
    }

    /// Whether it gets chunks.
    pub(super) fn is_active(&self) -> bool {
        self.is_good() && !self.rests
    }

    pub(super) fn give(&mut self, chunk: usize, len: u64, now_us: u64) {
        if self.flight.is_empty() {
            self.measure.on_busy(now_us);
            self.heard_us = now_us;
            self.moved_us = now_us;
        }
        self.given_us = now_us;
        self.bytes += len;
        self.flight.push_back(Flight { chunk, len, since_us: now_us });
    }

    /// It carries a question, which the receiver answers.
    pub(super) fn ask(&mut self, now_us: u64) {
        if !self.is_busy() {
            (self.heard_us, self.moved_us) = (now_us, now_us);
        }
        self.is_asked = true;
    }

    /// The receiver has answered.
    pub(super) fn on_answer(&mut self, now_us: u64) {
        self.is_asked = false;
        self.is_late = false;
        (self.heard_us, self.moved_us) = (now_us, now_us);
    }

    /// Whether something is to come back.
    fn is_busy(&self) -> bool {
        !self.flight.is_empty() || self.is_asked
    }

    /// The oldest chunk has been acknowledged.
    pub(super) fn take_acked(&mut self, now_us: u64) -> Option<Flight> {
        let flight = self.flight.pop_front()?;
        self.acked += 1;
        self.bytes -= flight.len;
        self.measure.on_ack(flight.len, flight.since_us, now_us);
        self.heard_us = now_us;
        self.moved_us = now_us;
        self.is_late = false;
        Some(flight)
    }

    /// Whether there is room for a chunk: a few, and enough for two round trips.
    pub(super) fn has_room(&self, len: u64, params: &Params) -> bool {
        let least = 2 * params.chunk_len;
        let most = 32 * params.chunk_len;
        let window = self.measure.window().map_or(2 * least, |window| window.clamp(least, most));
        self.is_active() && self.bytes + len <= window
    }

    /// The time until a chunk that it got now would have come; `None` while its rate is unknown.
    pub(super) fn finish_us(&self, len: u64) -> Option<u64> {
        self.measure.time_us(self.bytes + len)
    }

    /// When it becomes late, if nothing comes until then.
    pub(super) fn late_at_us(&self, params: &Params) -> Option<u64> {
        let is_waiting = self.is_good() && self.is_busy();
        is_waiting.then(|| self.heard_us + params.late_us + 3 * self.measure.round_us)
    }

    /// When it is given up, if nothing moves until then.
    pub(super) fn dead_at_us(&self, params: &Params) -> Option<u64> {
        let is_waiting = self.is_up && self.is_busy();
        is_waiting.then(|| self.moved_us.max(self.heard_us) + params.dead_us)
    }
}

/// The first streams that are open carry chunks, so many; the others rest.
pub(super) fn assign(streams: &mut [Stream], count: usize) {
    for (rank, stream) in streams.iter_mut().filter(|stream| stream.is_up).enumerate() {
        stream.rests = rank >= count;
    }
}

/// Counts the streams. One without a chunk that is passed over for a faster one is not idle.
pub(super) fn census(streams: &[Stream], params: &Params) -> Census {
    let len = params.chunk_len;
    let active = || streams.iter().filter(|stream| stream.is_active());
    let with_room = active().filter(|stream| stream.has_room(len, params));
    let best = with_room.filter_map(|stream| stream.finish_us(len)).min().unwrap_or(u64::MAX);
    let is_fast = |stream: &Stream| stream.finish_us(len).is_none_or(|own| own / 2 <= best);
    Census {
        open: streams.iter().filter(|stream| stream.is_up).count(),
        active: active().count(),
        idle: active().filter(|stream| stream.flight.is_empty() && is_fast(stream)).count(),
    }
}
