//! The stream lane: one-sided operations, messages and fences over any byte pipe.
//!
//! Each side owns its memory. A write names regions of the receiver by key, and the receiver checks
//! key, bounds and rights before it puts a byte there, and repeats the check for every piece it
//! receives. The frames of a lane are handled in order, so the answer to a fence means that
//! everything before the fence has landed or has been dropped.

mod crc;
mod ops;
mod queue;
mod rx;
pub mod sealed;
pub mod tcp;
mod tx;
mod upload;

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst},
};

use parking_lot::{Mutex, MutexGuard};
use uccl_device::MemoryKind;
use uccl_fabric::{
    clock,
    gpu::CopyBy,
    lane::{
        Caps, Interest, Lane, LaneError, MessageLane, MessageSink, OpError, OpKind, OpName,
        Operation, PostOutcome, Spans,
    },
    mem::RemoteSpan,
    pipe::{Pipe, PipeRx, PipeTx},
    region::RegionTable,
    signal::Word,
};
use uccl_wire::frame::{Desc, Kind, MAX_DESC_BYTES, MAX_DESCS, MAX_MESSAGE, Status};

use self::{
    ops::Ops,
    queue::{OutgoingKind, OutgoingOp, SHORT},
    rx::{Rx, RxContext},
    tx::{Tx, TxContext},
};

/// The most reads that may wait for their data at a time.
const MAX_READS: usize = 512;
/// The most writes that may wait for their answer at a time.
const MAX_WRITES: usize = 64 << 10;

/// The options of a stream lane.
pub struct StreamOptions {
    /// Our memory that the peer may touch.
    pub regions: Arc<RegionTable>,
    /// Whether data that we send carries a checksum.
    pub checksum: bool,
    /// The copier between GPU memory and the memory that the pipe reaches.
    pub copy_by: CopyBy,
}

/// A lane over a byte pipe.
pub struct StreamLane<P: Pipe> {
    pipe: P,
    regions: Arc<RegionTable>,
    checksum: bool,
    tx: Mutex<Tx<P::Tx>>,
    rx: Mutex<Rx<P::Rx>>,
    ops: Mutex<Ops>,
    /// Whether something waits to be sent.
    unsent: AtomicBool,
    /// Too many answers wait: nothing is received until the peer has taken some.
    swamped: AtomicBool,
    load: AtomicU64,
    /// Bytes of short frames that wait to be sent.
    queued: AtomicUsize,
    /// Whether GPUs copy data to be sent, and whether they copy data that has come.
    fetching: AtomicBool,
    uploading: AtomicBool,
    heard_ms: AtomicU64,
    dead: Mutex<Option<LaneError>>,
    is_dead: AtomicBool,
    /// Why nothing can be sent any more. Bytes that came before are still received: a goodbye may
    /// be among them.
    deaf: Mutex<Option<LaneError>>,
    is_deaf: AtomicBool,
}

impl<P: Pipe> StreamLane<P> {
    /// Makes a lane of a pipe and its halves.
    pub fn new(pipe: P, tx: P::Tx, rx: P::Rx, options: StreamOptions) -> Self {
        Self {
            pipe,
            regions: options.regions,
            checksum: options.checksum,
            tx: Mutex::new(Tx::new(tx, options.checksum, &options.copy_by)),
            rx: Mutex::new(Rx::new(rx, &options.copy_by)),
            ops: Mutex::new(Ops::default()),
            unsent: AtomicBool::new(false),
            swamped: AtomicBool::new(false),
            load: AtomicU64::new(0),
            queued: AtomicUsize::new(0),
            fetching: AtomicBool::new(false),
            uploading: AtomicBool::new(false),
            heard_ms: AtomicU64::new(clock::coarse_ms()),
            dead: Mutex::new(None),
            is_dead: AtomicBool::new(false),
            deaf: Mutex::new(None),
            is_deaf: AtomicBool::new(false),
        }
    }

    /// The pipe it runs over.
    pub fn pipe(&self) -> &P {
        &self.pipe
    }

    fn alive(&self) -> Result<(), LaneError> {
        if self.is_dead.load(Relaxed) {
            return Err(self.dead.lock().clone().unwrap_or(LaneError::Killed));
        }
        Ok(())
    }

    fn die(&self, e: LaneError) -> LaneError {
        let first = self.dead.lock().get_or_insert(e).clone();
        self.is_dead.store(true, SeqCst);
        first
    }

    /// The peer receives nothing any more. A later progress reports the error, once no more bytes
    /// come from the peer.
    fn deafened(&self, e: std::io::Error) {
        self.deaf.lock().get_or_insert(e.into());
        self.is_deaf.store(true, SeqCst);
    }

    /// Sends as much as the pipe takes. Returns whether anything was sent.
    fn flush(&self, tx: &mut MutexGuard<'_, Tx<P::Tx>>) -> bool {
        if self.is_deaf.load(SeqCst) {
            return false;
        }
        let Self { regions, ops, fetching: copying, .. } = self;
        let around = TxContext { regions, ops, copying };
        let moved = match tx.flush(&around) {
            Ok(moved) => moved,
            Err(e) => {
                self.deafened(e);
                false
            }
        };
        self.swamped.store(tx.swamped(), SeqCst);
        self.unsent.store(tx.pending(), SeqCst);
        self.fetching.store(tx.is_copying(), SeqCst);
        self.queued.store(tx.control_len(), Relaxed);
        moved
    }

    fn pump(&self, sink: &dyn MessageSink) -> Result<bool, LaneError> {
        let Some(mut rx) = self.rx.try_lock() else { return Ok(false) };
        // Under the lock: after a kill of the lane no memory may be accessed any more.
        self.alive()?;
        if self.swamped.load(SeqCst) {
            return Ok(false);
        }
        let settle = || drop(self.tx.lock());
        let Self { regions, ops, uploading: copying, .. } = self;
        let around = RxContext { regions, ops, sink, settle: &settle, copying };
        let moved = rx.pump(&around);
        self.uploading.store(rx.is_copying(), SeqCst);
        let reopened = !matches!(moved, Ok(false)) && self.count_load();
        if reopened || !rx.answers.is_empty() {
            let mut tx = self.tx.lock();
            if !rx.answers.frames.is_empty() {
                tx.push_answers(&rx.answers.frames);
                rx.answers.frames.clear();
            }
            rx.answers.replies.drain(..).for_each(|reply| tx.push_reply(reply));
            tx.stop_replies(&mut rx.answers.stopped);
            drop(rx);
            self.flush(&mut tx);
        }
        let moved = moved?;
        if moved {
            self.heard_ms.store(clock::coarse_ms(), Relaxed);
        }
        Ok(moved)
    }

    /// Sums up the load; returns whether operations that had to wait can be begun now.
    fn count_load(&self) -> bool {
        let mut ops = self.ops.lock();
        self.load.store(ops.bytes + ops.len() as u64, Relaxed);
        ops.take_reopened()
    }

    /// Starts an operation, and sends a signal along with it if there is one.
    ///
    /// # Safety
    /// As for [`Lane::post`].
    unsafe fn start(&self, op: Operation, word: Option<Word>) -> Result<PostOutcome, LaneError> {
        let Some(op) = sayable(op) else {
            return Ok(PostOutcome::Done(Err(OpError::Remote(Status::Protocol))));
        };
        let mut tx = self.tx.lock();
        // Under the lock: a kill takes it too, and ends the operations that it finds.
        self.alive()?;
        let mut ops = self.ops.lock();
        let name = ops.insert(&op);
        self.load.store(ops.bytes + ops.len() as u64, Relaxed);
        let is_short = op.kind == OpKind::Write && op.len() <= SHORT as u64;
        if is_short && op.memory.is_host_accessible() && tx.takes_short() && ops.begin(name) {
            // SAFETY: the caller keeps the local pieces valid until the operation has ended, and it
            // cannot end while the operations are locked.
            if !unsafe { tx.push_short(name, &op.local, &op.remote, word) } {
                ops.doom(name, OpError::LocalFault);
            }
            ops.sent(name);
            drop(ops);
        } else {
            drop(ops);
            let kind = match op.kind {
                OpKind::Write => OutgoingKind::Write,
                OpKind::Read => OutgoingKind::Read,
            };
            let own = OutgoingOp::new(name, kind, op.local, op.remote);
            tx.push_own(own.on(op.memory.device_only()).with(word));
        }
        self.flush(&mut tx);
        Ok(PostOutcome::Pending(name))
    }

    /// Whether copies by GPUs are under way.
    fn is_copying(&self) -> bool {
        self.fetching.load(SeqCst) || self.uploading.load(SeqCst)
    }

    fn fail_all(&self, why: &OpError) {
        let ops = self.ops.lock().drain();
        self.count_load();
        ops.into_iter().for_each(|op| op.done.complete(Err(why.clone())));
    }
}

impl<P: Pipe> StreamLane<P> {
    /// Whether an operation has not ended.
    pub fn has(&self, name: OpName) -> bool {
        self.ops.lock().get_mut(name).is_some_and(|op| !op.is_disowned)
    }
}

impl<P: Pipe> Lane for StreamLane<P> {
    fn caps(&self) -> Caps {
        Caps {
            link: P::LINK,
            ordered: true,
            delivery_complete: true,
            remote_atomics: false,
            messages: true,
            by_device: false,
            checksum: self.checksum,
            max_pieces: MAX_DESCS,
            max_gpu_pieces: MAX_DESCS,
            max_message: MAX_MESSAGE,
        }
    }

    unsafe fn post(&self, op: Operation) -> Result<PostOutcome, LaneError> {
        // SAFETY: the caller's promise.
        unsafe { self.start(op, None) }
    }

    fn progress(&self, sink: &dyn MessageSink) -> Result<bool, LaneError> {
        self.alive()?;
        let mut moved = self.pump(sink).map_err(|e| self.die(e))?;
        if !moved && self.is_deaf.load(SeqCst) {
            let why = self.deaf.lock().clone();
            return Err(self.die(why.unwrap_or(LaneError::Ended)));
        }
        if self.unsent.load(SeqCst)
            && let Some(mut tx) = self.tx.try_lock()
        {
            moved |= self.flush(&mut tx);
        }
        self.alive()?;
        Ok(moved)
    }

    fn cancel(&self, name: OpName) {
        // No data is received under this lock, so a read that is discarded cannot take data any
        // more.
        let mut rx = self.rx.lock();
        let mut tx = self.tx.lock();
        let mut ops = self.ops.lock();
        let Some(op) = ops.get_mut(name) else { return };
        match op.kind {
            OpKind::Read => {
                if op.is_disowned {
                    return;
                }
                if tx.cut(name) != Some(false) {
                    // Its data is on the way. The read ends when the last of the data has come,
                    // which is thrown away.
                    op.is_disowned = true;
                    if let Some(target) = &mut op.target {
                        target.failed.get_or_insert(OpError::Cancelled);
                        target.spans = Spans::new();
                    }
                    let is_over = rx.discard(name);
                    let done = is_over
                        .then(|| std::mem::replace(&mut op.done, Arc::new(ReportedCompletion)));
                    drop((rx, ops));
                    tx.push_bare(Kind::Stop, name.0);
                    self.flush(&mut tx);
                    drop(tx);
                    if let Some(done) = done {
                        done.complete(Err(OpError::Cancelled));
                    }
                    return;
                }
            }
            OpKind::Write => match tx.cut(name) {
                Some(false) => {}
                Some(true) => {
                    op.doomed.get_or_insert(OpError::Cancelled);
                    drop(ops);
                    drop(rx);
                    self.flush(&mut tx);
                    return;
                }
                // Sent as a whole: the peer's answer comes after its last byte has landed.
                None => return,
            },
        }
        let op = ops.remove(name);
        self.load.store(ops.bytes + ops.len() as u64, Relaxed);
        drop((rx, ops));
        // Operations that waited behind it may go now.
        self.flush(&mut tx);
        drop(tx);
        if let Some(op) = op {
            op.done.complete(Err(OpError::Cancelled));
        }
    }

    fn load(&self) -> u64 {
        self.load.load(Relaxed)
    }

    fn has_work(&self) -> bool {
        self.unsent.load(SeqCst) || self.is_copying()
    }

    fn touched_by_peer(&self, slot: u32) -> bool {
        // Only copies by GPUs access it without the table's lock.
        self.is_copying() && (self.rx.lock().touches(slot) || self.tx.lock().touches(slot))
    }

    fn arm(&self) -> bool {
        // No descriptor shows when a GPU has finished, so someone must look.
        if self.is_dead.load(SeqCst) || self.is_deaf.load(SeqCst) || self.is_copying() {
            return false;
        }
        // Nothing is received while swamped. Room in the pipe ends that, so wait for room.
        let swamped = self.swamped.load(SeqCst);
        let unsent = swamped || self.unsent.load(SeqCst);
        // Arm the receiving half first: it may consume a wake-up that announces room.
        let rx_ready = !swamped && self.rx.try_lock().is_none_or(|mut rx| !armed(rx.pipe.arm()));
        let tx_ready = unsent && self.tx.try_lock().is_none_or(|mut tx| !armed(tx.pipe.arm()));
        !tx_ready && !rx_ready
    }

    fn interest(&self) -> Interest<'_> {
        let write = self.pipe.room_is_writable() && self.unsent.load(SeqCst);
        Interest { fd: self.pipe.fd(), write, end: None }
    }

    fn kill(&self) {
        self.die(LaneError::Killed);
        self.pipe.cut();
        // A thread inside a half leaves it first: halves never block.
        let mut rx = self.rx.lock();
        let mut tx = self.tx.lock();
        let ended = [tx.clear(), rx.reset()].into_iter().collect::<Result<(), _>>();
        drop((rx, tx));
        // An operation on memory that a GPU may still use must not be tried again over another
        // lane.
        self.fail_all(&ended.map_or_else(OpError::from, |()| OpError::LaneDown));
    }
}

impl<P: Pipe> MessageLane for StreamLane<P> {
    fn send(&self, parts: &[&[u8]]) -> Result<(), LaneError> {
        let mut tx = self.tx.lock();
        self.alive()?;
        if self.is_deaf.load(SeqCst) {
            return Ok(());
        }
        if let Err(e) = tx.push_message(parts) {
            self.deafened(e);
        }
        self.flush(&mut tx);
        Ok(())
    }

    fn carries_signal(&self, _: MemoryKind, _: &[RemoteSpan]) -> bool {
        true
    }

    unsafe fn post_signalled(&self, op: Operation, word: Word) -> Result<PostOutcome, LaneError> {
        // SAFETY: the caller's promise.
        unsafe { self.start(op, Some(word)) }
    }

    fn queued_bytes(&self) -> usize {
        self.queued.load(Relaxed)
    }

    fn last_heard_ms(&self) -> u64 {
        self.heard_ms.load(Relaxed)
    }

    fn ping(&self) -> Result<(), LaneError> {
        self.alive()?;
        let mut tx = self.tx.lock();
        tx.push_bare(Kind::Ping, 0);
        self.flush(&mut tx);
        Ok(())
    }

    fn bye(&self) {
        if let Some(mut tx) = self.tx.try_lock() {
            tx.push_bare(Kind::Bye, 0);
            self.flush(&mut tx);
        }
    }
}

/// An error counts as work: the next progress finds it.
fn armed(result: std::io::Result<bool>) -> bool {
    result.unwrap_or(false)
}

/// The operation in a form that frames can name; `None` if it has too many pieces, or if its two
/// sides differ in length.
fn sayable(mut op: Operation) -> Option<Operation> {
    let mut left = op.len();
    let mut is_long = false;
    for piece in &op.remote {
        left = left.checked_sub(piece.len)?;
        is_long |= piece.len > MAX_DESC_BYTES;
    }
    // Writes are cut into far shorter frames, but one frame names all the pieces of a read.
    if is_long && op.kind == OpKind::Read {
        op.remote = op.remote.iter().flat_map(by_descriptor).take(MAX_DESCS + 1).collect();
    }
    (left == 0 && op.remote.len() <= MAX_DESCS).then_some(op)
}

/// Cuts a piece into pieces that a descriptor can name.
fn by_descriptor(piece: &RemoteSpan) -> impl Iterator<Item = RemoteSpan> {
    let RemoteSpan { addr, len, key, slot } = *piece;
    let starts = (0..len.max(1)).step_by(MAX_DESC_BYTES as usize);
    starts.map(move |at| RemoteSpan {
        addr: addr.wrapping_add(at),
        len: (len - at).min(MAX_DESC_BYTES),
        key,
        slot,
    })
}

fn remote_of(desc: &Desc) -> RemoteSpan {
    RemoteSpan { addr: desc.addr, len: desc.len, key: desc.key, slot: desc.slot }
}

/// The completion of an operation that has been reported to its poster already.
struct ReportedCompletion;

impl uccl_fabric::lane::Completion for ReportedCompletion {
    fn complete(self: Arc<Self>, _: uccl_fabric::lane::OpResult) {}
}

#[cfg(test)]
mod tests;
