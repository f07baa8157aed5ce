//! Two ends in one process, and the calls that drive them.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, poll};
use uccl_device::{MemoryKind, cuda::Context};
use uccl_fabric::{
    alloc::{Shareable, lookup},
    gpu::GpuShare,
    lane::{Completion, LaneError, OpKind, OpResult, Operation, RemoteSpans, Spans},
    mem::Span,
    region::{Region, Rights, SharedBacking},
    signal::Word,
};

use crate::{
    done::{Lands, ResultSlot},
    end::End,
    memory::Memory,
};

/// Time limit for every expected event.
pub(crate) const FAR: Duration = Duration::from_secs(60);

/// Two ends of a link, joined.
pub(crate) struct Pair {
    pub(crate) a: End,
    pub(crate) b: End,
    /// The GPU that holds the memory, if it is not the host's.
    gpu: Option<&'static Context>,
    /// Memory of the check. It is freed after the lanes and their devices.
    kept: Mutex<Vec<Arc<Memory>>>,
}

impl Pair {
    /// Pairs two ends and waits until both are up.
    pub(crate) fn new([a, b]: [End; 2], gpu: Option<&'static Context>) -> Self {
        let pair = Self { a, b, gpu, kept: Mutex::default() };
        pair.until_up();
        pair
    }

    /// Waits until both ends are up: rails come and go.
    pub(crate) fn until_up(&self) {
        let is_up = |end: &End| end.rails.as_ref().is_none_or(|rails| rails.paths_up() > 0);
        self.until("the link is up", || is_up(&self.a) && is_up(&self.b));
    }

    /// Memory that the peer cannot map, or memory of the GPU.
    pub(crate) fn private(&self, len: usize) -> Arc<Memory> {
        self.keep(self.gpu.map_or_else(|| Memory::private(len), |gpu| Memory::of_gpu(gpu, len)))
    }

    /// Memory that the peer can map, or memory of the GPU.
    pub(crate) fn shared(&self, len: usize) -> Arc<Memory> {
        self.keep(self.gpu.map_or_else(|| Memory::shared(len), |gpu| Memory::of_gpu(gpu, len)))
    }

    pub(crate) fn is_on_gpu(&self) -> bool {
        self.gpu.is_some()
    }

    fn kind(&self) -> MemoryKind {
        let device = |gpu: &Context| MemoryKind::Cuda { device: gpu.device().ordinal() };
        self.gpu.map_or(MemoryKind::Host, device)
    }

    fn keep(&self, memory: Memory) -> Arc<Memory> {
        let memory = Arc::new(memory);
        self.kept.lock().push(Arc::clone(&memory));
        memory
    }

    /// Makes progress on both ends, and returns whether something moved.
    ///
    /// # Errors
    /// One of the ends is dead.
    pub(crate) fn turn(&self) -> Result<bool, LaneError> {
        let mut moved = false;
        for (from, to) in [(&self.a, &self.b), (&self.b, &self.a)] {
            moved |= from.lane.progress(&from.inbox)?;
            let (Some(from), Some(to)) = (&from.rails, &to.rails) else { continue };
            while let Some(note) = from.take_note() {
                let mut bytes = Vec::new();
                note.encode_to(&mut bytes);
                to.hear(&bytes).expect("an honest peer");
                moved = true;
            }
        }
        Ok(moved)
    }

    /// Makes progress on both ends `count` times.
    pub(crate) fn turns(&self, count: usize) {
        (0..count).for_each(|_| _ = self.turn().expect("both ends live"));
    }

    /// Makes progress on both ends until `is_so` holds.
    pub(crate) fn until(&self, what: &str, mut is_so: impl FnMut() -> bool) {
        let begun = Instant::now();
        while !is_so() {
            assert!(begun.elapsed() < FAR, "not so for {FAR:?}: {what}");
            if !self.turn().expect("both ends live") {
                thread::yield_now();
            }
        }
    }

    /// As [`Self::until`], but both ends sleep when there is nothing to do: a missing wakeup fails
    /// the check.
    pub(crate) fn until_asleep(&self, what: &str, mut is_so: impl FnMut() -> bool) {
        while !is_so() {
            let moved = self.turn().expect("both ends live");
            let is_armed = !moved && self.a.lane.arm() && self.b.lane.arm();
            // The condition is tested after both are armed: any later event wakes them.
            if is_armed && !is_so() {
                let fds = [&self.a, &self.b].map(|end| end.lane.interest());
                let mut fds = fds.each_ref().map(|interest| {
                    let writable = if interest.write { PollFlags::OUT } else { PollFlags::empty() };
                    PollFd::from_borrowed_fd(interest.fd, PollFlags::IN | writable)
                });
                let wait = FAR.try_into().expect("a short time");
                let woken = poll(&mut fds, Some(&wait)).expect("polled");
                assert!(woken > 0, "asleep for ever: {what}");
            }
        }
    }

    /// A region of the second end, which the first end may use with these rights.
    pub(crate) fn region(&self, memory: &Memory, rights: Rights) -> Region {
        let (owner, span) = (&self.b, memory.span());
        let share = self.is_on_gpu().then(|| GpuShare::of(span).expect("it can be shared"));
        let backing = match &share {
            None => lookup(span).map(|(backing, _)| backing),
            Some(share) => {
                let offset = (span.addr - share.span().addr) as u64;
                Some(SharedBacking { id: share.id(), offset })
            }
        };
        let region =
            owner.regions.insert_kind(self.kind(), span, rights, backing).expect("a region");
        if let (Some(host), Some(share)) = (&owner.host, share) {
            host.offer(&Shareable::Gpu(share));
        }
        if let Some(devices) = &owner.devices {
            devices.add(&region);
        }
        if let (Some(host), Memory::Shared(buf)) = (&owner.host, memory) {
            host.offer(&Shareable::Host(Arc::clone(buf)));
            let peer = self.a.host.as_ref().expect("a lane of the same kind");
            self.until_asleep("offered memory is mapped", || {
                peer.path_to(&region.remote()) == "mapped"
            });
        }
        region
    }

    /// Takes a region back, as its owner does. Afterwards nothing touches it.
    pub(crate) fn take_back(&self, region: &Region) {
        let owner = &self.b;
        let revoked = owner.regions.revoke(region.slot, region.key).expect("it lives");
        if let Some(devices) = &owner.devices {
            devices.retire(region.slot);
        }
        self.until("a region is let go", || !owner.lane.touched_by_peer(region.slot));
        if let Some(devices) = &owner.devices {
            self.until("devices are done", || !devices.is_busy_with(region.slot));
            devices.remove(region.slot);
        }
        drop(revoked);
    }

    /// Posts an operation of the first end on its own memory, which the pair keeps.
    pub(crate) fn post(
        &self,
        kind: OpKind,
        local: impl IntoIterator<Item = Span>,
        remote: RemoteSpans,
        lands: Option<Lands>,
    ) -> Arc<ResultSlot> {
        let local: Spans = local.into_iter().collect();
        for span in &local {
            self.learn(*span);
        }
        let done = ResultSlot::new(lands);
        let told = Arc::clone(&done) as Arc<dyn Completion>;
        let op = Operation { kind, local, memory: self.kind(), remote, done: told };
        // SAFETY: the pair keeps the memory until both lanes are killed.
        done.is_posted(unsafe { self.a.lane.post(op) });
        done
    }

    /// Posts a write with a signal from the first end. Either the GPU that writes changes the word,
    /// or the lane carries the signal along with the write. `None`: the lane does neither.
    pub(crate) fn post_signalled(
        &self,
        local: Spans,
        remote: RemoteSpans,
        word: Word,
    ) -> Option<Arc<ResultSlot>> {
        let (kind, memory) = (OpKind::Write, self.kind());
        let done = ResultSlot::new(None);
        let op = Operation { kind, local, memory, remote, done: Arc::clone(&done) as _ };
        if let Some(host) =
            self.a.host.as_ref().filter(|host| host.signals_by_gpu(memory, &op.remote, &word))
        {
            // SAFETY: the pair keeps the memory until both lanes are killed.
            done.is_posted(unsafe { host.post_signalled_by_gpu(op, word) });
            return Some(done);
        }
        let lane =
            self.a.messages.as_ref().filter(|lane| lane.carries_signal(memory, &op.remote))?;
        // SAFETY: the pair keeps the memory until both lanes are killed.
        done.is_posted(unsafe { lane.post_signalled(op, word) });
        Some(done)
    }

    /// Registers memory of the first end with its devices.
    fn learn(&self, span: Span) {
        let Some(devices) = &self.a.devices else { return };
        let region = self.a.regions.insert(span, Rights::NONE, None).expect("a region");
        devices.add(&region);
    }

    /// Carries out an operation with one local piece.
    pub(crate) fn carry(&self, kind: OpKind, local: Span, remote: RemoteSpans) -> OpResult {
        self.end_of(&self.post(kind, [local], remote, None))
    }

    /// Waits for the end of an operation and returns its result.
    pub(crate) fn end_of(&self, done: &ResultSlot) -> OpResult {
        self.until("an operation ends", || done.result().is_some());
        done.result().expect("it has ended")
    }
}

impl Drop for Pair {
    /// Kills both lanes: afterwards nothing touches the check's memory.
    fn drop(&mut self) {
        self.a.lane.kill();
        self.b.lane.kill();
    }
}
