//! All ranks of a group in one thread, over a network that keeps no order, as far as the protocol can tell.
//!
//! A write's bytes land one by one, in any order and as late as the schedule says; its mark is set after them, since that is what
//! a signal promises; marks of different writes overtake each other. A lane that is lost has its writes
//! made again: their bytes land a second time, but never after the mark. The simulation checks that a rank takes
//! exactly what was sent to it for that call and round, that nobody writes where somebody has yet to read, that a call that is
//! read has an end only when nobody reads, and that all calls end.

use std::collections::HashMap;

use super::{Call, Mark, Step, Takes, Words};
use crate::placing::{Places, SLOTS};

/// Cells of a window: enough for a few calls.
const POOL: usize = 24;

/// What a cell of a place holds: call, round, sender.
type Cell = (u64, u16, usize);

#[derive(Clone)]
struct Window {
    arrived: Vec<[Mark; SLOTS]>,
    taken: Vec<[Mark; SLOTS]>,
    cells: Vec<Option<Cell>>,
}

impl Words for Window {
    fn arrived(&self, from: usize, slot: usize) -> Mark {
        self.arrived[from][slot]
    }

    fn taken(&self, by: usize, slot: usize) -> Mark {
        self.taken[by][slot]
    }
}

enum Flying {
    /// Bytes of a write, and then its mark.
    Data {
        to: usize,
        from: usize,
        cells: Vec<(usize, Cell)>,
        left: Vec<usize>,
        mark: Mark,
    },
    Told {
        to: usize,
        from: usize,
        mark: Mark,
    },
}

/// What all ranks do, one call after the other.
struct Plan {
    takes: Takes,
    /// Cells of each rank's area.
    width: usize,
    /// `rounds[from][to]`.
    rounds: Vec<Vec<u16>>,
    /// Whether peers read the ranks' own memory until they have ended.
    is_read: bool,
}

struct Rank {
    places: Places,
    calls: Vec<(usize, Call)>,
    next_plan: usize,
    window: Window,
}

struct World {
    random: fastrand::Rng,
    plans: Vec<Plan>,
    ranks: Vec<Rank>,
    network: Vec<Flying>,
    /// How often a rank took a round: (rank, from, call, round).
    took: HashMap<(usize, usize, u64, u16), u32>,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let ranks = random.usize(1..=5);
        let plans: Vec<_> =
            (0..random.usize(1..=14)).map(|_| Plan::random(&mut random, ranks)).collect();
        let none = Mark::of_word(0);
        let window = Window {
            arrived: vec![[none; SLOTS]; ranks],
            taken: vec![[none; SLOTS]; ranks],
            cells: vec![None; POOL],
        };
        let rank = || Rank {
            places: Places::default(),
            calls: Vec::new(),
            next_plan: 0,
            window: window.clone(),
        };
        let ranks = (0..ranks).map(|_| rank()).collect();
        Self { random, plans, ranks, network: Vec::new(), took: HashMap::new() }
    }

    /// Runs until all ranks have made all calls; says what is wrong.
    fn run(mut self) -> Result<(), String> {
        for step in 0.. {
            if step > 200_000 {
                return Err("no end in sight".into());
            }
            if self
                .ranks
                .iter()
                .all(|rank| rank.next_plan == self.plans.len() && rank.calls.is_empty())
            {
                return self.check_all_taken();
            }
            let moved = if self.random.bool() { self.deliver() } else { self.act()? };
            // Only when nothing is left on either side is it a deadlock.
            if !moved && !self.deliver() && !self.act_anywhere()? {
                return Err(format!(
                    "nothing can happen any more, after {step} steps{}",
                    self.state()
                ));
            }
        }
        unreachable!("the loop returns")
    }

    /// What each rank waits for.
    fn state(&self) -> String {
        let mut text = String::new();
        for (me, rank) in self.ranks.iter().enumerate() {
            for (_, call) in &rank.calls {
                text += &format!("\nrank {me} in call {}: ", call.number());
                for wait in call.awaited(&rank.window) {
                    let super::Awaited { peer, what, expected, seen } = wait;
                    text += &format!("{what} of {peer} ({expected:?}, not {seen:?}) ");
                }
            }
        }
        text
    }

    fn act_anywhere(&mut self) -> Result<bool, String> {
        for rank in 0..self.ranks.len() {
            if self.act_at(rank)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn act(&mut self) -> Result<bool, String> {
        let rank = self.random.usize(..self.ranks.len());
        self.act_at(rank)
    }

    /// One rank begins a call, or goes on with one of those that it has begun.
    fn act_at(&mut self, me: usize) -> Result<bool, String> {
        let ranks = self.ranks.len();
        let rank = &mut self.ranks[me];
        // A hook that is called late: two calls are begun before the first is ended.
        let may_begin = rank.calls.len() < 2 && rank.next_plan < self.plans.len();
        if may_begin && (rank.calls.is_empty() || self.random.u8(..4) == 0) {
            let plan = &self.plans[rank.next_plan];
            let place = rank.places.take(plan.width * ranks, POOL).expect("plans fit");
            let rounds: Vec<_> = plan.rounds[me].iter().map(|rounds| Some(*rounds)).collect();
            let mut call = Call::new(place, plan.takes, &rounds);
            if plan.is_read {
                call.wait_for_readers();
            }
            rank.calls.push((rank.next_plan, call));
            rank.next_plan += 1;
            return Ok(true);
        }
        // Hooks may be called in any order.
        let first = self.random.usize(..2);
        for at in 0..rank.calls.len() {
            let rank = &mut self.ranks[me];
            let at = (at + first) % rank.calls.len();
            let (plan, call) = &mut rank.calls[at];
            let plan = *plan;
            let step = call.next(&rank.window, true);
            if let Some(step) = step {
                self.do_step(me, at, plan, step)?;
            }
            let rank = &mut self.ranks[me];
            let is_over = rank.calls[at].1.is_over(&rank.window);
            if is_over {
                self.check_read(me, plan)?;
                self.ranks[me].calls.remove(at);
            }
            if step.is_some() || is_over {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Nobody reads a rank's memory when its call is over.
    fn check_read(&self, me: usize, plan: usize) -> Result<(), String> {
        let (call, Plan { rounds, is_read, .. }) = (plan as u64 + 1, &self.plans[plan]);
        for (to, rounds) in rounds[me].iter().enumerate().filter(|_| *is_read) {
            if !self.took.contains_key(&(to, me, call, rounds - 1)) {
                return Err(format!("call {call} is over at rank {me}, and rank {to} reads yet"));
            }
        }
        Ok(())
    }

    fn do_step(&mut self, me: usize, at: usize, plan: usize, step: Step) -> Result<(), String> {
        let width = self.plans[plan].width;
        let call = &mut self.ranks[me].calls[at].1;
        let offset = call.place().offset;
        match step {
            Step::Send { to, mark } => {
                let area = offset + me * width;
                let cells: Vec<_> =
                    (area..area + width).map(|cell| (cell, (mark.call, mark.round, me))).collect();
                let left = (0..cells.len()).collect();
                call.sent(to);
                self.network.push(Flying::Data { to, from: me, cells, left, mark });
            }
            Step::Tell { to, mark } => self.network.push(Flying::Told { to, from: me, mark }),
            Step::Take { from, round } => {
                let number = call.number();
                let all = 0..self.ranks.len();
                for from in all.filter(|rank| from.is_none_or(|from| from == *rank)) {
                    let area = offset + from * width;
                    for cell in area..area + width {
                        let seen = self.ranks[me].window.cells[cell];
                        if seen != Some((number, round, from)) {
                            return Err(format!(
                                "rank {me} takes {seen:?} for call {number} round {round} of {from}"
                            ));
                        }
                    }
                    *self.took.entry((me, from, number, round)).or_default() += 1;
                }
                let rank = &mut self.ranks[me];
                rank.calls[at].1.took(from, &rank.window);
            }
        }
        Ok(())
    }

    /// Something arrives.
    fn deliver(&mut self) -> bool {
        if self.network.is_empty() {
            return false;
        }
        let at = self.random.usize(..self.network.len());
        let is_lane_lost = self.random.u8(..16) == 0;
        let is_over = match &mut self.network[at] {
            Flying::Told { to, from, mark } => {
                self.ranks[*to].window.taken[*from][mark.call as usize % SLOTS] = *mark;
                true
            }
            Flying::Data { to, from, cells, left, mark } => {
                if let Some(next) = left.pop() {
                    let (cell, value) = cells[next];
                    self.ranks[*to].window.cells[cell] = Some(value);
                    if is_lane_lost {
                        *left = (0..cells.len()).collect();
                    }
                    self.random.shuffle(left);
                    false
                } else {
                    self.ranks[*to].window.arrived[*from][mark.call as usize % SLOTS] = *mark;
                    true
                }
            }
        };
        if is_over {
            self.network.swap_remove(at);
        }
        true
    }

    fn check_all_taken(&self) -> Result<(), String> {
        for (plan, call) in self.plans.iter().zip(1..) {
            for (from, rounds) in plan.rounds.iter().enumerate() {
                for (to, rounds) in rounds.iter().enumerate() {
                    for round in 0..*rounds {
                        let times = self.took.get(&(to, from, call, round)).copied().unwrap_or(0);
                        if times != 1 {
                            return Err(format!(
                                "rank {to} took round {round} of {from} in call {call} {times} times"
                            ));
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

impl Plan {
    fn random(random: &mut fastrand::Rng, ranks: usize) -> Self {
        let takes = if random.bool() { Takes::EachAlone } else { Takes::AllTogether };
        let mut round = || if random.u8(..3) == 0 { random.u16(1..=4) } else { 1 };
        let rounds = match takes {
            Takes::EachAlone => (0..ranks).map(|_| (0..ranks).map(|_| round()).collect()).collect(),
            Takes::AllTogether => {
                let to: Vec<_> = (0..ranks).map(|_| round()).collect();
                vec![to; ranks]
            }
        };
        Self { takes, width: random.usize(1..=POOL / ranks), rounds, is_read: random.bool() }
    }
}

/// How many schedules a test run explores; `UCCL_EP_SCHEDULES` asks for more, `UCCL_EP_SEED` for one.
fn seeds() -> std::ops::Range<u64> {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse().ok());
    match number("UCCL_EP_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("UCCL_EP_SCHEDULES").unwrap_or(20_000),
    }
}

#[test]
fn every_schedule_ends_and_nothing_is_lost_or_taken_twice() {
    for seed in seeds() {
        if let Err(why) = World::new(seed).run() {
            panic!("UCCL_EP_SEED={seed}: {why}");
        }
    }
}
