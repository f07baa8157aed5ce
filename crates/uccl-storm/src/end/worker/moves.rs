//! Moves: reads and writes of one or many pieces, and the checks of memory at their end.

use std::{ops::Range, sync::atomic::Ordering::SeqCst, time::Duration};

use uccl_p2p::{
    ConnId, Error, Interrupt, Iov, MrId, Op, Outcome, Request, Status, TransferId, TryOutcome,
    wire::advert::Advert,
};

use super::{Worker, completion::Completion};
use crate::{
    buffer::Use,
    clock,
    control::{ControlMessage, GrantId},
    end::{notifs, world::World},
    history,
    pattern::Pattern,
    watch,
};

/// The most moves that a worker has under way.
const MOST: usize = 8;

/// A range of a buffer, and the range of a grant that it is read from or written to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    buffer: usize,
    mr: MrId,
    here: usize,
    grant: GrantId,
    there: usize,
    len: usize,
    stamp: u32,
}

impl Part {
    fn ours(&self) -> Range<usize> {
        self.here..self.here + self.len
    }

    fn theirs(&self) -> Range<usize> {
        self.there..self.there + self.len
    }

    /// The pattern of a write's source, at its place in the buffer.
    fn source(&self) -> Pattern {
        Pattern::data(self.stamp).moved(self.here, self.there)
    }
}

/// A read or a write.
#[derive(Debug)]
pub(super) struct Move {
    pub(super) conn: ConnId,
    id: Option<TransferId>,
    op: Op,
    parts: Vec<Part>,
    /// The move ends the use of its grant, and its notification carries the return.
    last: bool,
    timeout: Option<Duration>,
    until: Duration,
}

impl Move {
    pub(super) fn is_pending(&self, world: &World) -> bool {
        self.id.is_some_and(|id| matches!(world.ep.poll(id), Ok(Status::Pending)))
    }
}

/// An interrupt that fires now and then.
struct RandomInterrupt<'a>(&'a mut fastrand::Rng);

impl Interrupt for RandomInterrupt<'_> {
    fn interrupted(&mut self) -> bool {
        self.0.u32(0..40) == 0
    }
}

impl Worker {
    fn timeout(&mut self) -> Option<Duration> {
        match self.rng.u32(0..10) {
            0..2 => Some(Duration::from_millis(self.rng.u64(1..20))),
            2..5 => Some(Duration::from_millis(self.rng.u64(20..1500))),
            _ => None,
        }
    }

    pub(super) fn begin_move(&mut self) {
        if self.moves.len() >= MOST {
            return self.wait();
        }
        let Some(conn) = self.world.conn(&mut self.rng) else { return };
        let op = if self.rng.bool() { Op::Read } else { Op::Write };
        let parts = self.choose_parts();
        if parts.is_empty() {
            return;
        }
        let last = op == Op::Write
            && parts.len() == 1
            && self.rng.u32(0..8) == 0
            && self.is_clean(parts[0].grant);
        let timeout = self.timeout();
        let until = self.until(timeout);
        self.take_up(op, &parts);
        self.start(Move { conn, id: None, op, parts, last, timeout, until });
    }

    fn is_clean(&self, grant: GrantId) -> bool {
        self.grants.iter().any(|known| known.id == grant && !known.tainted)
    }

    fn choose_parts(&mut self) -> Vec<Part> {
        let mut parts: Vec<Part> = Vec::new();
        let wanted = [1, 1, 1, 2, 3][self.rng.usize(0..5)];
        for _ in 0..wanted {
            let taken: Vec<_> = parts.iter().map(|part| part.buffer).collect();
            let free: Vec<_> = (0..self.buffers.len())
                .filter(|i| {
                    matches!(self.buffers[*i].held, Use::Registered(_)) && !taken.contains(i)
                })
                .collect();
            let grants: Vec<_> = (0..self.grants.len())
                .filter(|i| {
                    let grant = &self.grants[*i];
                    !grant.busy && !parts.iter().any(|part| part.grant == grant.id)
                })
                .collect();
            if free.is_empty() || grants.is_empty() {
                break;
            }
            let buffer = free[self.rng.usize(0..free.len())];
            let grant = &self.grants[grants[self.rng.usize(0..grants.len())]];
            let Some(mr) = self.buffers[buffer].held.mr() else { break };
            let (ours, theirs) = (self.buffers[buffer].len, grant.content.len());
            let most = ours.min(theirs);
            // One part in three is long. The lengths of the others are even over the powers of two.
            let is_long = self.rng.u32(0..3) == 0;
            let scale = self.rng.u32(0..=if is_long { 1 } else { most.ilog2() });
            let len = most.min(1 + self.rng.usize(0..=most >> scale));
            let here = self.rng.usize(0..=ours - len);
            let there = self.rng.usize(0..=theirs - len);
            let stamp = self.shared.stamp();
            parts.push(Part { buffer, mr, here, grant: grant.id, there, len, stamp });
        }
        parts
    }

    /// Prepares the memory of a move, which owns it from now on.
    fn take_up(&mut self, op: Op, parts: &[Part]) {
        for part in parts {
            let buffer = &mut self.buffers[part.buffer];
            buffer.check(part.ours(), "before it is used");
            match op {
                Op::Write => buffer.fill(part.ours(), part.source()),
                _ => buffer.content.set(part.ours(), None),
            }
            buffer.held = Use::Flying(part.mr);
            buffer.last =
                format!("{op:?} {:x} + {:#x} at {:#x}", part.grant, part.there, part.here);
            let grants = &mut self.grants;
            if let Some(grant) = grants.iter_mut().find(|grant| grant.id == part.grant) {
                grant.busy = true;
                if op == Op::Write {
                    grant.content.set(part.theirs(), None);
                }
            }
        }
    }

    /// Cuts parts into pieces, at random.
    fn pieces(&mut self, parts: &[Part]) -> (Vec<Iov>, Vec<Advert>) {
        let (mut iovs, mut adverts) = (vec![], vec![]);
        for part in parts {
            let pieces = match self.rng.u32(0..20) {
                0..10 => 1,
                10..18 => self.rng.usize(1..10),
                _ => self.rng.usize(1..400),
            };
            let step = part.len.div_ceil(pieces);
            let Some(grant) = self.grants.iter().find(|grant| grant.id == part.grant) else {
                continue;
            };
            for at in (0..part.len).step_by(step) {
                let len = step.min(part.len - at);
                let Some(advert) = grant.advert.part((part.there + at) as u64, len as u64) else {
                    history::broken("a grant has no such part".into());
                };
                let here = part.here + at;
                iovs.push(self.buffers[part.buffer].iov(part.mr, here..here + len));
                adverts.push(advert);
            }
        }
        (iovs, adverts)
    }

    fn start(&mut self, mut new: Move) {
        let (iovs, adverts) = self.pieces(&new.parts);
        let notif = new.last.then(|| self.farewell(&new.parts[0]));
        self.note(format!("{} pieces, {new:?} ...", iovs.len()));
        let mut request = Request::new(new.conn, new.op, &iovs, &adverts);
        (request.notif, request.timeout) = (notif.as_deref(), new.timeout);
        let ep = &self.world.ep;
        let limit = new.timeout.unwrap_or(ep.config().transfer_timeout) + ep.config().timeout;
        let tried = match self.rng.u32(0..4) {
            0 => {
                let mut interrupt = RandomInterrupt(&mut self.rng);
                watch::call("run", limit, || ep.run(&request, &mut interrupt)).map(TryOutcome::Done)
            }
            1 => watch::call("try_run", limit, || ep.try_run(&request)),
            _ => watch::call("post", limit, || ep.post(&request)).map(TryOutcome::Under),
        };
        match tried {
            Ok(TryOutcome::Under(id)) => {
                self.note(format!("{id}"));
                new.id = Some(id);
                self.moves.push(new);
            }
            Ok(TryOutcome::Done(outcome)) => self.finish(new, &Ok(outcome)),
            Err(e) => self.finish(new, &Err(e)),
        }
    }

    /// The notification of the last write to a grant: it returns the grant to its owner.
    fn farewell(&self, part: &Part) -> Vec<u8> {
        let Some(grant) = self.grants.iter().find(|grant| grant.id == part.grant) else {
            return vec![];
        };
        let mut content = grant.content.clone();
        content.set(part.theirs(), Some(Pattern::data(part.stamp)));
        let (worker, id) = (self.number, part.grant);
        notifs::farewell(&ControlMessage::Return { worker, id, content: Some(content) })
    }

    /// Ends a move: its local memory is this worker's again, at once.
    fn finish(&mut self, ended: Move, result: &Result<Outcome, Error>) {
        let completion = result.as_ref().map_or_else(|e| self.judge(e), |_| Completion::Done);
        self.note(format!("{:?} of {:?}: {completion:?}, {result:?}", ended.op, ended.id));
        let counts = &self.shared.counts;
        match completion {
            Completion::Done => &counts.done,
            Completion::Refused => &counts.refused,
            _ => &counts.failed,
        }
        .fetch_add(1, SeqCst);
        let all: usize = ended.parts.iter().map(|part| part.len).sum();
        if result.as_ref().is_ok_and(|outcome| outcome.bytes != all as u64) {
            history::broken(format!("{result:?} of {all} bytes: {ended:?}"));
        }
        for part in &ended.parts {
            self.finish_part(&ended, part, completion);
        }
        if let (Completion::Refused, [part], Err(e)) = (completion, &ended.parts[..], result) {
            let (worker, id, why) = (self.number, part.grant, e.to_string());
            if let Error::RemoteAccess { .. } = e {
                history::say(&ControlMessage::Refused { worker, id, why });
            }
        }
    }

    fn finish_part(&mut self, ended: &Move, part: &Part, completion: Completion) {
        let at = self.grants.iter().position(|grant| grant.id == part.grant);
        if completion == Completion::Stuck {
            self.keep(part.buffer);
        }
        let buffer = &mut self.buffers[part.buffer];
        if ended.op == Op::Write {
            buffer.check(part.ours(), "after it was written from");
        } else if let (Completion::Done, Some(at)) = (completion, at)
            && !self.grants[at].tainted
        {
            for (range, pattern) in self.grants[at].content.known(part.theirs()) {
                let here = part.here + range.start - part.there;
                let mut read = buffer.content.clone();
                read.set(here..here + range.len(), Some(pattern.moved(here, range.start)));
                buffer.check_against(&read, here..here + range.len(), "what was read");
            }
        }
        if buffer.held == Use::Flying(part.mr) {
            buffer.held = Use::Registered(part.mr);
        }
        buffer.last = format!("{}, {completion:?} at {}", buffer.last, clock::shared_ns());
        if completion != Completion::Stuck {
            self.guard(part.buffer, part.ours());
        }
        let Some(at) = at else { return };
        let grant = &mut self.grants[at];
        grant.busy = false;
        if ended.op == Op::Write {
            let written = (completion == Completion::Done).then_some(Pattern::data(part.stamp));
            grant.content.set(part.theirs(), written);
            grant.tainted |= matches!(completion, Completion::Lost | Completion::Stuck);
        }
        match completion {
            Completion::Done if ended.last => drop(self.grants.swap_remove(at)),
            _ if ended.last => {
                self.grants[at].tainted = true;
                let grant = self.grants.swap_remove(at);
                self.say_return(grant);
            }
            _ => {}
        }
    }

    fn end_move(&mut self, at: usize, status: Result<Status, Error>) {
        let result = match status {
            Ok(Status::Pending) => return,
            Ok(Status::Done(outcome)) => Ok(outcome),
            Ok(Status::Failed(e)) | Err(e) => Err(e),
        };
        let ended = self.moves.swap_remove(at);
        self.finish(ended, &result);
    }

    /// Cancels a send or receive and a move, if there are some.
    pub(super) fn cancel(&mut self) {
        self.cancel_send_recv();
        if self.moves.is_empty() {
            return;
        }
        let at = self.rng.usize(0..self.moves.len());
        let Some(id) = self.moves[at].id else { return };
        self.note(format!("cancel {id} ..."));
        let ep = &self.world.ep;
        let status = watch::call("cancel", ep.config().timeout, || ep.cancel(id));
        if matches!(status, Ok(Status::Pending)) {
            history::broken(format!("{id} was cancelled and is unfinished"));
        }
        self.end_move(at, status);
    }

    /// Waits a little for a move.
    pub(super) fn wait(&mut self) {
        if self.moves.is_empty() {
            return;
        }
        let at = self.rng.usize(0..self.moves.len());
        let Some(id) = self.moves[at].id else { return };
        let time = Duration::from_micros(self.rng.u64(0..20_000));
        let ep = &self.world.ep;
        let status =
            watch::call("wait", time, || ep.wait(id, Some(time), &mut uccl_p2p::NoInterrupt));
        self.end_move(at, status);
    }

    /// Polls a send or receive and a move, and reports those that are past their time.
    pub(super) fn look(&mut self) {
        self.look_at_send_recvs();
        if !self.moves.is_empty() {
            let at = self.rng.usize(0..self.moves.len());
            if let Some(id) = self.moves[at].id {
                let status = watch::call("poll", Duration::ZERO, || self.world.ep.poll(id));
                self.end_move(at, status);
            }
        }
        let now = clock::active();
        if let Some(late) = self.moves.iter().find(|known| known.until < now) {
            history::broken(format!("it does not end: {late:?}"));
        }
    }

    /// Ends the moves, sends and receives of a deregistered buffer. None of them may be pending.
    pub(super) fn end_all_that_use(&mut self, buffer: usize) {
        let uses = |known: &Move| known.parts.iter().any(|part| part.buffer == buffer);
        while let Some(at) = self.moves.iter().position(uses) {
            self.must_have_ended(at, "its region was deregistered");
        }
        self.end_send_recvs_that_use(buffer);
    }

    pub(super) fn end_all(&mut self, why: &str) {
        while !self.moves.is_empty() {
            self.must_have_ended(0, why);
        }
        self.end_all_send_recvs(why);
    }

    fn must_have_ended(&mut self, at: usize, why: &str) {
        let Some(id) = self.moves[at].id else { return };
        let status = self.world.ep.poll(id);
        if matches!(status, Ok(Status::Pending)) {
            history::broken(format!("{why}, and it has not ended: {:?}", self.moves[at]));
        }
        self.end_move(at, status);
    }
}
