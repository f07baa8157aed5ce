//! Random operations in both directions over pipes with random faults, checked against both
//! memories.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use fastrand::Rng;
use uccl_chaos::{Faults, GpuFaults, each_seed};
use uccl_device::MemoryKind;
use uccl_fabric::lane::{Lane, LaneError, MessageLane, OpError, OpKind, OpName};
use uccl_fabric::region::{Region, Rights};
use uccl_wire::frame::{MAX_DESCS, Status};

use support::{Patch, ResultAndCopy, Side, run_until, sides_with_gpus};

/// An operation with its memory and its result.
struct Job {
    by: usize,
    kind: OpKind,
    source: Patch,
    dest: Patch,
    /// The remote memory, registered once or twice.
    regions: Vec<Region>,
    refusal: Option<Status>,
    name: OpName,
    done: Arc<ResultAndCopy>,
    cancelled: bool,
    /// Contents of the destination when the region's revocation returned.
    revoked: Option<Vec<u8>>,
}

/// The options of a run.
struct Plan {
    steps: usize,
    /// Some operations name memory that they may not touch.
    refusals: bool,
    cancels: bool,
    revokes: bool,
}

struct World {
    rng: Rng,
    sides: [Side; 2],
    jobs: Vec<Job>,
    /// The longest transfer, so that slow pipes are done in time.
    longest: usize,
    sent: [Vec<Vec<u8>>; 2],
}

fn some_len(rng: &mut Rng) -> usize {
    match rng.u32(0..40) {
        0 => 0,
        1..=8 => rng.usize(1..300),
        9..=18 => rng.usize(2040..2060),
        19..=37 => rng.usize(3000..90_000),
        38 => rng.usize(0..1 << 20),
        _ => rng.usize(4 << 20..6 << 20),
    }
}

/// Cuts `len` bytes into pieces, some of them empty.
fn cut(rng: &mut Rng, len: usize, most: usize) -> Vec<usize> {
    let pieces = match rng.u32(0..10) {
        0..=4 => 1,
        5..=7 => rng.usize(1..8),
        _ => rng.usize(1..=most),
    };
    let mut at: Vec<usize> = (1..pieces).map(|_| rng.usize(0..=len)).collect();
    if pieces > 2 && rng.bool() {
        at[0] = at[pieces - 2];
    }
    at.extend([0, len]);
    at.sort_unstable();
    at.windows(2).map(|ends| ends[1] - ends[0]).collect()
}

impl World {
    fn new(seed: u64, faults: [Faults; 2], checksum: [bool; 2]) -> Self {
        let mut rng = Rng::with_seed(seed ^ 0x6B0);
        let delay_polls = [0, 3, 40][rng.usize(0..3)];
        let gpus = [0, 1].map(|i| GpuFaults { delay_polls, seed: seed + i, ..Default::default() });
        Self::with_gpus(seed, faults, checksum, gpus)
    }

    fn with_gpus(
        seed: u64,
        faults: [Faults; 2],
        checksum: [bool; 2],
        gpus: [GpuFaults; 2],
    ) -> Self {
        let step = faults.each_ref().map(|faults| faults.capacity_bytes.min(faults.split_bytes));
        let longest = step[0].min(step[1]).saturating_mul(20);
        let sides = sides_with_gpus(seed, faults, checksum, gpus);
        Self {
            rng: Rng::with_seed(seed),
            sides,
            jobs: Vec::new(),
            longest,
            sent: Default::default(),
        }
    }

    fn post(&mut self, refusals: bool) -> Result<(), LaneError> {
        let rng = &mut self.rng;
        let by = rng.usize(0..2);
        let kind = if rng.bool() { OpKind::Read } else { OpKind::Write };
        let len = some_len(rng).min(self.longest);
        let local = cut(rng, len, 3000);
        let local = Patch::new(rng, &local);
        let remote = cut(rng, len, MAX_DESCS);
        let remote = Patch::new(rng, &remote);
        let (right, wrong) = match kind {
            OpKind::Read => (Rights::READ, Rights::WRITE),
            OpKind::Write => (Rights::WRITE, Rights::READ),
        };
        let refusal = match rng.u32(0..30) {
            0 if refusals => Some(Status::UnknownKey),
            1 if refusals => Some(Status::Denied),
            2 if refusals => Some(Status::OutOfBounds),
            _ => None,
        };
        let rights = if refusal == Some(Status::Denied) { wrong } else { right };
        let kinds = (0..rng.usize(1..3)).map(|_| some_kind(rng));
        let owner = &self.sides[1 - by];
        let regions: Vec<_> =
            kinds.map(|kind| owner.register_as(kind, remote.whole(), rights)).collect();
        let mut pieces = remote.remote(&regions[0]);
        for piece in pieces.iter_mut() {
            let Region { slot, key, .. } = regions[rng.usize(0..regions.len())];
            (piece.slot, piece.key) = (slot, key);
        }
        let unlucky = rng.usize(0..pieces.len());
        match refusal {
            Some(Status::UnknownKey) => pieces[unlucky].key ^= 1 << rng.u32(0..64),
            Some(Status::OutOfBounds) => pieces[unlucky].addr += 1 << rng.u32(30..60),
            _ => {}
        }
        let dest = if kind == OpKind::Read { &local } else { &remote };
        let done = ResultAndCopy::watching(dest.whole());
        let memory = some_kind(rng);
        let name = self.sides[by].post_from(memory, kind, local.spans(), pieces, &done)?;
        let (source, dest) = if kind == OpKind::Read { (remote, local) } else { (local, remote) };
        self.jobs.push(Job {
            by,
            kind,
            source,
            dest,
            regions,
            refusal,
            name,
            done,
            cancelled: false,
            revoked: None,
        });
        Ok(())
    }

    fn message(&mut self) -> Result<(), LaneError> {
        let by = self.rng.usize(0..2);
        let len =
            if self.rng.bool() { self.rng.usize(0..200) } else { self.rng.usize(0..=64 << 10) };
        let mut bytes = vec![0; len];
        self.rng.fill(&mut bytes);
        let (a, b) = bytes.split_at(self.rng.usize(0..=len));
        self.sides[by].lane.send(&[a, &[], b])?;
        self.sent[by].push(bytes);
        Ok(())
    }

    /// One of the jobs; likelier a young one.
    fn some_job(&mut self) -> Option<usize> {
        let young = self.jobs.len().min(8);
        (young > 0).then(|| self.jobs.len() - 1 - self.rng.usize(0..young))
    }

    fn cancel(&mut self) {
        let Some(i) = self.some_job() else { return };
        let job = &mut self.jobs[i];
        job.cancelled |= job.done.result().is_none();
        self.sides[job.by].lane.cancel(job.name);
    }

    fn revoke(&mut self) {
        let Some(i) = self.some_job() else { return };
        let job = &mut self.jobs[i];
        if job.revoked.is_some() {
            return;
        }
        let owner = &self.sides[1 - job.by];
        for Region { slot, key, .. } in &job.regions {
            let revoked = owner.regions.revoke(*slot, *key).expect("registered");
            while owner.lane.touched_by_peer(*slot) {}
            drop(revoked);
        }
        job.revoked = Some(job.dest.now());
        if job.kind == OpKind::Read {
            job.source.scribble(&mut self.rng);
        }
    }

    fn step(&mut self, plan: &Plan) -> Result<(), LaneError> {
        match self.rng.u32(0..100) {
            0..30 => self.post(plan.refusals),
            30..40 => self.message(),
            40..43 if plan.cancels => {
                self.cancel();
                Ok(())
            }
            43..46 if plan.revokes => {
                self.revoke();
                Ok(())
            }
            46..48 => self.sides[self.rng.usize(0..2)].lane.ping(),
            _ => self.sides[self.rng.usize(0..2)].progress().map(|_| ()),
        }
    }

    fn all_done(&self) -> bool {
        let heard = |by: usize| self.sides[1 - by].inbox.0.lock().len() == self.sent[by].len();
        self.jobs.iter().all(|job| job.done.result().is_some()) && heard(0) && heard(1)
    }

    fn run(&mut self, plan: &Plan) -> Result<(), LaneError> {
        for _ in 0..plan.steps {
            self.step(plan)?;
        }
        run_until(&self.sides, || self.all_done())?;
        // Late data would come now.
        for _ in 0..50 {
            self.sides[0].progress()?;
            self.sides[1].progress()?;
        }
        Ok(())
    }

    fn kill(&self) {
        self.sides.iter().for_each(|side| side.lane.kill());
    }

    /// Checks the properties that hold under all faults.
    fn check_always(&self) {
        for job in &self.jobs {
            let result = job.done.result().expect("every operation ends");
            job.dest.assert_guards();
            let landed = job.dest.now();
            if let Some(held) = &job.revoked {
                assert!(job.kind == OpKind::Read || landed == *held, "landed after the revocation");
            }
            if result != Err(OpError::LaneDown) || job.kind == OpKind::Read {
                assert!(landed == job.done.held(), "landed after the end: {result:?}");
            }
            if result == Ok(()) {
                let sent = job.source.pieces_of(&job.source.before);
                assert!(job.dest.pieces_of(&landed) == sent, "another thing landed");
                assert_eq!(job.refusal, None, "what is refused does not succeed");
            }
            if job.refusal.is_some() {
                assert!(landed == job.dest.before, "what is refused changes nothing");
            }
        }
        for by in [0, 1] {
            let heard = self.sides[1 - by].inbox.0.lock();
            assert!(self.sent[by].starts_with(&heard), "messages arrive whole and in order");
        }
    }

    /// Checks the results that hold when nothing was corrupted and the lane lives.
    fn check_results(&self) {
        for job in &self.jobs {
            let result = job.done.result().expect("every operation ends");
            let expected = match (result.clone(), job.refusal) {
                (Ok(()), None) => true,
                (Err(OpError::Remote(status)), Some(refusal)) if status == refusal => true,
                (Err(OpError::Remote(Status::UnknownKey)), _) => job.revoked.is_some(),
                (Err(OpError::Cancelled), _) => job.cancelled,
                _ => false,
            };
            assert!(expected, "{:?} refused {:?}: {result:?}", job.kind, job.refusal);
        }
    }
}

fn some_kind(rng: &mut Rng) -> MemoryKind {
    match rng.u32(0..5) {
        0 => MemoryKind::Cuda { device: 0 },
        1 => MemoryKind::Cuda { device: 1 },
        _ => MemoryKind::Host,
    }
}

fn some_faults(rng: &mut Rng) -> Faults {
    Faults {
        capacity_bytes: [1000, 64 << 10, 256 << 10, 16 << 20][rng.usize(0..4)],
        split_bytes: [700, 10_000, 100_000, usize::MAX][rng.usize(0..4)],
        delay_polls: [0, 0, 3][rng.usize(0..3)],
        delay: Duration::from_micros([0, 0, 20][rng.usize(0..3)]),
        ..Faults::default()
    }
}

#[test]
fn operations_end_once_and_move_the_right_bytes() {
    each_seed(|seed| {
        let mut rng = Rng::with_seed(!seed);
        let faults = [some_faults(&mut rng), some_faults(&mut rng)];
        let mut world = World::new(seed, faults, [rng.bool(), rng.bool()]);
        let plan = Plan {
            steps: rng.usize(1..150),
            refusals: rng.bool(),
            cancels: rng.bool(),
            revokes: rng.bool(),
        };
        world.run(&plan).expect("both live");
        world.check_always();
        world.check_results();
        world.kill();
    });
}

#[test]
fn a_cut_ends_everything() {
    each_seed(|seed| {
        let mut rng = Rng::with_seed(!seed);
        let mut faults = [some_faults(&mut rng), some_faults(&mut rng)];
        let after = 1 << rng.u32(3..24);
        faults[rng.usize(0..2)].cut_after = Some(rng.u64(0..after));
        let mut world = World::new(seed, faults, [rng.bool(), rng.bool()]);
        let plan = Plan { steps: 100, refusals: true, cancels: rng.bool(), revokes: rng.bool() };
        if world.run(&plan).is_ok() {
            return;
        }
        world.kill();
        world.check_always();
        let before: Vec<_> = world.jobs.iter().map(|job| job.dest.now()).collect();
        for side in &world.sides {
            assert!(side.progress().is_err() && side.lane.send(&[b"x"]).is_err());
        }
        assert!(world.post(false).is_err());
        assert!(world.jobs.iter().zip(before).all(|(job, before)| job.dest.now() == before));
    });
}

#[test]
fn a_corrupted_byte_is_reported() {
    each_seed(|seed| {
        let mut rng = Rng::with_seed(!seed);
        let mut faults = [some_faults(&mut rng), some_faults(&mut rng)];
        let (by, range) = (rng.usize(0..2), 1 << rng.u32(4..22));
        let at = rng.u64(0..range);
        faults[by].corrupt_at = Some(at);
        let mut world = World::new(seed, faults, [true, true]);
        let plan = Plan { steps: 100, refusals: false, cancels: false, revokes: false };
        let end = world.run(&plan);
        world.kill();
        world.check_always();
        let failed = |job: &Job| job.done.result() != Some(Ok(()));
        let met = world.sides[by].lane.pipe().sent() > at;
        assert_eq!(end.is_err() || world.jobs.iter().any(failed), met, "byte {at} of {by}");
    });
}

#[test]
fn a_failed_copy_fails_its_operation() {
    each_seed(|seed| {
        let mut rng = Rng::with_seed(!seed);
        let faults = [some_faults(&mut rng), some_faults(&mut rng)];
        let fail_at = Some(rng.u64(0..20));
        let gpu = GpuFaults { delay_polls: rng.u32(0..20), fail_at, seed };
        let mut gpus = [GpuFaults::default(), GpuFaults::default()];
        gpus[rng.usize(0..2)] = gpu;
        let mut world = World::with_gpus(seed, faults, [rng.bool(), rng.bool()], gpus);
        let plan = Plan { steps: 150, refusals: false, cancels: false, revokes: false };
        world.run(&plan).expect("both live");
        world.kill();
        world.check_always();
        let results: Vec<_> =
            world.jobs.iter().filter_map(|job| job.done.result()?.err()).collect();
        let right = |e: &OpError| matches!(e, OpError::Gpu(_) | OpError::Remote(Status::Fault));
        assert!(results.iter().all(right), "{results:?}");
        // One copy of each half of the lane at most.
        assert!(results.len() <= 2, "{results:?}");
    });
}

#[test]
fn threads_may_share_a_lane() {
    each_seed(|seed| {
        let mut rng = Rng::with_seed(!seed);
        let faults = [some_faults(&mut rng), some_faults(&mut rng)];
        let slow = faults.iter().map(|f| f.capacity_bytes.min(f.split_bytes)).min();
        let longest = slow.unwrap_or(0).clamp(1000, 30_000);
        let gpus = [0, 1].map(|i| GpuFaults { delay_polls: 9, seed: seed + i, fail_at: None });
        let sides = sides_with_gpus(seed, faults, [rng.bool(), rng.bool()], gpus);
        let left = AtomicUsize::new(4);
        let poster = |by: usize, seed: u64| {
            let finished = Leave(&left);
            let mut rng = Rng::with_seed(seed);
            let jobs: Vec<_> = (0..25).map(|_| one_job(&sides, by, &mut rng, longest)).collect();
            while !jobs.iter().all(|job| job.done.result().is_some()) {
                sides[by].progress().expect("alive");
            }
            drop(finished);
            while left.load(SeqCst) > 0 {
                sides[by].progress().expect("alive");
            }
            jobs
        };
        let jobs: Vec<_> = std::thread::scope(|scope| {
            let poster = &poster;
            let threads: Vec<_> = (0..4u64)
                .map(|i| scope.spawn(move || poster(i as usize % 2, seed * 4 + i)))
                .collect();
            threads.into_iter().flat_map(|thread| thread.join().expect("no panic")).collect()
        });
        sides.iter().for_each(|side| side.lane.kill());
        for job in jobs {
            job.dest.assert_guards();
            assert!(job.dest.now() == job.done.held(), "landed after the end");
            match job.done.result() {
                Some(Ok(())) => {
                    let sent = job.source.pieces_of(&job.source.before);
                    assert!(job.dest.pieces_of(&job.dest.now()) == sent, "another thing landed");
                }
                result => assert!(job.cancelled && result == Some(Err(OpError::Cancelled))),
            }
        }
    });
}

/// Counts a thread as finished, even after a panic, so that the others can end.
struct Leave<'a>(&'a AtomicUsize);

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

/// Posts an operation, makes some progress and perhaps cancels it.
fn one_job(sides: &[Side; 2], by: usize, rng: &mut Rng, longest: usize) -> Job {
    let kind = if rng.bool() { OpKind::Read } else { OpKind::Write };
    let len = some_len(rng).min(longest);
    let local = cut(rng, len, 2000);
    let local = Patch::new(rng, &local);
    let remote = cut(rng, len, MAX_DESCS);
    let remote = Patch::new(rng, &remote);
    let region = sides[1 - by].register_as(some_kind(rng), remote.whole(), Rights::ALL);
    let pieces = remote.remote(&region);
    let dest = if kind == OpKind::Read { &local } else { &remote };
    let done = ResultAndCopy::watching(dest.whole());
    let memory = some_kind(rng);
    let name = sides[by].post_from(memory, kind, local.spans(), pieces, &done).expect("alive");
    for _ in 0..rng.u32(0..5) {
        sides[by].progress().expect("alive");
    }
    let cancelled = rng.u32(0..5) == 0;
    if cancelled {
        sides[by].lane.cancel(name);
    }
    let (source, dest) = if kind == OpKind::Read { (remote, local) } else { (local, remote) };
    let regions = vec![region];
    Job { by, kind, source, dest, regions, refusal: None, name, done, cancelled, revoked: None }
}
