//! Senders and receivers joined by a link that queues, delays, loses and reorders, in virtual time.
//!
//! The model knows each message under way and where it lands, and fails the test as soon as a
//! promise is broken.
#![allow(dead_code, reason = "each test file uses a part")]

mod flow;
mod link;

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    time::{Duration, Instant},
};

use fastrand::Rng;
pub(crate) use flow::{Flow, Load};
pub(crate) use link::{Link, Path};
use uccl_tran::Params;

/// An event in virtual time.
#[derive(Clone, Debug)]
pub(crate) enum Happening {
    /// A message has gone through: it lands, or it does not.
    Message { number: u32, item: Option<u64>, lands: bool },
    /// An acknowledgement arrives.
    Ack(Vec<u8>),
    /// A sender's or receiver's timer fires.
    Timer,
}

/// The simulation: flows over one link.
pub(crate) struct World {
    pub(crate) now: Instant,
    pub(crate) start: Instant,
    pub(crate) rng: Rng,
    pub(crate) link: Link,
    pub(crate) flows: Vec<Flow>,
    heap: BinaryHeap<Reverse<Entry>>,
    count: u64,
}

struct Entry {
    at: Instant,
    order: u64,
    flow: usize,
    what: Happening,
}

impl World {
    pub(crate) fn new(seed: u64, path: Path) -> Self {
        let start = Instant::now();
        let rng = Rng::with_seed(seed);
        let (flows, heap) = (Vec::new(), BinaryHeap::new());
        Self { now: start, start, rng, link: Link::new(path, start), flows, heap, count: 0 }
    }

    /// Adds a sender and its receiver.
    pub(crate) fn add(&mut self, params: Params, load: Load) {
        self.flows.push(Flow::new(params, load, self.start));
    }

    /// Runs until every flow has ended, or until `limit`.
    pub(crate) fn run(&mut self, limit: Duration) {
        for flow in 0..self.flows.len() {
            self.settle(flow);
        }
        while let Some(Reverse(entry)) = self.heap.pop() {
            if entry.at > self.start + limit || self.flows.iter().all(Flow::has_ended) {
                self.heap.push(Reverse(entry));
                return;
            }
            self.now = entry.at;
            match entry.what {
                Happening::Message { number, item, lands } => {
                    self.flows[entry.flow].through(self.now, number, item, lands);
                }
                Happening::Ack(bytes) => self.flows[entry.flow].acknowledged(self.now, &bytes),
                Happening::Timer => {}
            }
            self.settle(entry.flow);
        }
    }

    /// Runs all of a flow's actions that are due now.
    fn settle(&mut self, at: usize) {
        let (now, flow) = (self.now, &mut self.flows[at]);
        let mut happenings = Vec::new();
        flow.act(now, &mut self.rng, &mut self.link, &mut happenings);
        for (when, what) in happenings {
            self.count += 1;
            self.heap.push(Reverse(Entry { at: when, order: self.count, flow: at, what }));
        }
    }

    pub(crate) fn elapsed(&self) -> Duration {
        self.now - self.start
    }
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.order) == (other.at, other.order)
    }
}
impl Eq for Entry {}
impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Entry {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

/// Runs a test with seed after seed and names the one that fails. `UCCL_CHAOS_SEED` names one,
/// `UCCL_CHAOS_RUNS` sets their number.
pub(crate) fn each_seed(runs: u64, test: impl Fn(u64)) {
    struct Name(u64);
    impl Drop for Name {
        fn drop(&mut self) {
            if std::thread::panicking() {
                eprintln!("again with UCCL_CHAOS_SEED={}", self.0);
            }
        }
    }
    let number = |name| std::env::var(name).ok().and_then(|v| v.parse::<u64>().ok());
    let runs = number("UCCL_CHAOS_RUNS").unwrap_or(runs);
    for seed in number("UCCL_CHAOS_SEED").map_or(0..runs, |seed| seed..seed + 1) {
        let name = Name(seed);
        test(seed);
        drop(name);
    }
}
