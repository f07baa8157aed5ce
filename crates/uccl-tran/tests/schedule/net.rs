//! A network that loses, reorders, repeats, delays and cuts, as far as its kind allows.

use std::{cmp::Reverse, collections::BTreeMap};

use fastrand::Rng;
use uccl_tran::multipath::{Attempt, Demand, Load, PathAck, Repeats};

/// Something that happens.
#[derive(Clone, Copy, Debug)]
pub(super) enum NetEvent {
    /// The user of both ends does something.
    User,
    /// An attempt is through. It lands, or it was lost. `is_last` is false for a repeat of the
    /// network's that will follow.
    Attempt {
        attempt: Attempt,
        is_last: bool,
        lands: bool,
        epoch: u32,
    },
    Ack(PathAck),
    Demand(Demand),
    Credit(u64),
    /// The queue pair of a dead path is gone.
    TornDown(u16),
    /// A path is opened again.
    Reopen(u16),
    Timer,
}

/// A path of the network.
#[derive(Clone, Copy, Debug)]
struct Line {
    delay_ns: u64,
    jitter_ns: u64,
    loss: f64,
    /// Nothing gets through between these times.
    cut: (u64, u64),
    /// When the last attempt is through, where paths keep order.
    through_ns: u64,
    epoch: u32,
}

pub(super) struct Net {
    repeats: Repeats,
    lines: Vec<Line>,
    /// Losses of acknowledgements, repeats of the network, attempts that come very late.
    back_loss: f64,
    doubles: f64,
    stragglers: f64,
    things: BTreeMap<(u64, Reverse<u64>), NetEvent>,
    count: u64,
    timer_ns: Option<u64>,
}

impl Net {
    pub(super) fn random(rng: &mut Rng, paths: u16, repeats: Repeats) -> Self {
        let line = |_| {
            let from_ns = rng.u64(0..400_000);
            Line {
                delay_ns: rng.u64(500..50_000),
                jitter_ns: rng.u64(1..60_000),
                loss: [0.0, 0.0, 0.01, 0.1, 0.3][rng.usize(..5)],
                cut: match rng.u32(0..3) {
                    0 => (from_ns, from_ns + rng.u64(1..20_000_000)),
                    _ => (0, 0),
                },
                through_ns: 0,
                epoch: 0,
            }
        };
        let lines = (0..paths).map(line).collect();
        let is_harmless = repeats == Repeats::Harmless;
        Self {
            repeats,
            lines,
            back_loss: [0.0, 0.05, 0.3][rng.usize(..3)],
            doubles: if is_harmless && rng.bool() { 0.1 } else { 0.0 },
            stragglers: if is_harmless && rng.bool() { 0.05 } else { 0.0 },
            things: BTreeMap::new(),
            count: 0,
            timer_ns: None,
        }
    }

    pub(super) fn at(&mut self, at_ns: u64, thing: NetEvent) {
        self.count += 1;
        // Some of the things at one time come in another order than they were made.
        self.things.insert((at_ns, Reverse(self.count)), thing);
    }

    pub(super) fn pop(&mut self) -> Option<(u64, NetEvent)> {
        let ((at_ns, _), thing) = self.things.pop_first()?;
        if matches!(thing, NetEvent::Timer) && self.timer_ns == Some(at_ns) {
            self.timer_ns = None;
        }
        Some((at_ns, thing))
    }

    pub(super) fn set_timer(&mut self, at_ns: u64) {
        if self.timer_ns.is_none_or(|timer_ns| at_ns < timer_ns) {
            self.timer_ns = Some(at_ns);
            self.at(at_ns, NetEvent::Timer);
        }
    }

    pub(super) fn send(&mut self, now_ns: u64, attempt: &Attempt, rng: &mut Rng) {
        let is_harmless = self.repeats == Repeats::Harmless;
        let line = &mut self.lines[usize::from(attempt.path)];
        let is_cut = (line.cut.0..line.cut.1).contains(&now_ns);
        let lands = !is_cut && rng.f64() >= line.loss;
        let mut at_ns = now_ns + line.delay_ns + rng.u64(0..line.jitter_ns);
        if !is_harmless {
            at_ns = at_ns.max(line.through_ns + 1);
            line.through_ns = at_ns;
        } else if rng.f64() < self.stragglers {
            at_ns += rng.u64(0..5_000_000);
        }
        let epoch = line.epoch;
        let copies = if rng.f64() < self.doubles { 2 } else { 1 };
        for copy in 0..copies {
            let thing =
                NetEvent::Attempt { attempt: *attempt, is_last: copy + 1 == copies, lands, epoch };
            self.at(at_ns, thing);
            at_ns += rng.u64(1..3_000_000);
        }
    }

    /// Sends an acknowledgement or the like, which may be lost, overtaken and repeated.
    pub(super) fn send_back(&mut self, now_ns: u64, thing: NetEvent, rng: &mut Rng) {
        let line = self.lines[match thing {
            NetEvent::Ack(ack) => ack.path.into(),
            _ => 0,
        }];
        let is_cut = (line.cut.0..line.cut.1).contains(&now_ns);
        if is_cut || rng.f64() < self.back_loss {
            return;
        }
        let copies = if rng.u32(0..10) == 0 { 2 } else { 1 };
        for _ in 0..copies {
            let at_ns = now_ns + line.delay_ns + rng.u64(0..line.jitter_ns);
            self.at(at_ns, thing);
        }
    }

    pub(super) fn epoch(&self, path: u16) -> u32 {
        self.lines[usize::from(path)].epoch
    }

    pub(super) fn next_epoch(&mut self, path: u16) {
        self.lines[usize::from(path)].epoch += 1;
    }

    /// Drops the attempts under way over a path, and names their chunks.
    pub(super) fn drop_attempts(&mut self, path: u16) -> impl Iterator<Item = (u64, u64)> {
        let is_of_path = |thing: &NetEvent| match thing {
            NetEvent::Attempt { attempt, .. } if attempt.path == path => Some(attempt.load),
            _ => None,
        };
        let loads: Vec<_> = self.things.values().filter_map(is_of_path).collect();
        self.things.retain(|_, thing| is_of_path(thing).is_none());
        loads.into_iter().filter_map(|load| match load {
            Load::Chunk(chunk) => Some((chunk.message, chunk.offset)),
            Load::Probe => None,
        })
    }
}
