//! Two lanes between GPUs of the fake driver, which makes copies only when a test lets them pass.
#![allow(dead_code, reason = "no test file uses all of it")]

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use uccl_chaos::patiently;
use uccl_device::{
    MemoryKind,
    cuda::{Context, DeviceBuffer, Gpus},
};
use uccl_fabric::{
    alloc::Shareable,
    gpu::GpuShare,
    lane::{Completion, HostLane, Lane, OpKind, OpName, OpResult, Operation, PostOutcome},
    mem::{RemoteSpan, Span},
    region::{Region, RegionTable, Rights, SharedBacking},
};
use uccl_local::LocalLane;

use crate::{
    fake_driver::{self, Fake},
    support::{Anything, End, lanes},
};

/// The bytes of a slice, and the most bytes that a GPU has at once.
pub(crate) const SLICE: usize = 32 << 20;
pub(crate) const TURN: usize = 2 * SLICE;
pub(crate) const GIB: usize = 1 << 30;
pub(crate) const ANY: u64 = u64::MAX;

/// The driver, which one test has at a time.
pub(crate) struct Driver {
    pub(crate) fake: Fake,
    before: u64,
    _alone: MutexGuard<'static, ()>,
}

impl Driver {
    /// The driver, paused.
    pub(crate) fn paused() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock();
        let fake = fake_driver::load();
        fake.pause(true);
        Self { fake, before: fake.launched(), _alone: alone }
    }

    /// Counts from now on.
    pub(crate) fn anew(mut self) -> Self {
        self.before = self.fake.launched();
        self
    }

    /// Bytes of the copies that were enqueued on streams since then.
    pub(crate) fn launched(&self) -> usize {
        (self.fake.launched() - self.before) as usize
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.fake.refuse_after(None);
        self.fake.stall(false);
        self.fake.pause(false);
    }
}

pub(crate) fn context(gpu: u32) -> &'static Context {
    Gpus::get().device(gpu).expect("a GPU").context().expect("its context")
}

/// A lane, and memory on two GPUs between which it copies.
pub(crate) struct Pair {
    pub(crate) ours: LocalLane,
    pub(crate) theirs: LocalLane,
    gpu: u32,
    pub(crate) here: DeviceBuffer,
    /// The peer's.
    _there: DeviceBuffer,
    pub(crate) regions: Arc<RegionTable>,
    pub(crate) region: Region,
}

pub(crate) fn pair(len: usize) -> Pair {
    pair_between((0, 1), len)
}

pub(crate) fn pair_between((here_on, there_on): (u32, u32), len: usize) -> Pair {
    let table = || Arc::new(RegionTable::new().expect("a table"));
    let (own, regions) = (table(), table());
    let (ours, theirs) = lanes(&own, &regions);
    let memory = |gpu| DeviceBuffer::new(context(gpu), len).expect("memory");
    let (here, there) = (memory(here_on), memory(there_on));
    let region = register(&regions, &theirs, &there, Rights::ALL);
    let gpu = here_on;
    Pair { ours, theirs, gpu, here, _there: there, regions, region }
}

/// Registers a GPU's memory, and offers it to the peer.
pub(crate) fn register(
    regions: &RegionTable,
    lane: &LocalLane,
    memory: &DeviceBuffer,
    rights: Rights,
) -> Region {
    let span = Span { addr: memory.address() as usize, len: memory.len_bytes() };
    let share = GpuShare::of(span).expect("it can be shared");
    let offset = (span.addr - share.span().addr) as u64;
    let backing = Some(SharedBacking { id: share.id(), offset });
    let region = regions
        .insert_kind(MemoryKind::Cuda { device: 1 }, span, rights, backing)
        .expect("registered");
    lane.offer(&Shareable::Gpu(share));
    region
}

impl Pair {
    /// Posts a write of pieces one behind the other.
    pub(crate) fn write(&self, lens: &[usize]) -> (Arc<End>, OpName) {
        let (end, op) = self.operation(lens);
        // SAFETY: the memory is dropped after the lanes.
        match unsafe { self.ours.post(op) } {
            Ok(PostOutcome::Pending(name)) => (end, name),
            other => panic!("{other:?}"),
        }
    }

    /// The write, to be posted.
    pub(crate) fn operation(&self, lens: &[usize]) -> (Arc<End>, Operation) {
        let end = Arc::new(End::default());
        let done = Arc::clone(&end) as Arc<dyn Completion>;
        let remote = self.region.remote();
        let starts = lens.iter().scan(0, |at, len| Some(std::mem::replace(at, *at + len)));
        let (local, remote) = starts
            .zip(lens)
            .map(|(at, &len)| {
                let local = Span { addr: self.here.address() as usize + at, len };
                (local, RemoteSpan { addr: remote.addr + at as u64, len: len as u64, ..remote })
            })
            .collect();
        let memory = MemoryKind::Cuda { device: self.gpu };
        (end, Operation { kind: OpKind::Write, local, memory, remote, done })
    }

    pub(crate) fn progress(&self) {
        self.ours.progress(&Anything).expect("a living lane");
    }

    /// Makes progress until this many bytes are left.
    pub(crate) fn until_left(&self, bytes: usize) {
        patiently(|| {
            self.progress();
            (self.ours.load() <= bytes as u64).then_some(())
        });
        assert_eq!(self.ours.load(), bytes as u64);
    }

    pub(crate) fn result(&self, end: &End) -> OpResult {
        patiently(|| {
            self.progress();
            end.result()
        })
    }
}
