//! Both ends of many paths over a network with every fault of its kind, in virtual time.
//!
//! The model knows every attempt under way and every chunk that was placed, and fails the test as
//! soon as the promise is broken.

mod memory;
mod net;

use std::collections::BTreeSet;

use fastrand::Rng;
use memory::Memory;
use net::{Net, NetEvent};
use uccl_tran::{
    choice::CHOICE_NAMES,
    control::{CONTROL_NAMES, CreditPacer, LinkFacts},
    multipath::{
        Attempt, ChunkVerdict, Load, MultipathEvent, MultipathParams, MultipathReceiver,
        MultipathSender, Repeats, Techniques,
    },
    recovery::{LOSS_NAMES, TailProbe},
};

/// No schedule takes longer than this, in nanoseconds: then something starves.
const LIMIT_NS: u64 = 3_000_000_000;

/// A run of both ends.
pub(crate) struct Schedule {
    rng: Rng,
    params: MultipathParams,
    sender: MultipathSender,
    receiver: MultipathReceiver,
    pacer: CreditPacer,
    net: Net,
    memory: Memory,
    now_ns: u64,
    totals: Vec<u64>,
    posted: usize,
    pushed: usize,
    /// Messages that the sender has been told the end of.
    told: BTreeSet<u64>,
    /// Attempts under way, by chunk, where at most one may be.
    under_way: BTreeSet<(u64, u64)>,
}

impl Schedule {
    pub(crate) fn random(seed: u64, repeats: Repeats) -> Self {
        let mut rng = Rng::with_seed(seed);
        let chunk_len = rng.u32(1..=64);
        let params = MultipathParams {
            paths: rng.u16(1..6),
            chunk_len,
            repeats,
            most_open: rng.u32(1..6),
            ack_every: rng.u32(1..5),
            ack_delay_ns: rng.u64(0..50_000),
            initial_rtt_ns: rng.u64(1_000..500_000),
            tail_probe: TailProbe { least_ns: rng.u64(5_000..100_000), most_ns: 2_000_000 },
            dead_after_ns: rng.u64(300_000..10_000_000),
        };
        let link = LinkFacts { bytes_per_s: 1e9, base_rtt_ns: 20_000, chunk_len: chunk_len.into() };
        let name = |names: &[&'static str], rng: &mut Rng| names[rng.usize(..names.len())];
        let names = [
            name(&CHOICE_NAMES, &mut rng),
            name(&LOSS_NAMES, &mut rng),
            name(&CONTROL_NAMES, &mut rng),
        ];
        let techniques = Techniques::named(names, &link, params.paths, seed).expect("names");
        let most = u64::from(chunk_len) * 24;
        let totals = (0..rng.usize(1..7)).map(|_| rng.u64(0..=most)).collect();
        Self {
            net: Net::random(&mut rng, params.paths, repeats),
            sender: MultipathSender::new(params, techniques, 0).expect("parameters"),
            receiver: MultipathReceiver::new(params).expect("parameters"),
            pacer: CreditPacer::new(2 * u64::from(chunk_len), 100, chunk_len.into()),
            memory: Memory::new(chunk_len.into()),
            now_ns: 0,
            totals,
            posted: 0,
            pushed: 0,
            told: BTreeSet::new(),
            under_way: BTreeSet::new(),
            params,
            rng,
        }
    }

    /// Runs until every message has ended on both sides.
    pub(crate) fn run(&mut self) {
        self.net.at(0, NetEvent::User);
        while !self.is_done() {
            let Some((at_ns, thing)) = self.net.pop() else {
                panic!("a message starves, nothing is due: {:?}", self.sender);
            };
            assert!(at_ns < LIMIT_NS, "a message starves: {:?}", self.sender);
            self.now_ns = at_ns;
            match thing {
                NetEvent::User => self.on_user(),
                NetEvent::Attempt { attempt, is_last, lands, epoch } => {
                    self.on_attempt(&attempt, is_last, lands, epoch);
                }
                NetEvent::Ack(ack) => {
                    let result = self.sender.on_ack(self.now_ns, &ack);
                    assert!(result.is_ok(), "{result:?}");
                }
                NetEvent::Demand(demand) => {
                    self.pacer.on_demand(0, demand.wanted_bytes, Some(demand.known_bytes));
                }
                NetEvent::Credit(granted) => self.sender.on_credit(self.now_ns, granted),
                NetEvent::TornDown(path) => self.on_torn_down(path),
                NetEvent::Reopen(path) => self.sender.open_path(self.now_ns, path),
                NetEvent::Timer => {}
            }
            self.act();
        }
        // Attempts that are still under way may come now.
        while let Some((at_ns, thing)) = self.net.pop() {
            self.now_ns = at_ns;
            if let NetEvent::Attempt { attempt, is_last, lands, epoch } = thing {
                self.on_attempt(&attempt, is_last, lands, epoch);
            }
        }
    }

    fn is_done(&self) -> bool {
        self.told.len() == self.totals.len()
            && (0..self.totals.len() as u64).all(|message| self.memory.has_ended(message))
    }

    /// Posts, pushes and cancels, and comes back later.
    fn on_user(&mut self) {
        if self.posted < self.totals.len() {
            let total = self.totals[self.posted];
            let number = self.receiver.post(total + self.rng.u64(0..2));
            self.memory.post(number, total);
            self.posted += 1;
        }
        if self.pushed < self.totals.len() && self.rng.u32(0..4) > 0 {
            self.sender.push(self.now_ns, self.totals[self.pushed]);
            self.pushed += 1;
        }
        let open = self.posted.min(self.pushed);
        if open > 0 && self.rng.u32(0..12) == 0 {
            let message = self.rng.u64(0..open as u64);
            self.fence(message);
        }
        if self.posted < self.totals.len() || self.pushed < self.totals.len() {
            let later_ns = self.now_ns + self.rng.u64(1..40_000);
            self.net.at(later_ns, NetEvent::User);
        }
    }

    /// The memory of a message is wanted back.
    fn fence(&mut self, message: u64) {
        self.sender.cancel(message);
        // Where the network places chunks, the memory is free when the sender says so.
        if self.params.repeats == Repeats::Harmless && self.receiver.fence(message) {
            self.memory.end(message);
        }
    }

    fn on_attempt(&mut self, attempt: &Attempt, is_last: bool, lands: bool, epoch: u32) {
        let is_harmless = self.params.repeats == Repeats::Harmless;
        if !is_harmless && epoch != self.net.epoch(attempt.path) {
            return;
        }
        if let Load::Chunk(chunk) = attempt.load
            && is_last
        {
            self.under_way.remove(&(chunk.message, chunk.offset));
        }
        if !lands {
            return;
        }
        let is_marked = self.rng.u32(0..8) == 0;
        let verdict = self.receiver.on_attempt(self.now_ns, attempt, is_marked);
        match (attempt.load, verdict) {
            (Load::Chunk(chunk), ChunkVerdict::Place) => self.memory.place(&chunk),
            (Load::Chunk(_), ChunkVerdict::Repeat | ChunkVerdict::Stale) => {
                assert!(is_harmless, "placed twice by the network: {verdict:?} {attempt:?}");
            }
            (Load::Chunk(_), ChunkVerdict::Early) => {
                assert!(is_harmless, "the network has no place for it");
            }
            (Load::Probe, ChunkVerdict::Probe | ChunkVerdict::Stale) => {}
            other => panic!("{other:?}"),
        }
        while let Some(message) = self.receiver.poll_ended() {
            self.memory.complete(message);
        }
        if attempt.wanted_bytes > 0 {
            self.pacer.on_demand(0, attempt.wanted_bytes, None);
        }
    }

    /// The queue pair of a dead path is gone, with all that was under way over it.
    fn on_torn_down(&mut self, path: u16) {
        self.net.next_epoch(path);
        let lost: BTreeSet<_> = self.net.drop_attempts(path).collect();
        self.under_way.retain(|chunk| !lost.contains(chunk));
        if let Some(ack) = self.receiver.last_ack(self.now_ns, path) {
            self.sender.on_ack(self.now_ns, &ack).expect("an acknowledgement");
        }
        self.sender.close_path(self.now_ns, path);
        let later_ns = self.now_ns + self.rng.u64(1..500_000);
        self.net.at(later_ns, NetEvent::Reopen(path));
    }

    fn on_event(&mut self, event: MultipathEvent) {
        match event {
            MultipathEvent::Sent { message } => {
                assert!(self.told.insert(message), "{message} was told twice");
                assert!(self.memory.has_ended(message), "{message} has not come");
            }
            MultipathEvent::Cancelled { message } => {
                assert!(self.told.insert(message), "{message} was told twice");
                // Now the memory is free, also where the network places chunks.
                if self.receiver.fence(message) {
                    self.memory.end(message);
                }
            }
            MultipathEvent::PathDead { path } => {
                let later_ns = self.now_ns + self.rng.u64(1..500_000);
                let thing = match self.params.repeats {
                    Repeats::Harmless => NetEvent::Reopen(path),
                    Repeats::OnlyWhenProven => NetEvent::TornDown(path),
                };
                self.net.at(later_ns, thing);
            }
        }
    }

    fn act(&mut self) {
        let now_ns = self.now_ns;
        self.sender.on_timeout(now_ns);
        loop {
            while let Some(event) = self.sender.poll() {
                self.on_event(event);
            }
            let may_send =
                self.params.repeats == Repeats::Harmless || self.posted == self.totals.len();
            let Some(attempt) = self.sender.next(now_ns).filter(|_| may_send) else { break };
            if let Load::Chunk(chunk) = attempt.load {
                assert!(!self.memory.is_free(chunk.message), "sent after its end: {chunk:?}");
                let is_alone = self.under_way.insert((chunk.message, chunk.offset));
                let may_be_twice = self.params.repeats == Repeats::Harmless;
                assert!(is_alone || may_be_twice, "twice under way: {chunk:?}");
            }
            self.net.send(now_ns, &attempt, &mut self.rng);
        }
        if let Some(demand) = self.sender.poll_demand(now_ns) {
            self.net.send_back(now_ns, NetEvent::Demand(demand), &mut self.rng);
        }
        while let Some(ack) = self.receiver.poll_ack(now_ns) {
            self.net.send_back(now_ns, NetEvent::Ack(ack), &mut self.rng);
        }
        while let Some(grant) = self.pacer.poll(now_ns) {
            self.net.send_back(now_ns, NetEvent::Credit(grant.granted_bytes), &mut self.rng);
        }
        let times =
            [self.sender.next_timeout_ns(), self.receiver.next_timeout_ns(), self.pacer.next_ns()];
        if let Some(next_ns) = times.into_iter().flatten().min() {
            self.net.set_timer(next_ns.max(now_ns + 1));
        }
    }
}
