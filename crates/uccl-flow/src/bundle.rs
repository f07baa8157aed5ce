//! The streams for large messages from this process to another one, shared by all flows between
//! them.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use uccl_wire::flow::{FlowHead, HeadKind};

use crate::{
    attempt::Route,
    bell::Bell,
    core::{Action, Params, Part, Scheduler},
    counters::PeerCounters,
    error::{Backlog, FlowError, Peer},
    rate::BusyRate,
    settings::Settings,
    socket::Span,
};

#[cfg(test)]
mod tests;

/// Pings within the limit.
const PINGS: u64 = 4;

/// The part of a sending flow that threads touch.
#[derive(Default)]
pub(crate) struct Outbox {
    /// A bit for each slot with a large message that has ended.
    pub(crate) ended: AtomicU32,
    /// System calls that may read messages of the flow.
    reading: AtomicU32,
    pub(crate) failure: Mutex<Option<FlowError>>,
}

/// Memory of a message.
struct Source {
    payload: Span,
    slot: usize,
    outbox: Arc<Outbox>,
}

/// A frame for a stream.
pub(crate) enum Job {
    Chunk(Part),
    Ping,
}

/// The bytes that a stream sends next of its chunk.
pub(crate) enum Lease {
    /// These, from the place that was asked for; [`Lease::end`] follows the system call.
    Memory(Span, ReadGuard),
    /// Any, since the receiver has the chunk.
    Filler,
}

/// Keeps memory from its owner while a system call reads it.
pub(crate) struct ReadGuard(Arc<Outbox>);

impl Drop for ReadGuard {
    fn drop(&mut self) {
        self.0.reading.fetch_sub(1, Ordering::Release);
    }
}

/// The process that a bundle goes to.
pub(crate) struct Target {
    pub(crate) peer: Peer,
    pub(crate) key: [u8; 16],
    pub(crate) routes: Vec<Route>,
}

/// The streams for large messages to one process.
pub(crate) struct Bundle {
    pub(crate) target: Target,
    state: Mutex<State>,
    begun: Instant,
    users: AtomicUsize,
    /// The thread that the next chunk wakes.
    next_bell: AtomicUsize,
    bells: Vec<Arc<Bell>>,
    chunk_len: u64,
    limit: Duration,
    /// The greatest rate of all bundles in bytes per second; 0 before any.
    greatest_rate: Arc<AtomicU64>,
}

struct State {
    scheduler: Scheduler,
    rate: BusyRate,
    sources: HashMap<(u64, u64), Source>,
    streams: Vec<StreamState>,
    is_closed: bool,
    /// When a note last came.
    heard_us: u64,
    /// When a message was last taken while there was none.
    busy_us: u64,
    ping_us: u64,
    failure: Option<FlowError>,
    last_error: String,
    /// Streams that were open and have ended.
    lost: u64,
}

#[derive(Clone, Copy, Default)]
struct StreamState {
    /// The message of which it sends a chunk.
    current: Option<(u64, u64)>,
    /// It is to be closed and opened again.
    is_reset: bool,
    is_open: bool,
    /// Bytes of chunks that it and its forerunners were given.
    bytes: u64,
}

// SAFETY: the spans are callers' memory, which they leave to their flows until a message has ended,
// on any thread.
unsafe impl Send for State {}

impl Bundle {
    pub(crate) fn new(
        target: Target,
        settings: &Settings,
        bells: Vec<Arc<Bell>>,
        greatest_rate: Arc<AtomicU64>,
    ) -> Self {
        let chunk_len = settings.chunk_len as u64;
        let params = Params {
            streams: settings.streams,
            chunk_len,
            early_len: Params::early_len(chunk_len),
            late_us: 10_000,
            dead_us: 1_000_000,
            limit_us: settings.limit.as_micros() as u64,
            probe_us: 50_000,
        };
        let state = State {
            scheduler: Scheduler::new(params),
            rate: BusyRate::default(),
            sources: HashMap::new(),
            streams: vec![StreamState::default(); settings.streams],
            is_closed: false,
            heard_us: 0,
            busy_us: 0,
            ping_us: 0,
            failure: None,
            last_error: String::new(),
            lost: 0,
        };
        Self {
            target,
            state: Mutex::new(state),
            begun: Instant::now(),
            users: AtomicUsize::new(1),
            next_bell: AtomicUsize::new(0),
            bells,
            chunk_len,
            limit: settings.limit,
            greatest_rate,
        }
    }

    pub(crate) fn add_user(&self) {
        self.users.fetch_add(1, Ordering::Relaxed);
    }

    /// True if that was the last one.
    pub(crate) fn remove_user(&self) -> bool {
        self.users.fetch_sub(1, Ordering::Relaxed) == 1
    }

    /// Forgets a flow and stops the reads of its messages; closes the streams after the last
    /// one.
    pub(crate) fn forget(&self, flow: u64, outbox: &Outbox, is_last: bool) {
        let mut state = self.state.lock();
        state.is_closed |= is_last;
        state.scheduler.forget(flow);
        state.sources.retain(|(other, _), _| *other != flow);
        for stream in &mut state.streams {
            // Nobody has the rest of its chunk any more.
            stream.is_reset |= stream.current.is_some_and(|(other, _)| other == flow);
        }
        drop(state);
        self.wake_all();
        // A system call that does not block reads the memory, and ends by itself.
        while outbox.reading.load(Ordering::Acquire) > 0 {
            std::thread::yield_now();
        }
    }

    /// A flow may hear of its receives from now on.
    pub(crate) fn add(&self, flow: u64) {
        self.state.lock().scheduler.join(flow);
    }

    /// Takes a large message.
    pub(crate) fn push(
        &self,
        head: &FlowHead,
        payload: Span,
        slot: usize,
        outbox: &Arc<Outbox>,
    ) -> Result<(), FlowError> {
        let FlowHead { flow, message, total, tag, .. } = *head;
        let now_us = self.now_us();
        let mut state = self.state.lock();
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        if state.sources.is_empty() {
            state.busy_us = now_us;
            state.rate.on_busy(now_us);
        }
        let outbox = Arc::clone(outbox);
        state.sources.insert((flow, message), Source { payload, slot, outbox });
        state.scheduler.push(flow, message, total, tag, now_us);
        drop(state);
        // A thread for each chunk, also when they are of several messages. One whose streams are
        // slow rings for a better one.
        let chunks = total.div_ceil(self.chunk_len) as usize;
        let first = self.next_bell.fetch_add(chunks, Ordering::Relaxed);
        for at in 0..chunks.min(self.bells.len()) {
            self.bells[(first + at) % self.bells.len()].ring();
        }
        Ok(())
    }

    /// The next frame for a stream.
    pub(crate) fn next(&self, stream: usize) -> Option<Job> {
        let now_us = self.now_us();
        let mut state = self.state.lock();
        if state.streams[stream].is_reset {
            return None;
        }
        if state.ping_us <= now_us {
            state.ping_us = now_us + self.limit.as_micros() as u64 / PINGS;
            return Some(Job::Ping);
        }
        let Some(part) = state.scheduler.next(stream, now_us) else {
            // The better stream's thread may sleep.
            if let Some(other) = state.scheduler.stand_in(stream, now_us) {
                self.bell_of(other).ring();
            }
            return None;
        };
        state.streams[stream].current = Some((part.flow, part.message));
        state.streams[stream].bytes += part.len;
        Some(Job::Chunk(part))
    }

    /// The memory of the rest of a chunk. `None`: the stream has to be closed.
    pub(crate) fn lease(&self, stream: usize, part: &Part, sent: u64) -> Option<Lease> {
        let state = self.state.lock();
        if state.streams[stream].is_reset {
            return None;
        }
        let Some(source) = state.sources.get(&(part.flow, part.message)) else {
            return Some(Lease::Filler);
        };
        let end = (part.offset + part.len) as usize;
        let rest = Span { len: end, ..source.payload }.after((part.offset + sent) as usize);
        source.outbox.reading.fetch_add(1, Ordering::Acquire);
        Some(Lease::Memory(rest, ReadGuard(Arc::clone(&source.outbox))))
    }

    /// The stream's socket has taken all of its chunk.
    pub(crate) fn on_written(&self, stream: usize) {
        self.state.lock().streams[stream].current = None;
    }

    /// Bytes have left the stream's socket.
    pub(crate) fn on_moved(&self, stream: usize) {
        let now_us = self.now_us();
        self.state.lock().scheduler.on_moved(stream, now_us);
    }

    /// A note of the receiver has come over a stream.
    pub(crate) fn on_note(&self, stream: usize, head: &FlowHead) -> Result<(), String> {
        let now_us = self.now_us();
        let mut state = self.state.lock();
        state.heard_us = now_us;
        match head.kind {
            _ if state.streams[stream].is_reset => {}
            HeadKind::Ack if state.scheduler.on_ack(stream, head.message, now_us) => {}
            HeadKind::Posted => state.scheduler.on_posted(head.flow, head.message),
            _ => return Err(format!("{head:?} is no note that can be")),
        }
        self.act(&mut state);
        Ok(())
    }

    /// Time has passed. True while there is work.
    pub(crate) fn on_time(&self) -> bool {
        let now_us = self.now_us();
        let mut state = self.state.lock();
        state.scheduler.on_time(now_us);
        let silent_us = now_us.saturating_sub(state.heard_us.max(state.busy_us));
        if !state.sources.is_empty() && silent_us > self.limit.as_micros() as u64 {
            self.fail_silent(&mut state);
        }
        let has_acted = self.act(&mut state);
        let has_work = state.scheduler.has_work();
        drop(state);
        if has_acted {
            self.wake_all();
        }
        has_work
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.state.lock().is_closed
    }

    /// Whether the stream is to be closed and opened again.
    pub(crate) fn is_reset(&self, stream: usize) -> bool {
        self.state.lock().streams[stream].is_reset
    }

    pub(crate) fn on_open(&self, stream: usize) {
        let now_us = self.now_us();
        let mut state = self.state.lock();
        let bytes = state.streams[stream].bytes;
        state.streams[stream] = StreamState { is_open: true, bytes, ..StreamState::default() };
        state.scheduler.open(stream, now_us);
    }

    /// The stream has ended; its chunks go over others.
    pub(crate) fn on_lost(&self, stream: usize, cause: &str) {
        let mut state = self.state.lock();
        let StreamState { bytes, is_open, .. } = state.streams[stream];
        state.lost += u64::from(is_open);
        state.streams[stream] = StreamState { bytes, ..StreamState::default() };
        state.scheduler.lose(stream);
        state.last_error = cause.into();
        drop(state);
        self.wake_all();
    }

    /// Ends all its flows.
    pub(crate) fn fail(&self, failure: &FlowError) {
        self.state.lock().fail(failure.clone());
    }

    /// The counters until now.
    pub(crate) fn counters(&self) -> PeerCounters {
        let state = self.state.lock();
        PeerCounters {
            peer: self.target.peer.clone(),
            open_streams: state.streams.iter().filter(|stream| stream.is_open).count(),
            bytes: state.streams.iter().map(|stream| stream.bytes).sum(),
            slowest_bytes: state.streams.iter().map(|stream| stream.bytes).min().unwrap_or(0),
            repeated_chunks: state.scheduler.repeats(),
            lost_streams: state.lost,
            last_error: state.last_error.clone(),
        }
    }

    fn now_us(&self) -> u64 {
        self.begun.elapsed().as_micros() as u64
    }

    /// The bell of a stream's thread: threads have streams in turn.
    fn bell_of(&self, stream: usize) -> &Bell {
        &self.bells[stream % self.bells.len()]
    }

    fn wake_all(&self) {
        self.bells.iter().for_each(|bell| bell.ring());
    }

    fn act(&self, state: &mut State) -> bool {
        let mut has_acted = false;
        while let Some(action) = state.scheduler.next_action() {
            has_acted = true;
            match action {
                Action::Sent { flow, message } => {
                    if let Some(source) = state.sources.remove(&(flow, message)) {
                        let (len, now_us) = (source.payload.len as u64, self.now_us());
                        if let Some(rate) = state.rate.on_sent(len, now_us) {
                            self.greatest_rate.fetch_max(rate, Ordering::Relaxed);
                        }
                        source.outbox.ended.fetch_or(1 << source.slot, Ordering::Release);
                    }
                }
                Action::Replace { stream } => {
                    state.streams[stream].is_reset = true;
                    state.last_error = "a stream stood still for a second".into();
                }
                Action::Fail => self.fail_silent(state),
            }
        }
        has_acted
    }

    fn fail_silent(&self, state: &mut State) {
        let outstanding = Backlog {
            requests: state.sources.len(),
            bytes: state.sources.values().map(|source| source.payload.len as u64).sum(),
        };
        let failure = FlowError::Lost {
            peer: self.target.peer.clone(),
            cause: state.last_error.clone(),
            silent: self.limit,
            outstanding,
        };
        state.fail(failure);
    }
}

impl State {
    fn fail(&mut self, failure: FlowError) {
        for source in self.sources.values() {
            source.outbox.failure.lock().get_or_insert_with(|| failure.clone());
        }
        self.failure.get_or_insert(failure);
    }
}
