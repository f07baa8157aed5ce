//! The streams for large messages from this process to another one, shared by all flows between
//! them.

mod asks;
mod outbox;
mod state;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Instant,
};

use parking_lot::Mutex;
use uccl_wire::flow::FlowHead;

pub(crate) use self::{
    asks::Answer,
    outbox::{Lease, Outbox},
};
use self::{outbox::Source, state::State};
use crate::{
    attempt::Route,
    bell::Bell,
    core::{Params, Part, Paths, WidthParams},
    counters::PeerCounters,
    error::{FlowError, Peer},
    pairs::Pairs,
    settings::Settings,
    socket::Span,
};

#[cfg(test)]
mod tests;

/// A frame for a stream.
pub(crate) enum Job {
    Chunk(Part),
    /// A ping or question, which the receiver answers.
    Note(FlowHead),
}

/// The process that a bundle goes to.
pub(crate) struct Target {
    pub(crate) peer: Peer,
    pub(crate) key: [u8; 16],
    pub(crate) pairs: Pairs,
}

/// The streams for large messages to one process.
pub(crate) struct Bundle {
    pub(crate) target: Target,
    state: Mutex<State>,
    begun: Instant,
    /// Flows that are open.
    users: AtomicUsize,
    /// Flows that are open, or closed and not yet through.
    holders: AtomicUsize,
    /// The thread that the next chunk wakes.
    next_bell: AtomicUsize,
    /// The first streams, so many, are to be open.
    wanted: AtomicUsize,
    bells: Vec<Arc<Bell>>,
    chunk_len: u64,
}

impl Bundle {
    pub(crate) fn new(
        target: Target,
        settings: &Settings,
        bells: Vec<Arc<Bell>>,
        greatest_rate: Arc<AtomicU64>,
    ) -> Self {
        let chunk_len = settings.chunk_len as u64;
        let first = target.pairs.first_streams(settings.streams);
        let params = Params {
            streams: settings.streams,
            width: WidthParams { first, sample_us: 100_000, pause_us: 5_000_000 },
            chunk_len,
            early_len: Params::early_len(chunk_len),
            late_us: 10_000,
            dead_us: 1_000_000,
            limit_us: settings.limit.as_micros() as u64,
            probe_us: 50_000,
        };
        let paths = Paths::new(target.pairs.routes.len(), target.pairs.spare, settings.streams);
        Self {
            target,
            state: Mutex::new(State::new(params, paths, greatest_rate)),
            begun: Instant::now(),
            users: AtomicUsize::new(0),
            holders: AtomicUsize::new(0),
            next_bell: AtomicUsize::new(0),
            wanted: AtomicUsize::new(first),
            bells,
            chunk_len,
        }
    }

    /// A flow joins. [`Bundle::remove_user`] follows, and [`Bundle::release`].
    pub(crate) fn add_user(&self) {
        self.users.fetch_add(1, Ordering::Relaxed);
        self.holders.fetch_add(1, Ordering::Relaxed);
    }

    /// True if that was the last one.
    pub(crate) fn remove_user(&self) -> bool {
        self.users.fetch_sub(1, Ordering::Relaxed) == 1
    }

    /// Forgets a flow and stops the reads of its messages.
    pub(crate) fn forget(&self, flow: u64, outbox: &Outbox) {
        self.state.lock().forget(flow);
        self.wake_all();
        outbox.wait_for_reads();
    }

    /// A flow that was closed is through; the last one closes the streams.
    pub(crate) fn release(&self, flow: u64) {
        let is_last = self.holders.fetch_sub(1, Ordering::Relaxed) == 1;
        let mut state = self.state.lock();
        state.asks.forget(flow);
        state.is_closed |= is_last;
        drop(state);
        if is_last {
            self.wake_all();
        }
    }

    /// A flow may hear of its receives from now on.
    pub(crate) fn add(&self, flow: u64) {
        self.state.lock().scheduler.join(flow);
    }

    /// Has the receiver asked how far it is with the own stream of a flow, of which so many bytes
    /// have been sent.
    pub(crate) fn ask(&self, flow: u64, sent: u64) {
        self.state.lock().asks.push(flow, sent);
        self.wake_all();
    }

    /// The receiver's last answer, once.
    pub(crate) fn take_answer(&self, flow: u64) -> Option<Answer> {
        self.state.lock().asks.take(flow)
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
        state.sources.insert((flow, message), Source::new(payload, slot, outbox));
        state.scheduler.push(flow, message, total, tag, now_us);
        let threads = self.bells.len();
        let takers =
            state.scheduler.takers(now_us).fold(0_u64, |set, at| set | 1 << (at % threads));
        drop(state);
        // A thread for each chunk, also when they are of several messages. A thread without a
        // stream that takes one would let it lie.
        let chunks = total.div_ceil(self.chunk_len) as usize;
        let first = self.next_bell.fetch_add(chunks, Ordering::Relaxed);
        let turns = (0..threads).map(|at| (first + at) % threads);
        let rung = turns.filter(|thread| takers & 1 << thread != 0).take(chunks);
        rung.for_each(|thread| self.bells[thread].ring());
        Ok(())
    }

    /// The next frame for a stream.
    pub(crate) fn next(&self, stream: usize) -> Option<Job> {
        let now_us = self.now_us();
        let mut state = self.state.lock();
        if state.streams[stream].is_reset {
            return None;
        }
        if let Some(note) = state.note(stream, now_us) {
            return Some(Job::Note(note));
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
        let source = state.sources.get(&(part.flow, part.message));
        Some(source.map_or(Lease::Filler, |source| source.lease(part.offset, part.len, sent)))
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
        if !state.on_note(stream, head, now_us) {
            return Err(format!("{head:?} is no note that can be"));
        }
        state.act(&self.target.peer, now_us);
        let wanted = state.scheduler.wanted();
        drop(state);
        if wanted > self.wanted.fetch_max(wanted, Ordering::Relaxed) {
            self.wake_all();
        }
        Ok(())
    }

    /// Whether a stream is to be open.
    pub(crate) fn wants(&self, stream: usize) -> bool {
        stream < self.wanted.load(Ordering::Relaxed)
    }

    /// Time has passed. True while there is work.
    pub(crate) fn on_time(&self) -> bool {
        let now_us = self.now_us();
        let mut state = self.state.lock();
        state.scheduler.on_time(now_us);
        state.check_silence(&self.target.peer, now_us);
        let has_acted = state.act(&self.target.peer, now_us);
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
        self.state.lock().on_open(stream, now_us);
    }

    /// The pair of addresses over which a stream is to be opened; `None` if it should wait.
    pub(crate) fn choose_route(&self, stream: usize) -> Option<Route> {
        if !self.wants(stream) {
            return None;
        }
        let now_us = self.now_us();
        let at = self.state.lock().paths.choose(stream, now_us)?;
        self.target.pairs.routes.get(at).copied()
    }

    /// The stream has ended, or could not be opened; its chunks go over others.
    pub(crate) fn on_lost(&self, stream: usize, cause: &str) {
        let now_us = self.now_us();
        self.state.lock().on_lost(stream, cause, now_us);
        self.wake_all();
    }

    /// Ends all its flows.
    pub(crate) fn fail(&self, failure: &FlowError) {
        self.state.lock().fail(failure.clone());
    }

    /// The counters until now.
    pub(crate) fn counters(&self) -> PeerCounters {
        self.state.lock().counters(&self.target.peer)
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
}
