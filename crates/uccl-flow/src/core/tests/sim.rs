//! Two ends and the streams between them.

use uccl_wire::flow::{FlowHead, HeadKind};

use super::net::{Faults, Net, Note};
use crate::core::{Action, Inbox, Params, Part, Scheduler, Verdict, WidthParams};

const STEP_US: u64 = 200;
const CHUNK_LEN: u64 = 4096;
/// The most requests of a flow.
const MOST: u64 = 32;

pub(super) fn params(streams: usize) -> Params {
    Params {
        streams,
        width: WidthParams { first: streams, sample_us: 100_000, pause_us: 2_000_000 },
        chunk_len: CHUNK_LEN,
        early_len: 4 * CHUNK_LEN,
        late_us: 10_000,
        dead_us: 100_000,
        limit_us: 1_500_000,
        probe_us: 5_000,
    }
}

/// The messages of a run.
#[derive(Clone, Copy)]
pub(super) struct Work {
    pub(super) flows: usize,
    /// Of each flow.
    pub(super) messages: u64,
    pub(super) longest: u64,
}

/// The memory of a receive, and its history.
struct Memory {
    total: u64,
    bytes: Vec<u8>,
    is_done: bool,
}

struct Flow {
    inbox: Inbox,
    memory: Vec<Memory>,
    pushed: u64,
    sent: u64,
    posted: u64,
    done: u64,
}

/// A piece of a chunk that a system call of the receiver moves. It writes when it ends.
struct ArrivalArea {
    head: FlowHead,
    from: u64,
    len: u64,
    is_whole: bool,
}

/// The receiver's side of a line, for its present chunk.
#[derive(Default)]
struct Reader {
    landing: Option<ArrivalArea>,
    /// Bytes of a chunk that is kept aside.
    early: Option<Vec<u8>>,
    is_dropping: bool,
}

pub(super) struct Sim {
    seed: u64,
    rng: fastrand::Rng,
    now_us: u64,
    scheduler: Scheduler,
    pub(super) net: Net,
    readers: Vec<Reader>,
    flows: Vec<Flow>,
    work: Work,
    has_failed: bool,
}

fn byte(flow: u64, message: u64, at: u64) -> u8 {
    (flow * 131 + message * 31 + at + (at >> 8) * 7) as u8
}

impl Sim {
    pub(super) fn new(seed: u64, streams: usize, work: Work) -> Self {
        Self::with(params(streams), seed, work)
    }

    pub(super) fn with(params: Params, seed: u64, work: Work) -> Self {
        let streams = params.streams;
        let mut rng = fastrand::Rng::with_seed(seed);
        let memory = |rng: &mut fastrand::Rng| {
            let total = rng.u64(1..=work.longest);
            Memory { total, bytes: vec![0; total as usize], is_done: false }
        };
        let flows = (0..work.flows)
            .map(|_| Flow {
                inbox: Inbox::new(params.chunk_len, params.early_len),
                memory: (0..work.messages).map(|_| memory(&mut rng)).collect(),
                pushed: 0,
                sent: 0,
                posted: 0,
                done: 0,
            })
            .collect();
        Self {
            seed,
            scheduler: Scheduler::new(params),
            net: Net::new(seed, streams),
            readers: (0..streams).map(|_| Reader::default()).collect(),
            flows,
            work,
            now_us: 0,
            has_failed: false,
            rng,
        }
    }

    /// A small run with everything that can go wrong.
    pub(super) fn random(seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(!seed);
        let (flows, messages) = (rng.usize(1..4), rng.u64(1..12));
        let work = Work { flows, messages, longest: 12 * CHUNK_LEN };
        let mut params = params(rng.usize(1..5));
        params.width.first = rng.usize(1..=params.streams);
        let mut sim = Self::with(params, seed, work);
        sim.net.faults = Faults::Random;
        sim
    }

    pub(super) fn now_us(&self) -> u64 {
        self.now_us
    }

    /// Streams that carry chunks, and those that are to be open.
    pub(super) fn width(&self) -> (usize, usize) {
        (self.scheduler.width(), self.scheduler.wanted())
    }

    pub(super) fn has_failed(&self) -> bool {
        self.has_failed
    }

    /// Runs to the end of all messages, or to an error.
    pub(super) fn run(&mut self) {
        self.run_until(60_000_000);
        let is_done = self.has_failed || self.is_done();
        assert!(is_done, "seed {}: messages hang", self.seed);
    }

    pub(super) fn run_until(&mut self, end_us: u64) {
        while self.now_us < end_us && !self.is_done() && !self.has_failed {
            self.now_us += STEP_US;
            self.post();
            for at in 0..self.readers.len() {
                self.step(at);
            }
            self.act();
        }
    }

    fn is_done(&self) -> bool {
        let all = self.work.messages;
        self.flows.iter().all(|flow| flow.done == all && flow.sent == all)
    }

    /// Both sides post, now and then.
    fn post(&mut self) {
        for at in 0..self.flows.len() {
            let flow = &mut self.flows[at];
            let name = at as u64;
            let may_send = flow.pushed < self.work.messages && flow.pushed - flow.sent < MOST;
            if may_send && self.rng.u32(0..3) == 0 {
                let total = flow.memory[flow.pushed as usize].total;
                self.scheduler.push(name, flow.pushed, total, 0, self.now_us);
                flow.pushed += 1;
            }
            let may_receive = flow.posted < self.work.messages && flow.posted - flow.done < MOST;
            if may_receive && self.rng.u32(0..3) == 0 {
                let room = flow.memory[flow.posted as usize].total + self.rng.u64(0..2) * 10;
                flow.inbox.post(room);
                flow.posted += 1;
                self.take_early(at);
            }
        }
    }

    /// Chunks that came before their receive go to its memory, and the sender hears of it.
    fn take_early(&mut self, at: usize) {
        let had_early = self.flows[at].inbox.has_early();
        while let Some(chunk) = self.flows[at].inbox.take_early() {
            match self.flows[at].inbox.begin_landing(&chunk.head) {
                Verdict::Land => {
                    self.write(&chunk.head, 0, &chunk.bytes);
                    self.end_landing(&chunk.head, true);
                }
                verdict => assert_eq!(verdict, Verdict::Repeat, "seed {}", self.seed),
            }
        }
        if had_early {
            self.tell_posted(at);
        }
    }

    fn tell_posted(&mut self, flow: usize) {
        let posted = self.flows[flow].inbox.posted();
        for line in 0..self.readers.len() {
            self.net.note(line, Note::Posted { flow: flow as u64, posted }, self.now_us);
        }
    }

    fn step(&mut self, at: usize) {
        if self.net.misbehave(at, self.now_us) {
            self.scheduler.lose(at);
            self.close(at);
        }
        let line = &mut self.net.lines[at];
        let is_wanted = at < self.scheduler.wanted();
        if is_wanted && !line.is_up && line.opens_us <= self.now_us && !self.net.is_cut(self.now_us)
        {
            self.net.lines[at].is_up = true;
            self.scheduler.open(at, self.now_us);
            (0..self.flows.len()).for_each(|flow| self.tell_posted(flow));
        }
        while let Some(note) = self.net.take_note(at, self.now_us) {
            match note {
                Note::Ack(count) => {
                    assert!(self.scheduler.on_ack(at, count, self.now_us), "seed {}", self.seed);
                }
                Note::Posted { flow, posted } => self.scheduler.on_posted(flow, posted),
            }
        }
        if self.net.lines[at].is_up {
            while let Some(part) = self.scheduler.next(at, self.now_us) {
                self.net.lines[at].parts.push_back(part);
            }
        }
        self.deliver(at);
    }

    fn deliver(&mut self, at: usize) {
        self.end_piece(at);
        let mut bytes = self.net.move_us(at, STEP_US, self.now_us);
        if bytes > 0 && !self.net.lines[at].parts.is_empty() {
            self.scheduler.on_moved(at, self.now_us);
        }
        while bytes > 0
            && let Some(part) = self.net.lines[at].parts.front().copied()
        {
            let arrived = self.net.lines[at].arrived;
            let len = (part.len - arrived).min(bytes).min(self.rng.u64(1..=CHUNK_LEN));
            bytes -= len;
            self.net.lines[at].arrived += len;
            self.net.lines[at].delivered += len;
            self.piece(at, &part, arrived, len);
            // Half of the system calls are still under way when other lines go on.
            if self.rng.bool() {
                self.end_piece(at);
            } else if self.readers[at].landing.is_some() {
                return;
            }
        }
    }

    /// A piece of a chunk has arrived.
    fn piece(&mut self, at: usize, part: &Part, from: u64, len: u64) {
        let head = head(part);
        let is_whole = from + len == part.len;
        if from == 0 {
            self.readers[at] = Reader::default();
        }
        let is_early = self.readers[at].early.is_some();
        let verdict = match () {
            () if is_early => Verdict::Early,
            () if self.readers[at].is_dropping => Verdict::Repeat,
            () => self.flows[part.flow as usize].inbox.begin_landing(&head),
        };
        match verdict {
            Verdict::Land => {
                self.readers[at].landing = Some(ArrivalArea { head, from, len, is_whole });
                return;
            }
            Verdict::Early => {
                let content =
                    (from..from + len).map(|i| byte(part.flow, part.message, part.offset + i));
                self.readers[at].early.get_or_insert_default().extend(content);
            }
            Verdict::Repeat => self.readers[at].is_dropping = true,
            verdict => panic!("seed {}: {verdict:?} for {part:?}", self.seed),
        }
        if is_whole {
            let flow = part.flow as usize;
            if let Some(bytes) = self.readers[at].early.take() {
                self.flows[flow].inbox.keep_early(head, bytes.into());
                self.take_early(flow);
            }
            self.end_part(at);
        }
    }

    /// The system call of a line ends: it has written until now.
    fn end_piece(&mut self, at: usize) {
        let Some(landing) = self.readers[at].landing.take() else { return };
        let ArrivalArea { head, from, len, is_whole } = landing;
        let content: Vec<_> =
            (from..from + len).map(|i| byte(head.flow, head.message, head.offset + i)).collect();
        self.write(&head, from, &content);
        self.end_landing(&head, is_whole);
        if is_whole {
            self.end_part(at);
        }
    }

    fn end_part(&mut self, at: usize) {
        let Some(part) = self.net.lines[at].parts.pop_front() else { return };
        let line = &mut self.net.lines[at];
        line.arrived = 0;
        line.count += 1;
        let count = line.count;
        let posted = self.flows[part.flow as usize].inbox.posted();
        self.net.note(at, Note::Posted { flow: part.flow, posted }, self.now_us);
        self.net.note(at, Note::Ack(count), self.now_us);
    }

    fn write(&mut self, head: &FlowHead, from: u64, content: &[u8]) {
        let memory = &mut self.flows[head.flow as usize].memory[head.message as usize];
        assert!(!memory.is_done, "seed {}: a byte lands after the end of {head:?}", self.seed);
        let at = (head.offset + from) as usize;
        memory.bytes[at..at + content.len()].copy_from_slice(content);
    }

    fn end_landing(&mut self, head: &FlowHead, is_whole: bool) {
        let flow = &mut self.flows[head.flow as usize];
        if !flow.inbox.end_landing(head, is_whole) {
            return;
        }
        let memory = &mut flow.memory[head.message as usize];
        let is_right =
            (0u64..).zip(&memory.bytes).all(|(i, b)| *b == byte(head.flow, head.message, i));
        assert!(is_right, "seed {}: {head:?} has ended without all its bytes", self.seed);
        memory.is_done = true;
        flow.done += 1;
    }

    fn act(&mut self) {
        self.scheduler.on_time(self.now_us);
        while let Some(action) = self.scheduler.next_action() {
            match action {
                Action::Sent { flow, .. } => self.flows[flow as usize].sent += 1,
                Action::Replace { stream } => self.close(stream),
                Action::Fail => self.has_failed = true,
            }
        }
    }

    /// The line is gone on both sides; a system call that was under way has ended.
    fn close(&mut self, at: usize) {
        if let Some(ArrivalArea { head, .. }) = self.readers[at].landing.take() {
            self.end_landing(&head, false);
        }
        self.readers[at] = Reader::default();
        self.net.kill(at, self.now_us);
    }
}

fn head(part: &Part) -> FlowHead {
    let Part { flow, message, tag, total, offset, len, .. } = *part;
    FlowHead { kind: HeadKind::Chunk, tag, flow, message, total, offset, len }
}
