//! The state of a bundle, under its lock.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use uccl_wire::flow::{FlowHead, HeadKind};

use super::{
    asks::{Answer, Asks},
    outbox::Source,
};
use crate::{
    core::{Action, Params, Paths, Scheduler},
    counters::PeerCounters,
    error::{Backlog, FlowError, Peer},
    rate::BusyRate,
};

/// Pings within the limit.
const PINGS: u64 = 4;

pub(super) struct State {
    pub(super) scheduler: Scheduler,
    pub(super) rate: BusyRate,
    /// The greatest rate of all bundles in bytes per second; 0 before any.
    greatest_rate: Arc<AtomicU64>,
    pub(super) sources: HashMap<(u64, u64), Source>,
    pub(super) streams: Vec<StreamState>,
    pub(super) paths: Paths,
    pub(super) asks: Asks,
    pub(super) is_closed: bool,
    /// When a note last came.
    heard_us: u64,
    /// When a message was last taken while there was none.
    pub(super) busy_us: u64,
    ping_us: u64,
    limit_us: u64,
    /// The stream of the last ping or question. The next one takes another.
    asked_stream: usize,
    pub(super) failure: Option<FlowError>,
    pub(super) last_error: String,
    /// Streams that were open and have ended.
    lost: u64,
}

#[derive(Clone, Copy, Default)]
pub(super) struct StreamState {
    /// The message of which it sends a chunk.
    pub(super) current: Option<(u64, u64)>,
    /// It is to be closed and opened again.
    pub(super) is_reset: bool,
    is_open: bool,
    /// Bytes of chunks that it and its forerunners were given.
    pub(super) bytes: u64,
}

// SAFETY: the spans are callers' memory, which they leave to their flows until a message has ended,
// on any thread.
unsafe impl Send for State {}

impl State {
    pub(super) fn new(params: Params, paths: Paths, greatest_rate: Arc<AtomicU64>) -> Self {
        Self {
            scheduler: Scheduler::new(params),
            rate: BusyRate::default(),
            greatest_rate,
            sources: HashMap::new(),
            streams: vec![StreamState::default(); params.streams],
            paths,
            asks: Asks::default(),
            is_closed: false,
            heard_us: 0,
            busy_us: 0,
            ping_us: 0,
            limit_us: params.limit_us,
            asked_stream: usize::MAX,
            failure: None,
            last_error: String::new(),
            lost: 0,
        }
    }

    /// Forgets the messages of a flow.
    pub(super) fn forget(&mut self, flow: u64) {
        self.scheduler.forget(flow);
        self.sources.retain(|(other, _), _| *other != flow);
        for stream in &mut self.streams {
            // Nobody has the rest of its chunk any more.
            stream.is_reset |= stream.current.is_some_and(|(other, _)| other == flow);
        }
    }

    /// A ping or question that is due, for a stream. One that has carried the last one carries the
    /// next only if there is no other: it may have died.
    pub(super) fn note(&mut self, stream: usize, now_us: u64) -> Option<FlowHead> {
        let mut others = self.streams.iter().enumerate().filter(|(at, _)| *at != stream);
        if self.asked_stream == stream && others.any(|(_, other)| other.is_open) {
            return None;
        }
        let note = match self.asks.pop() {
            Some(question) => question,
            None if self.ping_us <= now_us => {
                self.ping_us = now_us + self.limit_us / PINGS;
                FlowHead::note(HeadKind::Ping, 0, 0)
            }
            None => return None,
        };
        self.asked_stream = stream;
        self.scheduler.on_asked(stream, now_us);
        Some(note)
    }

    /// A note of the receiver has come over a stream. False if it cannot be.
    pub(super) fn on_note(&mut self, stream: usize, head: &FlowHead, now_us: u64) -> bool {
        self.heard_us = now_us;
        let FlowHead { kind, flow, message, tag, .. } = *head;
        match kind {
            _ if self.streams[stream].is_reset => return true,
            HeadKind::Ack => return self.scheduler.on_ack(stream, message, now_us),
            HeadKind::Posted => self.scheduler.on_posted(flow, message),
            HeadKind::Received => {
                let answer = Answer::At { received: message, is_waiting: tag == 1 };
                self.asks.on_answer(flow, answer);
                self.scheduler.on_answer(stream, now_us);
            }
            HeadKind::End => {
                self.asks.on_answer(flow, Answer::Ended);
                self.scheduler.on_answer(stream, now_us);
            }
            _ => return false,
        }
        true
    }

    pub(super) fn on_open(&mut self, stream: usize, now_us: u64) {
        let bytes = self.streams[stream].bytes;
        self.streams[stream] = StreamState { is_open: true, bytes, ..StreamState::default() };
        self.paths.on_open(stream);
        self.scheduler.open(stream, now_us);
    }

    pub(super) fn on_lost(&mut self, stream: usize, cause: &str, now_us: u64) {
        self.paths.on_end(stream, now_us);
        let StreamState { bytes, is_open, .. } = self.streams[stream];
        self.lost += u64::from(is_open);
        self.streams[stream] = StreamState { bytes, ..StreamState::default() };
        self.scheduler.lose(stream);
        self.last_error = cause.into();
    }

    /// Does the work that the scheduler has. False if there is none.
    pub(super) fn act(&mut self, peer: &Peer, now_us: u64) -> bool {
        let mut has_acted = false;
        while let Some(action) = self.scheduler.next_action() {
            has_acted = true;
            match action {
                Action::Sent { flow, message } => {
                    if let Some(source) = self.sources.remove(&(flow, message)) {
                        if let Some(rate) = self.rate.on_sent(source.payload.len as u64, now_us) {
                            self.greatest_rate.fetch_max(rate, Ordering::Relaxed);
                        }
                        source.end();
                    }
                }
                Action::Replace { stream } => {
                    self.streams[stream].is_reset = true;
                    self.last_error = "a stream stood still for a second".into();
                }
                Action::Fail => self.fail_silent(peer),
            }
        }
        has_acted
    }

    /// Fails when the peer has not been heard for the limit while messages are outstanding.
    pub(super) fn check_silence(&mut self, peer: &Peer, now_us: u64) {
        let silent_us = now_us.saturating_sub(self.heard_us.max(self.busy_us));
        if !self.sources.is_empty() && silent_us > self.limit_us {
            self.fail_silent(peer);
        }
    }

    fn fail_silent(&mut self, peer: &Peer) {
        let outstanding = Backlog {
            requests: self.sources.len(),
            bytes: self.sources.values().map(|source| source.payload.len as u64).sum(),
        };
        self.fail(FlowError::Lost {
            peer: peer.clone(),
            cause: self.last_error.clone(),
            silent: std::time::Duration::from_micros(self.limit_us),
            outstanding,
        });
    }

    pub(super) fn fail(&mut self, failure: FlowError) {
        self.sources.values().for_each(|source| source.fail(&failure));
        self.failure.get_or_insert(failure);
    }

    /// The counters until now.
    pub(super) fn counters(&self, peer: &Peer) -> PeerCounters {
        let in_use = self.streams.iter().take(self.scheduler.width());
        PeerCounters {
            peer: peer.clone(),
            streams: self.scheduler.width(),
            open_streams: self.streams.iter().filter(|stream| stream.is_open).count(),
            bytes: self.streams.iter().map(|stream| stream.bytes).sum(),
            slowest_bytes: in_use.map(|stream| stream.bytes).min().unwrap_or(0),
            repeated_chunks: self.scheduler.repeats(),
            lost_streams: self.lost,
            last_error: self.last_error.clone(),
        }
    }
}
