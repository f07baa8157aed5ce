//! The processes that send to this one, and their signs of life.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

/// A process all streams of which have ended brings others within this time if it lives.
const GRACE: Duration = Duration::from_secs(2);

struct Visitor {
    heard: Instant,
    /// Its streams for chunks.
    streams: usize,
    /// When it closed the last of them.
    closed: Option<Instant>,
}

/// Processes by instance.
#[derive(Default)]
pub(crate) struct Visitors(HashMap<u64, Visitor>);

impl Visitors {
    /// A process shows a sign of life.
    pub(crate) fn hear(&mut self, instance: u64) {
        self.entry(instance).heard = Instant::now();
    }

    /// A process has a flow here.
    pub(crate) fn add(&mut self, instance: u64) {
        self.entry(instance);
    }

    /// A stream for chunks has come.
    pub(crate) fn open(&mut self, instance: u64) {
        let visitor = self.entry(instance);
        visitor.heard = Instant::now();
        visitor.streams += 1;
        visitor.closed = None;
    }

    /// A stream for chunks has ended, by the peer or otherwise.
    pub(crate) fn close(&mut self, instance: u64, is_by_peer: bool) {
        if let Some(visitor) = self.0.get_mut(&instance) {
            visitor.streams = visitor.streams.saturating_sub(1);
            if visitor.streams == 0 && is_by_peer {
                visitor.closed = Some(Instant::now());
            }
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn retain(&mut self, is_needed: impl Fn(u64) -> bool) {
        self.0.retain(|instance, visitor| visitor.streams > 0 || is_needed(*instance));
    }

    /// Processes that have been silent for longer than the limit, and for how long.
    pub(crate) fn silent(&self, limit: Duration) -> Vec<(u64, Duration)> {
        let silent = self.0.iter().map(|(instance, visitor)| (*instance, visitor.heard.elapsed()));
        silent.filter(|(_, time)| *time > limit).collect()
    }

    /// Processes that have closed all their streams, and bring no others.
    pub(crate) fn gone(&self) -> Vec<u64> {
        let is_gone =
            |visitor: &Visitor| visitor.closed.is_some_and(|since| since.elapsed() > GRACE);
        let gone = self.0.iter().filter(|(_, visitor)| is_gone(visitor));
        gone.map(|(instance, _)| *instance).collect()
    }

    fn entry(&mut self, instance: u64) -> &mut Visitor {
        let new = || Visitor { heard: Instant::now(), streams: 0, closed: None };
        self.0.entry(instance).or_insert_with(new)
    }
}
