//! The own stream of a flow in virtual time: it dies, stands still, and is cut off.

use std::collections::VecDeque;

use crate::core::{History, Step, Watch, WatchParams, WatchView};

const STEP_US: u64 = 1000;
const WINDOW: usize = 4096;
const LIMIT_US: u64 = 5_000_000;
const PARAMS: WatchParams = WatchParams { ask_us: 200_000, dead_us: 1_000_000, limit_us: LIMIT_US };

/// A message to one end, and the time of its arrival.
type Mailbox<T> = VecDeque<(u64, T)>;

/// Both ends of a flow.
struct Pair {
    seed: u64,
    rng: fastrand::Rng,
    now_us: u64,
    history: History,
    watch: Watch,
    is_up: bool,
    /// When the next stream opens.
    opens_us: u64,
    /// Bytes under way; the stream stands still until a time.
    wire: VecDeque<u8>,
    still_us: u64,
    /// Nothing passes until then.
    cut_us: u64,
    /// Bytes that the user has posted, of all.
    posted: u64,
    total: u64,
    received: u64,
    /// The receiver's user looks for bytes from time to time.
    looks_us: u64,
    is_dry: bool,
    asks: Mailbox<()>,
    answers: Mailbox<(u64, bool)>,
    replaced: u64,
    has_failed: bool,
}

fn byte(at: u64) -> u8 {
    (at * 7 + (at >> 8) * 13) as u8
}

impl Pair {
    fn new(seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        Self {
            seed,
            now_us: 0,
            history: History::new(WINDOW, 64),
            watch: Watch::new(PARAMS, 0),
            is_up: true,
            opens_us: 0,
            wire: VecDeque::new(),
            still_us: 0,
            cut_us: 0,
            posted: 0,
            total: rng.u64(1..60_000),
            received: 0,
            looks_us: 0,
            is_dry: false,
            asks: Mailbox::new(),
            answers: Mailbox::new(),
            replaced: 0,
            has_failed: false,
            rng,
        }
    }

    fn run(&mut self, mut misbehave: impl FnMut(&mut Self)) {
        while !self.has_failed && (self.received < self.total || self.history.unconfirmed() > 0) {
            self.now_us += STEP_US;
            assert!(self.now_us < 300_000_000, "seed {}: it hangs", self.seed);
            misbehave(self);
            self.open();
            self.send();
            self.receive();
            self.answer();
            self.look();
        }
    }

    fn is_cut(&self) -> bool {
        self.now_us < self.cut_us
    }

    /// The stream dies, with all bytes under way.
    fn die(&mut self) {
        self.is_up = false;
        self.wire.clear();
        self.still_us = 0;
        self.opens_us = self.now_us + self.rng.u64(0..50_000);
    }

    fn open(&mut self) {
        if !self.is_up && !self.is_cut() && self.opens_us <= self.now_us {
            assert!(self.history.resume(self.received), "seed {}", self.seed);
            self.watch.on_resumed(self.now_us);
            self.is_up = true;
        }
    }

    fn send(&mut self) {
        if self.rng.u32(0..3) > 0 {
            self.posted = self.total.min(self.posted + self.rng.u64(0..3000));
        }
        if !self.is_up {
            return;
        }
        // The socket takes some.
        let mut room = self.rng.usize(0..4000).saturating_sub(self.wire.len());
        while room > 0 && !self.history.unsent().is_empty() {
            let count = room.min(self.history.unsent().len());
            self.wire.extend(&self.history.unsent()[..count]);
            self.history.on_sent(count);
            room -= count;
        }
        let left = (self.posted - self.history.end()) as usize;
        let count = room.min(self.history.room()).min(left);
        if count == 0 {
            return;
        }
        let from = self.history.end();
        let bytes: Vec<_> = (from..from + count as u64).map(byte).collect();
        self.wire.extend(&bytes);
        self.history.record(&bytes);
        if self.history.take_ask() {
            // The note goes with the bytes; its answer comes back as the others do.
            self.asks.push_back((self.now_us + 300, ()));
        }
    }

    fn receive(&mut self) {
        if self.now_us < self.looks_us {
            return;
        }
        if self.rng.u32(0..500) == 0 {
            self.looks_us = self.now_us + self.rng.u64(0..3_000_000);
        }
        let is_still = self.is_cut() || self.now_us < self.still_us;
        for _ in 0..if is_still { 0 } else { self.rng.usize(0..3000) } {
            let Some(found) = self.wire.pop_front() else { break };
            assert_eq!(found, byte(self.received), "seed {}: byte {}", self.seed, self.received);
            self.received += 1;
        }
        self.is_dry |= is_still || self.wire.is_empty();
    }

    /// Questions and answers, over other streams.
    fn answer(&mut self) {
        if self.is_cut() {
            self.asks.clear();
            self.answers.clear();
            return;
        }
        while self.asks.pop_front_if(|(due, ())| *due <= self.now_us).is_some() {
            let answer = (self.received, std::mem::take(&mut self.is_dry));
            self.answers.push_back((self.now_us + 300, answer));
        }
        while let Some((_, (received, is_waiting))) =
            self.answers.pop_front_if(|(due, _)| *due <= self.now_us)
        {
            assert!(self.history.confirm(received), "seed {}", self.seed);
            self.watch.on_answer(is_waiting, self.now_us);
        }
    }

    fn look(&mut self) {
        let has_work = self.history.unconfirmed() > 0 || self.posted > self.history.end();
        let confirmed = self.history.confirmed();
        let view = WatchView { confirmed, has_work, is_up: self.is_up };
        match self.watch.on_time(view, self.now_us) {
            Step::Rest => {}
            Step::Ask => self.asks.push_back((self.now_us + 300, ())),
            Step::Replace => {
                self.replaced += 1;
                self.die();
            }
            Step::Fail => self.has_failed = true,
        }
    }
}

#[test]
fn every_byte_of_an_own_stream_comes_once_and_in_order() {
    for seed in 0..2000 {
        let mut pair = Pair::new(seed);
        pair.run(|pair| match pair.rng.u32(0..3000) {
            0..20 => pair.die(),
            20..30 => pair.still_us = u64::MAX,
            30..35 if !pair.is_cut() => {
                pair.cut_us = pair.now_us + pair.rng.u64(0..LIMIT_US / 2);
            }
            _ => {}
        });
        assert!(!pair.has_failed, "seed {seed}: no cut is as long as the limit");
        assert_eq!(pair.received, pair.total);
    }
}

#[test]
fn a_stream_that_stands_still_for_ever_is_replaced() {
    let mut pair = Pair::new(1);
    pair.total = 50_000;
    let mut has_stalled = false;
    pair.run(|pair| {
        if !has_stalled && pair.received > 10_000 {
            (has_stalled, pair.still_us) = (true, u64::MAX);
        }
    });
    assert_eq!((pair.replaced, pair.has_failed), (1, false));
}

#[test]
fn a_peer_that_is_cut_off_for_longer_than_the_limit_is_lost() {
    let mut pair = Pair::new(2);
    pair.total = 50_000;
    pair.run(|pair| {
        if pair.received > 10_000 {
            pair.cut_us = u64::MAX;
        }
    });
    assert!(pair.has_failed);
}
