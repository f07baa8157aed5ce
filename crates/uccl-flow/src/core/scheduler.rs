//! The sender's side: chunks of all flows to one process, over its streams.

use std::collections::{HashMap, VecDeque};

use super::{
    params::Params,
    queue::{Cut, Queue},
    streams::{self, Stream},
    width::Width,
};

/// A chunk for a stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Part {
    pub(crate) flow: u64,
    pub(crate) message: u64,
    pub(crate) tag: u32,
    pub(crate) total: u64,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    /// It has been sent before, over another stream.
    pub(crate) is_repeat: bool,
}

/// Something for the user of the scheduler to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Action {
    /// All of the message has come; its memory is free.
    Sent { flow: u64, message: u64 },
    /// The stream is to be closed, and another opened in its place. The scheduler has forgotten it.
    Replace { stream: usize },
    /// The peer has been out of reach for the limit.
    Fail,
}

#[derive(Clone, Copy, Debug)]
struct Chunk {
    cut: Cut,
    /// Streams that carry it.
    carriers: u32,
    is_acked: bool,
    /// It waits to be sent again.
    is_queued: bool,
}

/// Decides which chunk goes over which stream.
pub(crate) struct Scheduler {
    params: Params,
    queue: Queue,
    /// Chunks that have been given and not forgotten, and places for more.
    chunks: Vec<Option<Chunk>>,
    free: Vec<usize>,
    /// Chunks that go again.
    again: VecDeque<usize>,
    streams: Vec<Stream>,
    width: Width,
    /// Bytes of each message that have not been acknowledged.
    left: HashMap<(u64, u64), u64>,
    actions: VecDeque<Action>,
    /// When anything last moved while something was to be done.
    moved_us: u64,
    repeats: u64,
}

impl Scheduler {
    pub(crate) fn new(params: Params) -> Self {
        Self {
            queue: Queue::default(),
            chunks: Vec::new(),
            free: Vec::new(),
            again: VecDeque::new(),
            streams: (0..params.streams).map(|_| Stream::down()).collect(),
            width: Width::new(params.width, params.streams),
            left: HashMap::new(),
            actions: VecDeque::new(),
            moved_us: 0,
            repeats: 0,
            params,
        }
    }

    /// Takes a message, which is not empty.
    pub(crate) fn push(&mut self, flow: u64, message: u64, total: u64, tag: u32, now_us: u64) {
        if self.left.is_empty() {
            self.moved_us = now_us;
        }
        self.left.insert((flow, message), total);
        self.queue.push(flow, message, total, tag);
    }

    /// A flow may hear of its receives from now on.
    pub(crate) fn join(&mut self, flow: u64) {
        self.queue.join(flow);
    }

    /// So many receives of the flow are posted.
    pub(crate) fn on_posted(&mut self, flow: u64, posted: u64) {
        self.queue.on_posted(flow, posted);
    }

    /// Forgets a flow: none of its chunks is sent any more.
    pub(crate) fn forget(&mut self, flow: u64) {
        self.queue.forget(flow);
        self.left.retain(|(other, _), _| *other != flow);
        for chunk in self.chunks.iter_mut().flatten().filter(|chunk| chunk.cut.flow == flow) {
            chunk.is_acked = true;
        }
    }

    /// The stream is connected.
    pub(crate) fn open(&mut self, stream: usize, now_us: u64) {
        self.streams[stream].open(now_us);
        streams::assign(&mut self.streams, self.width.count());
    }

    /// The number of streams that are to be open, the first ones. It only grows.
    pub(crate) fn wanted(&self) -> usize {
        self.width.reached()
    }

    /// The number of streams that carry chunks.
    pub(crate) fn width(&self) -> usize {
        self.width.count()
    }

    /// The stream has ended: its chunks go again.
    pub(crate) fn lose(&mut self, stream: usize) {
        let flight = std::mem::take(&mut self.streams[stream].flight);
        self.streams[stream] = Stream::down();
        for flight in flight {
            if let Some(chunk) = &mut self.chunks[flight.chunk] {
                chunk.carriers -= 1;
            }
            self.queue_again(flight.chunk);
        }
        streams::assign(&mut self.streams, self.width.count());
    }

    /// Bytes of the stream have moved, though nothing was acknowledged.
    pub(crate) fn on_moved(&mut self, stream: usize, now_us: u64) {
        self.streams[stream].moved_us = now_us;
        self.moved_us = now_us;
    }

    /// The stream carries a question. It is late and replaced without an answer, as without an
    /// acknowledgement.
    pub(crate) fn on_asked(&mut self, stream: usize, now_us: u64) {
        self.streams[stream].ask(now_us);
    }

    /// A question has been answered over its stream.
    pub(crate) fn on_answer(&mut self, stream: usize, now_us: u64) {
        self.streams[stream].on_answer(now_us);
    }

    /// The receiver has had so many chunks of this stream. False if it cannot have.
    pub(crate) fn on_ack(&mut self, stream: usize, count: u64, now_us: u64) -> bool {
        let own = &mut self.streams[stream];
        let most = own.acked + own.flight.len() as u64;
        if !own.is_up || count < own.acked || count > most {
            return false;
        }
        if own.is_asked {
            own.on_answer(now_us);
        }
        let is_measured = !self.width.is_final();
        let census = is_measured.then(|| streams::census(&self.streams, &self.params));
        let mut bytes = 0;
        while self.streams[stream].acked < count {
            let Some(flight) = self.streams[stream].take_acked(now_us) else { break };
            self.moved_us = now_us;
            bytes += flight.len;
            self.end_flight(flight.chunk);
        }
        if let Some(census) = census.filter(|_| bytes > 0)
            && self.width.on_acked(bytes, census, now_us)
        {
            streams::assign(&mut self.streams, self.width.count());
        }
        true
    }

    /// The next chunk for a stream that has room; `None` if it should wait.
    pub(crate) fn next(&mut self, stream: usize, now_us: u64) -> Option<Part> {
        if !self.streams[stream].has_room(self.params.chunk_len, &self.params) {
            return None;
        }
        if let Some(chunk) = self.pop_again(stream) {
            return self.give(stream, chunk, true, now_us);
        }
        if self.is_beaten(stream, now_us) {
            return None;
        }
        if let Some(cut) = self.queue.cut(self.params.chunk_len, self.params.early_len) {
            let chunk = self.keep(cut);
            return self.give(stream, chunk, false, now_us);
        }
        let chunk = self.slowest(stream, now_us)?;
        self.give(stream, chunk, true, now_us)
    }

    /// Time has passed.
    pub(crate) fn on_time(&mut self, now_us: u64) {
        for at in 0..self.streams.len() {
            let stream = &mut self.streams[at];
            if stream.dead_at_us(&self.params).is_some_and(|time| time <= now_us) {
                self.lose(at);
                self.actions.push_back(Action::Replace { stream: at });
            } else if stream.late_at_us(&self.params).is_some_and(|time| time <= now_us) {
                stream.is_late = true;
                let flight: Vec<_> = stream.flight.iter().map(|flight| flight.chunk).collect();
                flight.into_iter().for_each(|chunk| self.queue_again(chunk));
            }
        }
        if self.fails_at_us().is_some_and(|time| time <= now_us) {
            self.moved_us = now_us;
            self.actions.push_back(Action::Fail);
        }
    }

    /// Whether a stream that has room should ask again soon: there are chunks, now or once others
    /// are late.
    pub(crate) fn has_work(&self) -> bool {
        !self.left.is_empty() || self.streams.iter().any(|stream| stream.is_asked)
    }

    /// The next thing to do.
    pub(crate) fn next_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Chunks that were sent more than once.
    pub(crate) fn repeats(&self) -> u64 {
        self.repeats
    }

    /// The stream that would deliver a chunk first, of those with room.
    pub(crate) fn best(&self) -> Option<usize> {
        let len = self.params.chunk_len;
        let streams = self.streams.iter().enumerate();
        let with_room = streams.filter(|(_, stream)| stream.has_room(len, &self.params));
        with_room.min_by_key(|(_, stream)| stream.finish_us(len).unwrap_or(0)).map(|(at, _)| at)
    }

    /// Streams that would take a chunk now.
    pub(crate) fn takers(&self, now_us: u64) -> impl Iterator<Item = usize> + '_ {
        let len = self.params.chunk_len;
        let streams = self.streams.iter().enumerate();
        let with_room = streams.filter(move |(_, stream)| stream.has_room(len, &self.params));
        with_room.map(|(at, _)| at).filter(move |at| !self.is_beaten(*at, now_us))
    }

    /// The stream that should take the next chunk in place of this one, which is passed over.
    pub(crate) fn stand_in(&self, stream: usize, now_us: u64) -> Option<usize> {
        let has_room = self.streams[stream].has_room(self.params.chunk_len, &self.params);
        let is_passed_over = has_room && !self.queue.is_empty() && self.is_beaten(stream, now_us);
        if is_passed_over { self.best().filter(|best| *best != stream) } else { None }
    }

    /// Without receives that are posted nothing is under way, and nothing fails.
    fn fails_at_us(&self) -> Option<u64> {
        let is_under_way = self.streams.iter().any(|stream| !stream.flight.is_empty());
        let is_cut_off = self.streams.iter().all(|stream| !stream.is_up);
        let is_waiting =
            !self.left.is_empty() && (is_under_way || is_cut_off || !self.again.is_empty());
        is_waiting.then_some(self.moved_us + self.params.limit_us)
    }

    fn keep(&mut self, cut: Cut) -> usize {
        let chunk = Some(Chunk { cut, carriers: 0, is_acked: false, is_queued: false });
        match self.free.pop() {
            Some(at) => {
                self.chunks[at] = chunk;
                at
            }
            None => {
                self.chunks.push(chunk);
                self.chunks.len() - 1
            }
        }
    }

    fn give(&mut self, stream: usize, at: usize, is_repeat: bool, now_us: u64) -> Option<Part> {
        let chunk = self.chunks[at].as_mut()?;
        chunk.carriers += 1;
        if self.streams.iter().all(|stream| stream.flight.is_empty()) {
            self.width.on_busy(now_us);
        }
        let Cut { flow, number, tag, total, offset, len } = chunk.cut;
        self.streams[stream].give(at, len, now_us);
        self.repeats += u64::from(is_repeat);
        Some(Part { flow, message: number, tag, total, offset, len, is_repeat })
    }

    /// A chunk that has to go again, and that this stream does not carry.
    fn pop_again(&mut self, stream: usize) -> Option<usize> {
        let mut skipped = 0;
        while skipped < self.again.len() {
            let at = self.again.pop_front()?;
            let is_own = self.streams[stream].flight.iter().any(|flight| flight.chunk == at);
            let Some(chunk) = &mut self.chunks[at] else { continue };
            if is_own && !chunk.is_acked {
                self.again.push_back(at);
                skipped += 1;
                continue;
            }
            chunk.is_queued = false;
            if !chunk.is_acked {
                return Some(at);
            }
            self.release(at);
        }
        None
    }

    /// A chunk goes again, unless it has come.
    fn queue_again(&mut self, at: usize) {
        let Some(chunk) = &mut self.chunks[at] else { return };
        if chunk.is_acked {
            self.release(at);
        } else if !chunk.is_queued {
            chunk.is_queued = true;
            self.again.push_back(at);
        }
    }

    /// A stream has delivered a chunk.
    fn end_flight(&mut self, at: usize) {
        let Some(chunk) = &mut self.chunks[at] else { return };
        chunk.carriers -= 1;
        let cut = chunk.cut;
        let is_first = !std::mem::replace(&mut chunk.is_acked, true);
        self.release(at);
        let key = (cut.flow, cut.number);
        if is_first && let Some(left) = self.left.get_mut(&key) {
            *left -= cut.len;
            if *left == 0 {
                self.left.remove(&key);
                self.actions.push_back(Action::Sent { flow: cut.flow, message: cut.number });
            }
        }
    }

    /// Frees the place of a chunk that has come and that no stream carries.
    fn release(&mut self, at: usize) {
        if let Some(chunk) = &self.chunks[at]
            && chunk.is_acked
            && chunk.carriers == 0
            && !chunk.is_queued
        {
            self.chunks[at] = None;
            self.free.push(at);
        }
    }

    /// Whether another stream with room would deliver a chunk in less than half the time. A stream
    /// that is passed over gets one now and then, or nobody would see that it is fast again.
    fn is_beaten(&self, stream: usize, now_us: u64) -> bool {
        let len = self.params.chunk_len;
        let own = &self.streams[stream];
        let Some(own_us) = own.finish_us(len) else {
            return !own.flight.is_empty() && self.is_any_known();
        };
        if own.flight.is_empty() && now_us >= own.given_us + self.params.probe_us {
            return false;
        }
        let others = self.streams.iter().enumerate().filter(|(at, _)| *at != stream);
        let with_room = others.filter(|(_, other)| other.has_room(len, &self.params));
        let best = with_room.filter_map(|(_, other)| other.finish_us(len)).min();
        best.is_some_and(|best| 2 * best < own_us)
    }

    fn is_any_known(&self) -> bool {
        self.streams.iter().any(|stream| stream.is_good() && stream.finish_us(0).is_some())
    }

    /// The chunk that has been under way for the longest time over one other stream, if this one
    /// would need much less.
    fn slowest(&self, stream: usize, now_us: u64) -> Option<usize> {
        let own_us = self.streams[stream].finish_us(self.params.chunk_len)?;
        let patience =
            4 * (own_us + self.streams[stream].measure.round_us) + self.params.late_us / 2;
        let flights = self.streams.iter().enumerate().filter(|(at, _)| *at != stream);
        let old = flights
            .flat_map(|(_, other)| &other.flight)
            .filter(|flight| now_us.saturating_sub(flight.since_us) > patience);
        let alone = old.filter(|flight| {
            self.chunks[flight.chunk]
                .is_some_and(|chunk| chunk.carriers == 1 && !chunk.is_acked && !chunk.is_queued)
        });
        alone.min_by_key(|flight| flight.since_us).map(|flight| flight.chunk)
    }
}
