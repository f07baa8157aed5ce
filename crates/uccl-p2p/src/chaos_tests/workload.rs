//! Random transfers between two endpoints, and the checks of their results.

use std::{
    collections::HashMap,
    sync::atomic::{
        AtomicU32, AtomicU64,
        Ordering::{Acquire, Relaxed},
    },
    time::{Duration, Instant},
};

use fastrand::Rng;
use uccl_device::cuda::GpuError;

use super::world::{FAR, Memory, Side};
use crate::{
    Change, Error, MrId, NoInterrupt, Op, Request, Signal, Status, TransferId,
    drive::{core::connection::deferred_transfers::Mark, pair::post_behind},
};

/// The disturbances beside posting and waiting.
#[derive(Clone, Copy, Default)]
pub(super) struct Plan {
    pub(super) steps: usize,
    pub(super) cancels: bool,
    pub(super) deadlines: bool,
    pub(super) revokes: bool,
    /// Some transfers wait for a stream first.
    pub(super) streams: bool,
    /// The connection may be lost: then every transfer still ends, and errors name the loss.
    pub(super) loss: bool,
}

/// A transfer, and the caller's steps for it.
struct PostedTransfer {
    by: usize,
    id: TransferId,
    deadline: bool,
    cancelled: bool,
    end: Option<Result<u64, Error>>,
}

/// A stream that reaches a mark after this number of looks.
struct Countdown(AtomicU32);

impl Mark for Countdown {
    fn is_reached(&self) -> Result<bool, GpuError> {
        let left = self.0.load(Relaxed);
        self.0.store(left.saturating_sub(1), Relaxed);
        Ok(left == 0)
    }
}

/// A read or a write.
struct Job {
    posted: PostedTransfer,
    source: Memory,
    dest: Memory,
    /// The region of the peer's memory, until it is deregistered.
    remote: Option<MrId>,
    local: Option<MrId>,
    revoked: bool,
    op: Op,
    notif: Option<u64>,
    /// The word that the signal of a write adds one to.
    word: Option<Word>,
    reused: bool,
}

/// A word at the peer, and its region.
struct Word {
    memory: Box<AtomicU64>,
    mr: Option<MrId>,
}

impl Word {
    fn on(side: &Side) -> Self {
        let memory = Box::new(AtomicU64::new(0));
        // SAFETY: an atomic, which stays until the endpoint has been closed.
        let mr = unsafe { side.ep.register(memory.as_ptr() as usize, 8) };
        Self { memory, mr: Some(mr.expect("registered")) }
    }

    fn signal(&self, side: &Side) -> Signal {
        let mr = self.mr.expect("registered");
        let advert = side.ep.advertise(mr, self.memory.as_ptr() as usize, 8);
        let advert = advert.expect("advertised");
        Signal { advert, change: Change::Add(1), strong: false }
    }

    fn is_signalled(&self) -> bool {
        let times = self.memory.load(Acquire);
        assert!(times <= 1, "a signal was applied {times} times");
        times == 1
    }
}

/// A send or a receive.
struct Half {
    posted: PostedTransfer,
    memory: Memory,
    mr: Option<MrId>,
    number: u64,
}

pub(super) struct Workload {
    pub(super) sides: [Side; 2],
    rng: Rng,
    plan: Plan,
    jobs: Vec<Job>,
    sends: Vec<Half>,
    recvs: Vec<Half>,
    notifs: Vec<(PostedTransfer, u64)>,
    /// Numbers of the notifications that each side has taken, in order.
    taken: [Vec<u64>; 2],
    numbers: u64,
    /// Capacities of all receives.
    shape: Vec<usize>,
    longest: usize,
}

fn notif_of(number: u64) -> Vec<u8> {
    let len = match number % 7 {
        0 => 70_000 + number as usize % 1000,
        n => n as usize * 20,
    };
    let mut payload = number.to_le_bytes().to_vec();
    payload.extend((0..len).map(|i| (i as u64 ^ number) as u8));
    payload
}

impl Workload {
    /// `longest` is about the most bytes that one transfer moves: slow lanes get little to do.
    pub(super) fn new(seed: u64, sides: [Side; 2], plan: Plan, longest: usize) -> Self {
        let mut rng = Rng::with_seed(seed ^ 0xbb67_ae85);
        let shape = (0..rng.usize(1..4))
            .map(|_| [100, 9000, longest.min(300_000)][rng.usize(0..3)])
            .collect();
        Self {
            sides,
            rng,
            plan,
            jobs: Vec::new(),
            sends: Vec::new(),
            recvs: Vec::new(),
            notifs: Vec::new(),
            taken: [Vec::new(), Vec::new()],
            numbers: 0,
            shape,
            longest,
        }
    }

    /// Makes all steps, and calls `event` before each; at the end no transfer is unfinished.
    pub(super) fn run(&mut self, mut event: impl FnMut(usize, &[Side; 2])) {
        for step in 0..self.plan.steps {
            event(step, &self.sides);
            match self.rng.usize(0..12) {
                0..5 => self.post_job(),
                5..7 => self.post_pair(),
                7..9 => self.post_notif(),
                9 if self.plan.cancels => self.cancel_one(),
                10 if self.plan.revokes => self.revoke_one(),
                _ => std::thread::sleep(Duration::from_micros(self.rng.u64(0..300))),
            }
            if self.rng.bool() {
                self.look();
            }
        }
        self.finish();
    }

    fn request<'a>(&mut self, by: usize, op: Op) -> Request<'a> {
        let short = self.plan.deadlines && self.rng.u8(0..6) == 0;
        let timeout = short.then(|| Duration::from_millis(self.rng.u64(1..40)));
        Request { timeout, ..Request::new(self.sides[by].conn, op, &[], &[]) }
    }

    fn post(&mut self, by: usize, request: &Request<'_>) -> Option<PostedTransfer> {
        let after = (self.plan.streams && self.rng.u8(0..3) == 0).then(|| self.mark());
        match post_behind(&self.sides[by].ep, request, after) {
            Ok(transfer) => {
                let deadline = request.timeout.is_some();
                Some(PostedTransfer { by, id: transfer.id, deadline, cancelled: false, end: None })
            }
            Err(e) => {
                self.assert_lost(by, &e);
                None
            }
        }
    }

    /// The only reason for a call to fail is the end of the connection, which names the peer.
    fn assert_lost(&self, by: usize, e: &Error) {
        let peer = ["peer-b", "peer-a"][by];
        assert!(self.plan.loss, "{e}");
        assert!(matches!(e, Error::ConnectionLost { .. }) && e.to_string().contains(peer), "{e}");
    }

    fn lens(&mut self) -> Vec<usize> {
        let count = [1, 1, 2, 5, 40][self.rng.usize(0..5)];
        let longest = self.longest / count;
        let some = |rng: &mut Rng| match rng.u8(0..10) {
            0 => 0,
            1..8 => rng.usize(1..longest / 10),
            _ => rng.usize(1..longest),
        };
        (0..count).map(|_| some(&mut self.rng)).collect()
    }

    fn post_job(&mut self) {
        let by = self.rng.usize(0..2);
        let op = if self.rng.bool() { Op::Read } else { Op::Write };
        let lens = self.lens();
        let source = Memory::new(&mut self.rng, &lens);
        let dest = Memory::new(&mut self.rng, &lens);
        let (local, remote) = if op == Op::Read { (&dest, &source) } else { (&source, &dest) };
        let local_mr = self.sides[by].register(local);
        let remote_mr = self.sides[1 - by].register(remote);
        let iovs = local.iovs(local_mr);
        let adverts = remote.adverts(&self.sides[1 - by], remote_mr);
        let notif = (self.rng.u8(0..4) == 0).then(|| self.number());
        let payload = notif.map(notif_of);
        let is_signalled = op == Op::Write && self.rng.bool();
        let mut word = is_signalled.then(|| Word::on(&self.sides[1 - by]));
        let request = Request {
            signal: word.as_ref().map(|word| word.signal(&self.sides[1 - by])),
            iovs: &iovs,
            adverts: &adverts,
            notif: payload.as_deref(),
            ..self.request(by, op)
        };
        let posted = self.post(by, &request);
        let (local, remote) = (Some(local_mr), Some(remote_mr));
        if let Some(posted) = posted {
            let (revoked, reused) = (false, false);
            self.jobs.push(Job {
                posted,
                source,
                dest,
                remote,
                local,
                revoked,
                op,
                notif,
                word,
                reused,
            });
        } else {
            let mr = word.as_mut().and_then(|word| word.mr.take());
            mr.into_iter().for_each(|mr| self.sides[1 - by].ep.deregister(mr).expect("unused"));
            word.into_iter().for_each(|word| assert!(!word.is_signalled(), "it was refused"));
            self.sides[by].ep.deregister(local_mr).expect("unused");
            self.sides[1 - by].ep.deregister(remote_mr).expect("unused");
        }
    }

    fn mark(&mut self) -> Box<dyn Mark> {
        Box::new(Countdown(AtomicU32::new(self.rng.u32(0..2000))))
    }

    fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    /// A send, and a receive for it.
    fn post_pair(&mut self) {
        let by = self.rng.usize(0..2);
        let send_first = self.rng.bool();
        for send in [send_first, !send_first] {
            let (by, op) = if send { (by, Op::Send) } else { (1 - by, Op::Recv) };
            let shape = self.shape.clone();
            let lens: Vec<_> =
                shape.iter().map(|&c| if send { self.rng.usize(8..=c) } else { c }).collect();
            let mut memory = Memory::new(&mut self.rng, &lens);
            let number = self.number();
            memory.number(number);
            let mr = self.sides[by].register(&memory);
            let iovs = memory.iovs(mr);
            let request = Request { iovs: &iovs, ..self.request(by, op) };
            match self.post(by, &request) {
                None => self.sides[by].ep.deregister(mr).expect("unused"),
                Some(posted) => {
                    let half = Half { posted, memory, mr: Some(mr), number };
                    if send { &mut self.sends } else { &mut self.recvs }.push(half);
                }
            }
        }
    }

    fn post_notif(&mut self) {
        let by = self.rng.usize(0..2);
        let number = self.number();
        let conn = self.sides[by].conn;
        match self.sides[by].ep.send_notif(conn, notif_of(number), None) {
            Ok(id) => {
                let posted =
                    PostedTransfer { by, id, deadline: false, cancelled: false, end: None };
                self.notifs.push((posted, number));
            }
            Err(e) => self.assert_lost(by, &e),
        }
    }

    fn all_posted(&mut self) -> impl Iterator<Item = &mut PostedTransfer> {
        let jobs = self.jobs.iter_mut().map(|job| &mut job.posted);
        let halves = self.sends.iter_mut().chain(&mut self.recvs).map(|half| &mut half.posted);
        jobs.chain(halves).chain(self.notifs.iter_mut().map(|notif| &mut notif.0))
    }

    fn cancel_one(&mut self) {
        let open = self.all_posted().filter(|posted| posted.end.is_none()).count();
        if open == 0 {
            return;
        }
        let at = self.rng.usize(0..open);
        let eps = [0, 1].map(|by| self.sides[by].ep.clone());
        if let Some(posted) = self.all_posted().filter(|posted| posted.end.is_none()).nth(at) {
            posted.cancelled = true;
            let status = eps[posted.by].cancel(posted.id).expect("it is known");
            assert!(!matches!(status, Status::Pending), "a cancelled transfer has ended");
            posted.note(status);
        }
        self.look();
    }

    /// Deregisters the peer's memory of a random unfinished job.
    fn revoke_one(&mut self) {
        let open: Vec<_> = (0..self.jobs.len())
            .filter(|i| self.jobs[*i].posted.end.is_none() && !self.jobs[*i].revoked)
            .collect();
        let Some(&i) = open.get(self.rng.usize(0..open.len().max(1))) else { return };
        let job = &mut self.jobs[i];
        let Some(mr) = job.remote.take() else { return };
        self.sides[1 - job.posted.by].ep.deregister(mr).expect("deregistered");
        job.revoked = true;
        if job.op == Op::Write {
            assert!(job.dest.guards_hold());
            job.dest.reuse(&mut self.rng);
            job.reused = true;
        }
    }

    fn look(&mut self) {
        for side in 0..2 {
            for notif in self.sides[side].ep.take_notifs().expect("ours") {
                let number = notif.payload.first_chunk().copied().map(u64::from_le_bytes);
                let number = number.expect("a number");
                assert!(notif.payload == notif_of(number), "a notification is as it was sent");
                assert!(!self.taken[side].contains(&number), "notification {number} came twice");
                self.taken[side].push(number);
                self.data_is_there(number);
            }
        }
        self.signals_stand_for_bytes();
        let eps = [0, 1].map(|by| self.sides[by].ep.clone());
        for posted in self.all_posted().filter(|posted| posted.end.is_none()) {
            posted.note(eps[posted.by].poll(posted.id).expect("it is known"));
        }
        for i in 0..self.jobs.len() {
            self.judge(i);
        }
    }

    /// A notification arrives after the data that it follows.
    fn data_is_there(&self, number: u64) {
        if let Some(job) = self.jobs.iter().find(|job| job.notif == Some(number) && !job.reused) {
            assert!(
                job.dest.pieces() == job.source.pieces(),
                "a notification came before its data"
            );
        }
    }

    /// A signal comes after the bytes that it stands for, and once.
    fn signals_stand_for_bytes(&self) {
        for job in self.jobs.iter().filter(|job| !job.reused) {
            if job.word.as_ref().is_some_and(Word::is_signalled) {
                assert!(job.dest.pieces() == job.source.pieces(), "a signal came before its bytes");
            }
        }
    }

    /// A signalled write has ended well, and a write that has ended well is signalled. Where only
    /// the notification behind it failed, or the connection was lost, the signal may be missing or
    /// there.
    fn check_signals(&self) {
        for job in &self.jobs {
            let Some(word) = &job.word else { continue };
            let end = job.posted.end.as_ref().expect("it has ended");
            match end {
                Ok(_) => assert!(word.is_signalled(), "a write was not signalled"),
                Err(Error::ConnectionLost { .. }) => assert!(self.plan.loss),
                Err(_) if job.notif.is_some() => {}
                Err(e) => assert!(!word.is_signalled(), "signalled, and ended with {e}"),
            }
        }
    }

    /// Checks a job that has ended, and then reuses its memory.
    fn judge(&mut self, i: usize) {
        let (plan, taken) = (self.plan, &self.taken);
        let job = &mut self.jobs[i];
        let Some(end) = job.posted.end.clone().filter(|_| !job.reused) else { return };
        let by = job.posted.by;
        match end {
            Ok(bytes) => {
                if job.notif.is_some_and(|number| !taken[1 - by].contains(&number)) {
                    return;
                }
                assert_eq!(bytes, job.source.pieces().concat().len() as u64);
                assert!(job.dest.pieces() == job.source.pieces(), "other bytes arrived");
            }
            Err(Error::RemoteAccess { .. }) => assert!(job.revoked),
            Err(Error::ConnectionLost { .. }) => {
                assert!(plan.loss, "{:?}", job.posted.end);
                // Written bytes are in the hands of the peer's side, which may take a while to
                // notice.
                if job.op == Op::Write {
                    return;
                }
            }
            Err(_) => {}
        }
        assert!(job.dest.guards_hold(), "a byte beside the pieces was touched");
        job.dest.reuse(&mut self.rng);
        job.reused = true;
    }

    fn finish(&mut self) {
        let begun = Instant::now();
        let mut helped = false;
        while self.all_posted().any(|posted| posted.end.is_none()) {
            assert!(begun.elapsed() < FAR, "a transfer hangs");
            self.look();
            std::thread::sleep(Duration::from_micros(200));
            // The partner of a send or receive that was called off waits for ever: cancel it, too.
            let lonely = self.plan.cancels || self.plan.deadlines;
            if lonely && !helped && begun.elapsed() > Duration::from_millis(20) {
                helped = true;
                self.cancel_halves();
            }
        }
        self.look();
        self.check_reasons();
        self.check_signals();
        self.check_notifs();
        self.check_halves();
    }

    fn cancel_halves(&mut self) {
        let eps = [0, 1].map(|by| self.sides[by].ep.clone());
        for half in self.sends.iter_mut().chain(&mut self.recvs) {
            if half.posted.end.is_none() {
                half.posted.cancelled = true;
                half.posted.note(eps[half.posted.by].cancel(half.posted.id).expect("known"));
            }
        }
    }

    /// A transfer fails only for a reason that the plan gives it.
    fn check_reasons(&mut self) {
        let plan = self.plan;
        let revoked: Vec<_> =
            self.jobs.iter().filter(|job| job.revoked).map(|j| j.posted.id).collect();
        let mut lost = Vec::new();
        for posted in self.all_posted() {
            match posted.end.clone().expect("it has ended") {
                Ok(_) => {}
                Err(Error::Cancelled { .. }) => assert!(plan.cancels || plan.deadlines),
                Err(Error::DeadlineExceeded { .. }) => assert!(posted.deadline),
                Err(Error::RemoteAccess { .. }) => assert!(revoked.contains(&posted.id)),
                Err(e) => lost.push((posted.by, e)),
            }
        }
        lost.iter().for_each(|(by, e)| self.assert_lost(*by, e));
    }

    /// Checks that plain notifications arrive in order, and that no notification of a successful
    /// transfer is lost.
    fn check_notifs(&self) {
        for side in 0..2 {
            let taken = &self.taken[side];
            let own: Vec<u64> =
                self.notifs.iter().filter(|n| n.0.by != side).map(|n| n.1).collect();
            let arrived: Vec<u64> = taken.iter().copied().filter(|n| own.contains(n)).collect();
            assert!(arrived.is_sorted(), "out of order: {arrived:?}");
        }
        let own = self.notifs.iter().map(|(posted, number)| (posted, *number));
        let following = self.jobs.iter().filter_map(|job| Some((&job.posted, job.notif?)));
        for (posted, number) in own.chain(following) {
            if matches!(posted.end, Some(Ok(_))) {
                assert!(
                    self.taken[1 - posted.by].contains(&number),
                    "notification {number} is lost"
                );
            }
        }
    }

    /// Each receive has the bytes of one send, in order, and no send is received twice.
    fn check_halves(&self) {
        let done = |half: &&Half| matches!(half.posted.end, Some(Ok(_)));
        for by in 0..2 {
            let sends: HashMap<u64, &Half> = (self.sends.iter().filter(|s| s.posted.by == by))
                .map(|send| (send.number, send))
                .collect();
            let mut received = Vec::new();
            for recv in self.recvs.iter().filter(|recv| recv.posted.by != by).filter(done) {
                let pieces = recv.memory.pieces();
                let number = u64::from_le_bytes(*pieces[0].first_chunk().expect("a number"));
                let sent = sends[&number].memory.pieces();
                assert!(pieces.iter().zip(&sent).all(|(got, sent)| got.starts_with(sent)));
                let bytes = sent.concat().len() as u64;
                assert!(matches!(recv.posted.end, Some(Ok(n)) if n == bytes));
                assert!(recv.memory.guards_hold());
                received.push(number);
            }
            assert!(received.is_sorted_by(|a, b| a < b), "out of order: {received:?}");
            if !self.plan.loss {
                let mut sent: Vec<u64> =
                    sends.values().copied().filter(done).map(|s| s.number).collect();
                sent.sort_unstable();
                assert_eq!(sent, received);
            }
        }
    }

    /// Ends both sides; no byte may have landed in memory that was reused before.
    pub(super) fn leave(mut self) {
        if self.plan.loss {
            // Both ends of the connection are lost: no byte moves from now on.
            for side in &self.sides {
                side.until("the end of a lost connection", || {
                    side.ep.check_connection(side.conn).is_err()
                });
            }
            for job in self.jobs.iter_mut().filter(|job| !job.reused) {
                job.dest.reuse(&mut self.rng);
                job.reused = true;
            }
        }
        for job in &mut self.jobs {
            let by = job.posted.by;
            for (side, mr) in [(by, job.local.take()), (1 - by, job.remote.take())] {
                mr.into_iter().for_each(|mr| self.sides[side].ep.deregister(mr).expect("unused"));
            }
            let word = job.word.as_mut().and_then(|word| word.mr.take());
            word.into_iter().for_each(|mr| self.sides[1 - by].ep.deregister(mr).expect("unused"));
        }
        for half in self.sends.iter_mut().chain(&mut self.recvs) {
            let mr = half.mr.take().expect("once");
            self.sides[half.posted.by].ep.deregister(mr).expect("unused");
        }
        for side in &mut self.sides {
            assert_eq!(side.ep.stats().expect("ours").regions, 0);
            side.leave();
        }
        // No signal has come late either.
        if !self.plan.loss {
            self.check_signals();
        }
        for job in &self.jobs {
            assert!(job.reused && job.dest.unchanged(), "a byte landed after the end");
        }
    }
}

impl PostedTransfer {
    fn note(&mut self, status: Status) {
        match status {
            Status::Pending => {}
            Status::Done(outcome) => self.end = Some(Ok(outcome.bytes)),
            Status::Failed(e) => self.end = Some(Err(e)),
        }
    }
}

/// Runs one plain transfer, and waits for its end.
pub(super) fn move_one(sides: &[Side; 2], rng: &mut Rng, op: Op, len: usize) -> Result<(), Error> {
    let source = Memory::new(rng, &[len]);
    let dest = Memory::new(rng, &[len]);
    let (local, remote) = if op == Op::Read { (&dest, &source) } else { (&source, &dest) };
    let (mr, there) = (sides[0].register(local), sides[1].register(remote));
    let (iovs, adverts) = (local.iovs(mr), remote.adverts(&sides[1], there));
    let conn = sides[0].conn;
    let request = Request::new(conn, op, &iovs, &adverts);
    let ended = sides[0].ep.run(&request, &mut NoInterrupt);
    sides[0].ep.deregister(mr).expect("unused");
    sides[1].ep.deregister(there).expect("unused");
    if ended.is_ok() {
        assert!(source.pieces() == dest.pieces() && dest.guards_hold());
    }
    // The memory outlives both connections.
    std::mem::forget((source, dest));
    ended.map(drop)
}
