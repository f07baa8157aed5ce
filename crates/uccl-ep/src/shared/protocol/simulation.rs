//! All ranks of a group in one thread, over a network that keeps no order, as far as the protocol
//! can tell.
//!
//! A write's bytes land one by one, in any order and as late as the schedule says. Its mark is set
//! after them, as a signal promises; marks of different writes overtake each other. When a lane is
//! lost, its writes are made again: their bytes land a second time, but never after the mark. A
//! rank may go away; the others drop it one after another. Before some call all ranks may meet
//! anew, with another rank in the place of the one that went: then each has a new window. Late
//! writes of the old ranks land in the old windows, in which calls that began before the meeting
//! end. The simulation checks that a rank takes, and passes on, exactly the rounds that were sent
//! to it for that call, that no rank overwrites cells that another has yet to read, that a call
//! with readers is over only when no peer reads, and that all calls end.

use std::collections::HashMap;

use super::{Call, Mark, Participants, ReceiveMode, Step, Stream, Streams, Words, words_of};
use crate::shared::{
    join::Position,
    nodes::Nodes,
    places::{Places, SLOTS},
};

/// Cells of each rank's part of a window: enough for a few calls.
const CELLS: usize = 8;

/// The contents of a cell of a place: call, round, writer, and the rank that owns the tokens.
type Cell = (u64, u16, usize, usize);

#[derive(Clone)]
struct Window {
    arrived: Vec<[Mark; SLOTS]>,
    taken: Vec<[Mark; SLOTS]>,
    cells: Vec<Option<Cell>>,
}

impl Window {
    fn emptied(&self) -> Self {
        let none = [Mark::of_word(0); SLOTS];
        let words = || vec![none; self.arrived.len()];
        Self { arrived: words(), taken: words(), cells: vec![None; self.cells.len()] }
    }
}

impl Words for Window {
    fn arrived(&self, word: usize, slot: usize) -> Mark {
        self.arrived[word][slot]
    }

    fn taken(&self, word: usize, slot: usize) -> Mark {
        self.taken[word][slot]
    }
}

enum Message {
    /// Bytes of a write, and then its mark.
    Data {
        generation: usize,
        to: usize,
        from: usize,
        word: usize,
        cells: Vec<(usize, Cell)>,
        left: Vec<usize>,
        mark: Mark,
    },
    Taken {
        generation: usize,
        to: usize,
        from: usize,
        word: usize,
        mark: Mark,
    },
}

impl Message {
    fn ends(&self) -> (usize, usize) {
        match self {
            Self::Data { from, to, .. } | Self::Taken { from, to, .. } => (*from, *to),
        }
    }
}

/// One call, as all ranks make it.
struct Plan {
    receive_mode: ReceiveMode,
    is_two_level: bool,
    /// Cells of each stream's area.
    width: usize,
    /// `rounds[from][to]`; of a combine, `to` is the rank that owns the tokens.
    rounds: Vec<Vec<u16>>,
    /// Whether peers read the ranks' own memory until they have ended.
    is_read: bool,
}

struct Rank {
    places: Places,
    /// The number of a call's plan, and the call.
    calls: Vec<(usize, Call)>,
    next_plan: usize,
    /// One for each time that ranks have met.
    windows: Vec<Window>,
    /// By generation and rank, whether this one has dropped it.
    has_dropped: [Vec<bool>; 2],
    is_gone: bool,
}

impl Rank {
    fn new(position: Position, windows: Vec<Window>, ranks: usize) -> Self {
        Self {
            places: Places::from_call(position.next_call),
            calls: Vec::new(),
            next_plan: position.next_call as usize - 1,
            windows,
            has_dropped: [vec![false; ranks], vec![false; ranks]],
            is_gone: false,
        }
    }
}

/// When all ranks meet anew.
#[derive(Clone, Copy)]
struct Meeting {
    /// Before the call of this plan.
    before: usize,
    is_over: bool,
}

struct World {
    random: fastrand::Rng,
    nodes: Nodes,
    plans: Vec<Plan>,
    ranks: Vec<Rank>,
    network: Vec<Message>,
    /// How often a rank took a round: (rank, stream's peer, stream's owner, call, round).
    took: HashMap<(usize, usize, usize, u64, u16), u32>,
    /// A sender and a receiver: most messages between them take many calls.
    slow: Option<(usize, usize)>,
    /// A rank that goes away, and the number of steps before that.
    goes: Option<(usize, usize)>,
    /// The generation in which it went.
    went: Option<usize>,
    /// Whether that rank was stopped and not killed: its writes land all the same.
    leaves_writes: bool,
    meeting: Option<Meeting>,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let count = random.usize(1..=4);
        // Large groups take long, and find little that small ones do not.
        let most = if random.u8(..16) == 0 { 5 } else { [5, 3, 2, 2][count - 1] };
        let nodes = Nodes { count, ranks: random.usize(1..=most) };
        let ranks = nodes.all_ranks();
        // Without one of its ranks, a group uses no relays.
        let goes = (ranks > 1 && random.u8(..4) == 0)
            .then(|| (random.usize(..ranks), random.usize(..400)));
        let slow = (random.u8(..4) == 0).then(|| (random.usize(..ranks), random.usize(..ranks)));
        let relayed = if goes.is_none() { [0, 8, 15][random.usize(..3)] } else { 0 };
        let plan = |random: &mut _| Plan::random(random, nodes, relayed);
        let most = if slow.is_some() { 2 * SLOTS + 4 } else { SLOTS + 6 };
        let plans: Vec<_> = (0..random.usize(1..=most)).map(|_| plan(&mut random)).collect();
        let none = Mark::of_word(0);
        let window = Window {
            arrived: vec![[none; SLOTS]; words_of(nodes)],
            taken: vec![[none; SLOTS]; words_of(nodes)],
            cells: vec![None; CELLS * ranks],
        };
        let first = Position::after([].into_iter());
        let rank = || Rank::new(first, vec![window.clone()], ranks);
        let ranks = (0..ranks).map(|_| rank()).collect();
        let meeting = (random.u8(..4) == 0)
            .then(|| Meeting { before: random.usize(..plans.len()), is_over: false });
        let leaves_writes = meeting.is_some() && random.bool();
        let (network, took, went) = (Vec::new(), HashMap::new(), None);
        Self {
            random,
            nodes,
            plans,
            ranks,
            network,
            took,
            slow,
            goes,
            went,
            leaves_writes,
            meeting,
        }
    }

    /// The number of the windows of a plan's call: 0 before the meeting, 1 from it on.
    fn generation_of(&self, plan: usize) -> usize {
        usize::from(self.meeting.is_some_and(|meeting| plan >= meeting.before))
    }

    /// Makes all ranks meet once the present ones have come to the meeting. A rank that has gone is
    /// replaced, at the call that the others agree on.
    fn meet(&mut self) {
        let Some(Meeting { before, is_over: false }) = self.meeting else { return };
        let mut there = self.ranks.iter().filter(|rank| !rank.is_gone);
        if !there.all(|rank| rank.next_plan == before) {
            return;
        }
        // A rank that is replaced makes all of its calls anew, and comes with the first number.
        let all = self.ranks.iter().map(|rank| match rank.is_gone {
            true => Position::FIRST,
            false => Position { generation: 1, next_call: rank.places.next_call() },
        });
        let position = Position::after(all);
        let ranks = self.ranks.len();
        for rank in &mut self.ranks {
            let empty = rank.windows[0].emptied();
            let windows = vec![rank.windows[0].clone(), empty];
            if rank.is_gone {
                *rank = Rank::new(position, windows, ranks);
                continue;
            }
            (rank.windows, rank.places) = (windows, Places::from_call(position.next_call));
            rank.next_plan = position.next_call as usize - 1;
        }
        self.meeting = Some(Meeting { before, is_over: true });
    }

    /// Runs until all ranks have made all calls; returns the first error.
    fn run(mut self) -> Result<(), String> {
        for step in 0.. {
            if step > 1_000_000 {
                return Err("no end in sight".into());
            }
            if let Some((rank, _)) = self.goes.filter(|(_, after)| step >= *after) {
                self.go_away_or_drop(rank);
            }
            self.meet();
            let is_done = |rank: &Rank| rank.next_plan == self.plans.len() && rank.calls.is_empty();
            if self.ranks.iter().all(|rank| rank.is_gone || is_done(rank)) {
                return self.check_all_taken();
            }
            let moved = if self.random.bool() { self.deliver() } else { self.act()? };
            // It is a deadlock only when no message is left and no rank can act.
            let moved =
                moved || self.deliver() || self.act_anywhere()? || self.deliver_of(|_, _| true);
            if !moved && self.all_know_the_rank_that_is_gone() {
                return Err(format!(
                    "nothing can happen any more, after {step} steps{}",
                    self.state()
                ));
            }
        }
        unreachable!("the loop returns")
    }

    fn all_know_the_rank_that_is_gone(&self) -> bool {
        let Some((gone, _)) = self.goes else { return true };
        let others = || self.ranks.iter().enumerate().filter(|(rank, _)| *rank != gone);
        self.went.is_some_and(|went| others().all(|(_, rank)| rank.has_dropped[went][gone]))
    }

    /// Makes a rank go away, with its writes that have not landed, or makes another rank drop it.
    fn go_away_or_drop(&mut self, gone: usize) {
        let went = *self.went.get_or_insert_with(|| {
            self.ranks[gone].is_gone = true;
            let went = usize::from(self.meeting.is_some_and(|meeting| meeting.is_over));
            // No meeting follows, so a rank that is stopped then never goes on.
            if !self.leaves_writes || went > 0 {
                self.network.retain(|flying| flying.ends().0 != gone);
            }
            went
        });
        let at = self.random.usize(..self.ranks.len());
        let before = self.meeting.map_or(usize::MAX, |meeting| meeting.before);
        let rank = &mut self.ranks[at];
        if self.random.u8(..8) == 0 && at != gone && !rank.has_dropped[went][gone] {
            rank.has_dropped[..=went].iter_mut().for_each(|dropped| dropped[gone] = true);
            let windows = &rank.windows;
            rank.calls.retain_mut(|(plan, call)| {
                let generation = usize::from(*plan >= before);
                if generation <= went {
                    call.drop_rank(gone);
                }
                !call.is_over(&windows[generation])
            });
        }
    }

    /// The marks that each rank waits for.
    fn state(&self) -> String {
        let mut text = format!(" ({:?})", self.nodes);
        for (me, rank) in self.ranks.iter().enumerate() {
            for (plan, call) in &rank.calls {
                text += &format!("\nrank {me} in call {}: ", call.number());
                for wait in call.awaited(&rank.windows[self.generation_of(*plan)]) {
                    let super::MissingMark { peer, owner, what, expected, seen } = wait;
                    text += &format!(
                        "{what} of {peer} for tokens of {owner} ({expected:?}, not {seen:?}) "
                    );
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

    /// One rank begins a call, or does a step of one that it has begun.
    fn act_at(&mut self, me: usize) -> Result<bool, String> {
        let generation = self.generation_of(self.ranks[me].next_plan);
        let rank = &mut self.ranks[me];
        if rank.is_gone {
            return Ok(false);
        }
        // A hook that is called late: two calls are begun before the first is ended.
        let may_begin = rank.calls.len() < 2
            && rank.next_plan < self.plans.len()
            && generation < rank.windows.len();
        if may_begin && (rank.calls.is_empty() || self.random.u8(..4) == 0) {
            let plan = &self.plans[rank.next_plan];
            let call = plan.begin((me, generation), self.nodes, rank);
            if call.number() != rank.next_plan as u64 + 1 {
                return Err(format!("rank {me} has call {} twice", call.number()));
            }
            rank.calls.push((rank.next_plan, call));
            rank.next_plan += 1;
            return Ok(true);
        }
        // Hooks may be called in any order.
        let first = self.random.usize(..2);
        for at in 0..rank.calls.len() {
            let at = (at + first) % self.ranks[me].calls.len();
            let plan = self.ranks[me].calls[at].0;
            let generation = self.generation_of(plan);
            let rank = &mut self.ranks[me];
            let step = rank.calls[at].1.next(&rank.windows[generation], true);
            if let Some(step) = step {
                self.do_step(me, at, plan, step)?;
            }
            let rank = &mut self.ranks[me];
            let is_over = rank.calls[at].1.is_over(&rank.windows[generation]);
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

    /// Checks that no peer reads a rank's memory when its call is over: every rank has taken the
    /// last round from it.
    fn check_read(&self, me: usize, plan: usize) -> Result<(), String> {
        let has_dropped = &self.ranks[me].has_dropped[self.generation_of(plan)];
        let (call, plan) = (plan as u64 + 1, &self.plans[plan]);
        let readers = (0..self.ranks.len()).filter(|rank| plan.is_read && !has_dropped[*rank]);
        for to in readers {
            let arriving = plan.arriving(to, self.nodes);
            for Stream { peer, owner, .. } in arriving.iter().filter(|stream| stream.peer == me) {
                let last = plan.rounds_at(to, *owner, self.nodes) - 1;
                if !self.took.contains_key(&(to, *peer, *owner, call, last)) {
                    return Err(format!(
                        "call {call} is over at rank {me}, and rank {to} reads yet"
                    ));
                }
            }
        }
        Ok(())
    }

    fn do_step(&mut self, me: usize, at: usize, plan: usize, step: Step) -> Result<(), String> {
        let generation = self.generation_of(plan);
        let Rank { windows, calls, .. } = &mut self.ranks[me];
        let window = &windows[generation];
        let call = &mut calls[at].1;
        let plan = &self.plans[plan];
        let offset = call.place().offset;
        let area = |word| plan.area(offset, word, self.nodes);
        match step {
            Step::Send { stream, mark } | Step::Relay { stream, mark } => {
                if matches!(step, Step::Relay { .. }) {
                    for input in call.inputs_of(stream.owner) {
                        let want = (mark.call, mark.round, input.peer, input.owner);
                        expect(window, area(input.local_word), want)
                            .map_err(|why| format!("rank {me} passes on {why}"))?;
                    }
                }
                let Stream { peer: to, remote_word: word, owner, .. } = stream;
                let value = (mark.call, mark.round, me, owner);
                let cells: Vec<_> = area(word).map(|cell| (cell, value)).collect();
                let left = (0..cells.len()).collect();
                call.sent(&stream, window);
                let from = me;
                self.network.push(Message::Data { generation, to, from, word, cells, left, mark });
            }
            Step::SetTaken { to, word, mark } => {
                self.network.push(Message::Taken { generation, to, from: me, word, mark });
            }
            Step::Take { stream, round } => {
                let number = call.number();
                let all = call.arriving().filter(|other| stream.is_none_or(|it| it == **other));
                for Stream { peer, owner, local_word, .. } in all {
                    expect(window, area(*local_word), (number, round, *peer, *owner))
                        .map_err(|why| format!("rank {me} takes {why}"))?;
                    *self.took.entry((me, *peer, *owner, number, round)).or_default() += 1;
                }
                call.took(stream, window);
            }
        }
        Ok(())
    }

    /// Delivers a message that is not slow, or, once in a while, any message.
    fn deliver(&mut self) -> bool {
        let may_be_slow = self.random.u16(..4096) == 0;
        self.deliver_of(|flying, slow| may_be_slow || slow != Some(flying.ends()))
    }

    fn deliver_of(&mut self, which: impl Fn(&Message, Option<(usize, usize)>) -> bool) -> bool {
        let all = 0..self.network.len();
        let may = |at: &usize| which(&self.network[*at], self.slow) && self.may_land(*at);
        let may: Vec<_> = all.filter(may).collect();
        let Some(at) = self.random.choice(may) else { return false };
        self.deliver_at(at);
        true
    }

    /// Whether a message may land. The writes of a stopped rank land when it goes on, which is when
    /// no call uses the windows that it writes to: before that, ranks that go on without it are not
    /// safe from them.
    fn may_land(&self, at: usize) -> bool {
        let is_its = |gone: usize| self.network[at].ends().0 == gone;
        let is_stopped = self.leaves_writes && self.went == Some(0);
        let Some((gone, _)) = self.goes.filter(|_| is_stopped) else { return true };
        let (Message::Data { generation, .. } | Message::Taken { generation, .. }) =
            self.network[at];
        let mut calls = self.ranks.iter().filter(|rank| !rank.is_gone).flat_map(|rank| &rank.calls);
        let goes_on = self.meeting.is_some_and(|meeting| meeting.is_over)
            && calls.all(|(plan, _)| self.generation_of(*plan) == 1);
        generation == 1 || !is_its(gone) || goes_on
    }

    fn deliver_at(&mut self, at: usize) {
        let is_lane_lost = self.random.u8(..16) == 0;
        let is_over = match &mut self.network[at] {
            Message::Taken { generation, to, word, mark, .. } => {
                self.ranks[*to].windows[*generation].taken[*word][mark.call as usize % SLOTS] =
                    *mark;
                true
            }
            Message::Data { generation, to, word, cells, left, mark, .. } => {
                let window = &mut self.ranks[*to].windows[*generation];
                if let Some(next) = left.pop() {
                    let (cell, value) = cells[next];
                    window.cells[cell] = Some(value);
                    if is_lane_lost {
                        *left = (0..cells.len()).collect();
                    }
                    self.random.shuffle(left);
                    false
                } else {
                    window.arrived[*word][mark.call as usize % SLOTS] = *mark;
                    true
                }
            }
        };
        if is_over {
            self.network.swap_remove(at);
        }
    }

    /// Checks that every rank took each round of each arriving stream once, unless one end of the
    /// stream has gone.
    fn check_all_taken(&self) -> Result<(), String> {
        for (nth, plan) in self.plans.iter().enumerate() {
            let call = nth as u64 + 1;
            let went = self.went.filter(|went| self.generation_of(nth) <= *went);
            let gone = went.and(self.goes).map(|(gone, _)| gone);
            let is_gone = |rank: usize| gone == Some(rank);
            for me in (0..self.ranks.len()).filter(|rank| !is_gone(*rank)) {
                let arriving = plan.arriving(me, self.nodes);
                for Stream { peer, owner, .. } in arriving.iter().filter(|s| !is_gone(s.peer)) {
                    for round in 0..plan.rounds_at(me, *owner, self.nodes) {
                        let key = (me, *peer, *owner, call, round);
                        let times = self.took.get(&key).copied().unwrap_or(0);
                        if times != 1 {
                            return Err(format!(
                                "rank {me} took round {round} of {peer} with tokens of {owner} in call {call} {times} times"
                            ));
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

fn expect(window: &Window, area: std::ops::Range<usize>, want: Cell) -> Result<(), String> {
    match area.clone().find(|cell| window.cells[*cell] != Some(want)) {
        Some(cell) => Err(format!("{:?} for {want:?}", window.cells[cell])),
        None => Ok(()),
    }
}

impl Plan {
    /// Of sixteen plans, `relayed` have relays, where there are several nodes.
    fn random(random: &mut fastrand::Rng, nodes: Nodes, relayed: u8) -> Self {
        let ranks = nodes.all_ranks();
        let receive_mode =
            if random.bool() { ReceiveMode::PerStream } else { ReceiveMode::AllStreams };
        let is_two_level = nodes.count > 1 && random.u8(..16) < relayed;
        let mut round = || if random.u8(..3) == 0 { random.u16(1..=4) } else { 1 };
        let rounds = match receive_mode {
            ReceiveMode::PerStream => {
                (0..ranks).map(|_| (0..ranks).map(|_| round()).collect()).collect()
            }
            ReceiveMode::AllStreams => {
                let to: Vec<_> = (0..ranks).map(|_| round()).collect();
                vec![to; ranks]
            }
        };
        let is_read = !is_two_level && random.bool();
        let mut plan = Self { receive_mode, is_two_level, width: 0, rounds, is_read };
        plan.width = random.usize(1..=CELLS * ranks / plan.areas(nodes));
        plan
    }

    fn streams(&self, me: usize, nodes: Nodes) -> Streams {
        match self.is_two_level {
            true => Streams::two_level(me, nodes),
            false => Streams::flat(me, nodes.all_ranks()),
        }
    }

    /// The streams that a rank takes rounds of.
    fn arriving(&self, me: usize, nodes: Nodes) -> Vec<Stream> {
        let streams = self.streams(me, nodes);
        match self.receive_mode {
            ReceiveMode::PerStream => streams.arriving,
            ReceiveMode::AllStreams => streams.own,
        }
    }

    /// The number of areas of a place: one for each word that streams have.
    fn areas(&self, nodes: Nodes) -> usize {
        let ranks = nodes.all_ranks();
        if self.is_two_level { words_of(nodes) - ranks } else { ranks }
    }

    /// The cells of a stream in a place.
    fn area(&self, place: usize, word: usize, nodes: Nodes) -> std::ops::Range<usize> {
        let nth = if self.is_two_level { word - nodes.all_ranks() } else { word };
        place + nth * self.width..place + (nth + 1) * self.width
    }

    fn begin(&self, (me, generation): (usize, usize), nodes: Nodes, rank: &mut Rank) -> Call {
        let pool = rank.windows[0].cells.len();
        let place = rank.places.take(self.width * self.areas(nodes), pool).expect("plans fit");
        let is_there =
            rank.has_dropped[generation].iter().map(|has_dropped| !has_dropped).collect();
        let participants = Participants { me, is_there, streams: self.streams(me, nodes) };
        let mut call =
            Call::new(place, self.receive_mode, participants, |stream| match self.receive_mode {
                ReceiveMode::PerStream => self.rounds[me][stream.peer],
                ReceiveMode::AllStreams => self.rounds[me][stream.owner],
            });
        if self.is_read {
            call.wait_for_readers();
        }
        call
    }

    /// The number of rounds with tokens of a rank that arrive at `me`.
    fn rounds_at(&self, me: usize, owner: usize, nodes: Nodes) -> u16 {
        let is_across = nodes.node_of(me) != nodes.node_of(owner);
        match self.receive_mode {
            ReceiveMode::PerStream if self.is_two_level && is_across => {
                let relay = nodes.rank(nodes.node_of(me), nodes.local_of(owner));
                self.rounds[owner][relay]
            }
            ReceiveMode::PerStream | ReceiveMode::AllStreams => self.rounds[owner][me],
        }
    }
}

/// The schedules that a test run explores; `UCCL_EP_SCHEDULES` sets their number, `UCCL_EP_SEED`
/// selects one.
fn seeds() -> std::ops::Range<u64> {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse().ok());
    match number("UCCL_EP_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("UCCL_EP_SCHEDULES").unwrap_or(10_000),
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
