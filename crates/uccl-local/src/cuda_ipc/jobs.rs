//! Copies by GPUs that one lane has under way, or waiting.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Instant,
};

use parking_lot::Mutex;
use smallvec::SmallVec;
use uccl_device::{
    MemoryKind,
    cuda::{Context, Event, Gpus, Priority, Stream},
};
use uccl_fabric::{
    gpu::Engine,
    lane::{Completion, OpError, OpKind, OpName, OpResult, Operation, RemoteSpans, access_of},
    mem::RemoteSpan,
    pieces::Pieces as _,
    signal::Word,
};

use super::{
    copy_end::CopyEnd,
    flight::{Flight, Hazards, MAX_SLOTS, Way, claim},
    ledger::Ledger,
    queue::{Pieces, Plan, Queue},
    table::{TablePost, TableUse},
    turns::Turns,
};
use crate::shm::Direct;

/// Copies by GPUs that are under way, or wait.
pub struct GpuJobs {
    gpus: Mutex<GpuList>,
    /// Short operations that were enqueued at once.
    flights: Mutex<Vec<ShortCopy>>,
    /// Short operations for which no hazard words were free. They wait for nothing else.
    late: Arc<Queue>,
    late_turns: Turns,
    ledger: Arc<Ledger>,
    next: AtomicU64,
}

#[derive(Default)]
struct GpuList {
    list: SmallVec<[Arc<LaneGpu>; 1]>,
    /// No more GPUs are added.
    closed: bool,
}

/// The lane's engines and its queue for one GPU.
struct LaneGpu {
    context: &'static Context,
    /// For short operations: a stream where they do not wait for slices of long ones.
    short: Arc<Mutex<Engine>>,
    long: Arc<Mutex<Engine>>,
    /// For operations that wait for an event, made for the first of them.
    behind: Mutex<Option<Arc<Mutex<Engine>>>>,
    /// Long operations that wait for the GPU.
    queue: Arc<Queue>,
    turns: Arc<Turns>,
}

/// An operation that was enqueued at once.
struct ShortCopy {
    name: OpName,
    flight: Flight,
    bytes: u64,
    done: Arc<dyn Completion>,
}

/// The pieces of an operation that are posted.
pub(crate) struct PostRequest<'a> {
    pub(crate) kind: OpKind,
    /// The kind of our memory.
    pub(crate) memory: MemoryKind,
    /// All pieces of the operation.
    pub(crate) pieces: &'a Arc<Pieces>,
    /// The pieces that are posted.
    pub(crate) range: Range<usize>,
    /// Whether they are enqueued in slices; else at once.
    pub(crate) in_slices: bool,
    /// The signal that follows them.
    pub(crate) word: Option<Word>,
    /// Called at the end.
    pub(crate) done: &'a Arc<dyn Completion>,
}

impl PostRequest<'_> {
    /// The posted pieces as a separate operation.
    pub(crate) fn operation(&self) -> Operation {
        let Self { kind, memory, pieces, range, done, .. } = self;
        Operation {
            kind: *kind,
            local: pieces.local[range.clone()].into(),
            memory: *memory,
            remote: pieces.remote[range.clone()].into(),
            done: Arc::clone(done),
        }
    }
}

impl Default for GpuJobs {
    fn default() -> Self {
        Self {
            gpus: Mutex::default(),
            flights: Mutex::default(),
            late: Arc::default(),
            late_turns: Turns::unlimited(),
            ledger: Arc::default(),
            next: AtomicU64::default(),
        }
    }
}

impl GpuJobs {
    /// Makes a GPU copy pieces of an operation and then change the signal's word, and calls `done`
    /// at the end. At least one side must be GPU memory, and the pieces must lie in few enough
    /// regions, as `batches` cuts them.
    ///
    /// # Errors
    /// Nothing moves then. [`OpError::HostOnly`]: no GPU of this process reaches both sides, and
    /// the word.
    ///
    /// # Safety
    /// The local pieces must stay valid until `done` has been called.
    pub(crate) unsafe fn post(
        &self,
        direct: &Arc<Direct>,
        posting: &PostRequest<'_>,
    ) -> Result<OpName, OpError> {
        let PostRequest { kind, memory, pieces, ref range, in_slices, word, done } = *posting;
        let (local, remote) = (&pieces.local[range.clone()], &pieces.remote[range.clone()]);
        let is_whole = range.len() == pieces.remote.len();
        // A list knows its own length.
        let bytes = if is_whole { pieces.local.len_bytes() } else { local.len_bytes() };
        // Counted before other threads can see anything of the operation.
        let opening = self.ledger.open(bytes);
        let context = context_of(direct, memory, remote)?;
        let gpu = self.gpu(context)?;
        let name = OpName(self.next.fetch_add(1, Relaxed));
        let passes_slices = gpu.turns.has_slices();
        let way = Way {
            direct,
            kind,
            memory,
            context,
            passes_slices,
            word,
            blocks: 0,
            behind: None,
            uploads: None,
        };
        let is_first = || self.ledger.queued() == 0 || self.late.is_empty();
        if !in_slices
            && is_first()
            && let Some(hazards) = claim_all(direct, posting)
        {
            let (local, remote, engine) = (&pieces.local, &pieces.remote, &gpu.short);
            let post = is_whole.then_some(TablePost { kind, memory, local, remote, engine });
            // SAFETY: the caller's promise.
            let flight = unsafe { enqueue_short(way, posting, post, (&gpu.short, hazards))? };
            let done = Arc::clone(done);
            self.flights.lock().push(ShortCopy { name, flight, bytes, done });
            opening.keep();
            return Ok(name);
        }
        // This only checks that the GPU reaches the memory. It is looked up again, under hazards,
        // before it is accessed.
        direct.gpu_places(access_of(kind), remote.iter().copied(), context, |_, _| ())?;
        word.map(|word| direct.gpu_word(&word, context)).transpose()?;
        let other = other_of(direct, context, remote);
        let (queue, turns, engine) = match in_slices {
            true => (&gpu.queue, &*gpu.turns, Arc::clone(&gpu.long)),
            false => (&self.late, &self.late_turns, Arc::clone(&gpu.short)),
        };
        let plan = Plan {
            name,
            other,
            kind,
            memory,
            pieces: Arc::clone(pieces),
            range: range.clone(),
            direct: Arc::clone(direct),
            context,
            engine,
            ledger: Arc::clone(&self.ledger),
            word,
        };
        queue.push(plan, Arc::clone(done))?;
        opening.keep();
        turns.join(queue);
        turns.drive();
        Ok(name)
    }

    /// Makes a GPU copy pieces as [`post`](Self::post) does, once an event has happened. Such a
    /// copy cannot be taken back.
    ///
    /// # Errors
    /// Nothing moves then.
    ///
    /// # Safety
    /// As for [`post`](Self::post).
    pub(crate) unsafe fn post_behind(
        &self,
        direct: &Arc<Direct>,
        posting: &PostRequest<'_>,
        event: &Event,
    ) -> Result<OpName, OpError> {
        let PostRequest { kind, memory, pieces, ref range, done, .. } = *posting;
        let (local, remote) = (&pieces.local[range.clone()], &pieces.remote[range.clone()]);
        let bytes = local.len_bytes();
        let opening = self.ledger.open(bytes);
        let context = context_of(direct, memory, remote)?;
        let gpu = self.gpu(context)?;
        let engine = gpu.behind()?;
        let name = OpName(self.next.fetch_add(1, Relaxed));
        let hazards = claim(direct, remote.iter().copied())
            .ok_or(OpError::HostOnly("no hazard word is free"))?;
        let behind = Some(event);
        let way = Way {
            direct,
            kind,
            memory,
            context,
            passes_slices: true,
            word: None,
            blocks: 0,
            behind,
            uploads: None,
        };
        let pairs = local.iter().copied().zip(remote.iter().copied());
        // SAFETY: the caller's promise.
        let flight = unsafe { way.enqueue(pairs, &engine, hazards)? };
        self.flights.lock().push(ShortCopy { name, flight, bytes, done: Arc::clone(done) });
        opening.keep();
        Ok(name)
    }

    /// Makes work that is enqueued on a stream from now on wait for operations, and enqueues all
    /// that is left of them. Returns how many have not ended; `None` if not all can be enqueued.
    pub(crate) fn lead(&self, names: &[OpName], stream: &Stream) -> Option<usize> {
        let mut engines: SmallVec<[Arc<Mutex<Engine>>; 4]> = SmallVec::new();
        let mut found = 0;
        let gpus = self.gpus();
        for name in names {
            let short = || {
                let flights = self.flights.lock();
                let short = flights.iter().find(|short| short.name == *name)?;
                short.flight.engine().cloned()
            };
            let queues = gpus.iter().map(|gpu| (&*gpu.turns, &*gpu.queue));
            let queues = queues.chain([(&self.late_turns, &*self.late)]);
            let mut engine = short();
            for (turns, queue) in queues {
                if engine.is_none() {
                    engine = turns.enqueue_rest(queue, *name, &self.ledger).ok()?;
                }
            }
            if let Some(engine) = engine {
                found += 1;
                if !engines.iter().any(|other| Arc::ptr_eq(other, &engine)) {
                    engines.push(engine);
                }
            }
        }
        engines.iter().try_for_each(|engine| engine.lock().lead(stream)).ok()?;
        Some(found)
    }

    /// Whether a GPU of ours that copies between memory of this kind and the peer's changes such a
    /// word behind the copies, as far as is known beforehand.
    pub(crate) fn signals(direct: &Direct, ours: MemoryKind, word: &Word) -> bool {
        // Only our own GPU counts: another process's could have to wait for its owner's work.
        let device = ours.device().map(|device| Gpus::get().device(device));
        let context = device.and_then(|device| device.and_then(|device| device.context()).ok());
        context
            .is_some_and(|context| context.has_kernels() && direct.gpu_word(word, context).is_ok())
    }

    fn gpu(&self, context: &'static Context) -> Result<Arc<LaneGpu>, OpError> {
        let ordinal = context.device().ordinal();
        let mut gpus = self.gpus.lock();
        if gpus.closed {
            return Err(OpError::LaneDown);
        }
        let found = gpus.list.iter().find(|gpu| gpu.context.device().ordinal() == ordinal);
        if let Some(gpu) = found {
            return Ok(Arc::clone(gpu));
        }
        let engine =
            |priority| Engine::new(context, priority).map(|engine| Arc::new(Mutex::new(engine)));
        let (short, long) = (engine(Priority::High)?, engine(Priority::Normal)?);
        let turns = Turns::of(ordinal);
        let gpu = Arc::new(LaneGpu {
            context,
            short,
            long,
            behind: Mutex::default(),
            queue: Arc::default(),
            turns,
        });
        gpus.list.push(Arc::clone(&gpu));
        Ok(gpu)
    }

    fn gpus(&self) -> SmallVec<[Arc<LaneGpu>; 1]> {
        self.gpus.lock().list.clone()
    }

    /// Whether copies are under way or wait, or have ended but their completions have not been
    /// called.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.ledger.is_open()
    }

    /// Bytes to be copied.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.ledger.bytes()
    }

    /// Finds the flights that have ended, releases their resources, and enqueues more copies within
    /// the limits. Calls no completions.
    pub(crate) fn drive(&self) {
        self.take_ended();
        if self.ledger.queued() > 0 {
            self.late_turns.drive();
            self.gpus().iter().for_each(|gpu| gpu.turns.drive());
        }
    }

    fn take_ended(&self) {
        let mut flights = self.flights.lock();
        let mut results: SmallVec<[OpResult; 4]> = SmallVec::new();
        let ended = flights.extract_if(.., |short| {
            let result = short.flight.ended();
            let has_ended = result.is_some();
            results.extend(result);
            has_ended
        });
        let ended: SmallVec<[ShortCopy; 4]> = ended.collect();
        drop(flights);
        for (ShortCopy { flight, bytes, done, .. }, result) in ended.into_iter().zip(results) {
            flight.land();
            self.ledger.moved(bytes);
            self.ledger.landed(done, result);
        }
    }

    /// Enqueues more copies within the limits, and calls the completions of operations that have
    /// ended. True if there were any.
    pub fn progress(&self) -> bool {
        if !self.is_busy() {
            return false;
        }
        self.drive();
        self.ledger.tell()
    }

    /// Enqueues no more of an operation. It ends with the copies that the GPU has.
    pub(crate) fn cancel(&self, name: OpName) {
        if !self.late.cancel(name) {
            self.gpus().iter().any(|gpu| gpu.queue.cancel(name));
        }
    }

    /// Enqueues nothing more of any waiting operation, and accepts no new ones.
    pub(crate) fn close(&self) {
        self.late.close();
        let gpus = {
            let mut gpus = self.gpus.lock();
            gpus.closed = true;
            gpus.list.clone()
        };
        gpus.iter().for_each(|gpu| gpu.queue.close());
    }

    /// Waits until all completions have been called, at most until `until`. True if they have.
    pub(crate) fn finish(&self, until: Instant) -> bool {
        while self.is_busy() {
            if !self.progress() {
                if Instant::now() > until {
                    return false;
                }
                std::thread::yield_now();
            }
        }
        true
    }
}

impl LaneGpu {
    /// The engine of operations that wait for an event.
    fn behind(&self) -> Result<Arc<Mutex<Engine>>, OpError> {
        let mut behind = self.behind.lock();
        if let Some(behind) = &*behind {
            return Ok(Arc::clone(behind));
        }
        let made = Arc::new(Mutex::new(Engine::new(self.context, Priority::High)?));
        Ok(Arc::clone(behind.insert(made)))
    }
}

impl Drop for GpuJobs {
    fn drop(&mut self) {
        self.close();
    }
}

/// The peer's memory that is accessed, a signal's word included.
fn with_word<'a>(
    remote: impl Iterator<Item = &'a RemoteSpan>,
    word: Option<Word>,
) -> impl Iterator<Item = RemoteSpan> {
    remote.copied().chain(word.map(|word| word.span))
}

/// Claims hazard words for the regions of the posted pieces and of the signal's word.
fn claim_all(direct: &Direct, posting: &PostRequest<'_>) -> Option<Hazards> {
    let PostRequest { pieces, ref range, word, .. } = *posting;
    match range.len() == pieces.remote.len() {
        // A shared list has its regions at hand.
        true => claim(direct, with_word(pieces.remote.regions(), word)),
        false => claim(direct, with_word(pieces.remote[range.clone()].iter(), word)),
    }
}

/// Enqueues the posted pieces at once, with the table of `post` if it has one.
///
/// # Safety
/// As for [`Way::enqueue`].
unsafe fn enqueue_short(
    way: Way<'_>,
    posting: &PostRequest<'_>,
    post: Option<TablePost<'_>>,
    (engine, mut hazards): (&Arc<Mutex<Engine>>, Hazards),
) -> Result<Flight, OpError> {
    let PostRequest { pieces, ref range, .. } = *posting;
    let mut table = post.map_or(TableUse::None, |post| post.table_use());
    if let TableUse::Copy(kept) = &table {
        // SAFETY: the caller's promise.
        match unsafe { way.enqueue_table((kept, &pieces.remote), engine, hazards)? } {
            Ok(flight) => return Ok(flight),
            Err(unused) => hazards = unused,
        }
        // A region has changed since.
        table = TableUse::Upload;
    }
    let uploads = post.filter(|_| matches!(table, TableUse::Upload));
    let (local, remote) = (&pieces.local[range.clone()], &pieces.remote[range.clone()]);
    let pairs = local.iter().copied().zip(remote.iter().copied());
    // SAFETY: the caller's promise.
    let flight = unsafe { Way { uploads, ..way }.enqueue(pairs, engine, hazards)? };
    if let (Some(post), TableUse::Note) = (post, table) {
        post.note();
    }
    Ok(flight)
}

/// Cuts a list into parts that each lie in at most [`MAX_SLOTS`] regions.
pub(crate) fn batches_of(list: &RemoteSpans) -> SmallVec<[Range<usize>; 1]> {
    // A shared list has its regions at hand.
    let mut slots: SmallVec<[u32; MAX_SLOTS]> = SmallVec::new();
    let are_few = list.regions().all(|span| {
        if !slots.contains(&span.slot) {
            slots.push(span.slot);
        }
        slots.len() <= MAX_SLOTS
    });
    match are_few {
        true => std::iter::once(0..list.len()).collect(),
        false => batches(list),
    }
}

/// Cuts pieces into parts that each lie in at most [`MAX_SLOTS`] regions.
pub(crate) fn batches(remote: &[RemoteSpan]) -> SmallVec<[Range<usize>; 1]> {
    let mut batches = SmallVec::new();
    let (mut start, mut slots) = (0, SmallVec::<[u32; MAX_SLOTS]>::new());
    let mut last = None;
    for (at, span) in remote.iter().enumerate() {
        if last.replace(span.slot) == Some(span.slot) || slots.contains(&span.slot) {
            continue;
        }
        if slots.len() == MAX_SLOTS {
            batches.push(start..at);
            start = at;
            slots.clear();
        }
        slots.push(span.slot);
    }
    batches.push(start..remote.len());
    batches
}

/// The GPU that copies: ours if our memory is a GPU's, otherwise the one that the peer's memory is
/// on.
fn context_of(
    direct: &Direct,
    ours: MemoryKind,
    remote: &[RemoteSpan],
) -> Result<&'static Context, OpError> {
    if let Some(device) = ours.device() {
        return Gpus::get()
            .device(device)
            .and_then(|device| device.context())
            .map_err(OpError::from);
    }
    let gpu_there = remote.iter().find_map(|span| direct.gpu_of(span));
    let opened = gpu_there.ok_or(OpError::HostOnly("neither side is known to be a GPU's"))?;
    match opened.context() {
        Some(context) => context.map_err(OpError::from),
        None => Err(OpError::HostOnly(
            "the peer's GPU is not visible to this process (CUDA_VISIBLE_DEVICES), and our memory is the host's",
        )),
    }
}

/// The other end of a copy by a GPU of ours. The first piece stands for all that a vector reaches.
fn other_of(direct: &Direct, context: &Context, remote: &[RemoteSpan]) -> CopyEnd {
    let there = remote.first().and_then(|span| direct.gpu_of(span));
    let there = there.map(|there| there.uuid().0);
    let own = context.device().uuid().0;
    there.filter(|there| *there != own).map_or(CopyEnd::Near, CopyEnd::Gpu)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_touch_few_enough_regions_and_cover_all_pieces() {
        let mut rng = fastrand::Rng::with_seed(3);
        for _ in 0..200 {
            let (count, slots) = (rng.usize(1..400), rng.u32(1..100));
            let remote: RemoteSpans = (0..count)
                .map(|_| RemoteSpan { addr: 0, len: 1, key: 0, slot: rng.u32(0..slots) })
                .collect();
            let parts = batches(&remote);
            assert_eq!(batches_of(&remote), parts);
            assert_eq!(batches_of(&remote.clone().share()), parts);
            let mut at = 0;
            for part in &parts {
                assert_eq!(part.start, at);
                at = part.end;
                let mut slots: Vec<_> = remote[part.clone()].iter().map(|span| span.slot).collect();
                slots.sort_unstable();
                slots.dedup();
                assert!(!slots.is_empty() && slots.len() <= MAX_SLOTS);
            }
            assert_eq!(at, count);
        }
    }
}
