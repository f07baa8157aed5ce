//! Changes of signal words in GPU memory, while no thread waits for them.
//!
//! ```text
//!   waiting -> [an addition: fetch the word] -> store it -> ended
//! ```
//!
//! Each GPU has a queue of changes, and makes one after the other by copies on a stream of its own,
//! so no change is lost. Threads that look for the end of a change let the queue go on. A thread
//! that calls the driver keeps no other thread waiting.

use std::{
    collections::VecDeque,
    sync::{Arc, LazyLock, OnceLock},
};

use parking_lot::Mutex;
use uccl_device::cuda::GpuError;
use uccl_wire::signal::Change;

use super::word::WordCopier;
use crate::region::RegionUse;

static QUEUES: LazyLock<Mutex<Queues>> = LazyLock::new(Mutex::default);

/// The queues, by the ordinals of their GPUs.
type Queues = Vec<(u32, Arc<Queue>)>;

/// A change of a word in GPU memory. A change that has not begun when this is dropped is not made.
#[must_use = "the change goes on when somebody looks at it"]
#[derive(Debug)]
pub struct WordChange {
    queue: Arc<Queue>,
    end: End,
}

/// The result of a change, once it has ended.
type End = Arc<OnceLock<Result<(), GpuError>>>;

/// Makes changes of words in a GPU's memory possible while streams are held up: the driver locks
/// memory only when the GPU has nothing to do.
///
/// # Errors
/// The driver's error.
pub fn prepare_words(device: u32) -> Result<(), GpuError> {
    queue_of(device).map(drop)
}

/// Begins to change a word behind the changes before it.
///
/// # Errors
/// The driver's error. Then the word does not change.
///
/// # Safety
/// The aligned eight bytes must be this GPU's memory while their region is in use, and changed by
/// nobody else until this change has ended.
pub(crate) unsafe fn begin_change(
    device: u32,
    address: usize,
    change: Change,
    in_use: RegionUse,
) -> Result<WordChange, GpuError> {
    let queue = queue_of(device)?;
    let end = End::default();
    let order = Order { address: address as u64, change, in_use, end: Arc::clone(&end) };
    queue.waiting.lock().push_back(order);
    queue.advance();
    Ok(WordChange { queue, end })
}

/// Lets the queues of all GPUs go on. A change whose connection has ended meanwhile is looked at by
/// nobody else.
pub fn advance_words() {
    let queues: Vec<_> = QUEUES.lock().iter().map(|(_, queue)| Arc::clone(queue)).collect();
    queues.iter().for_each(|queue| queue.advance());
}

fn queue_of(device: u32) -> Result<Arc<Queue>, GpuError> {
    let mut queues = QUEUES.lock();
    if let Some((_, queue)) = queues.iter().find(|(other, _)| *other == device) {
        return Ok(Arc::clone(queue));
    }
    let queue =
        Arc::new(Queue { waiting: Mutex::default(), mover: Mutex::new(Mover::new(device)?) });
    queues.push((device, Arc::clone(&queue)));
    Ok(queue)
}

impl WordChange {
    /// The result of the change; `None` while it waits or is under way.
    pub fn ended(&self) -> Option<Result<(), GpuError>> {
        if self.end.get().is_none() {
            self.queue.advance();
        }
        self.end.get().cloned()
    }
}

impl Drop for WordChange {
    fn drop(&mut self) {
        if self.end.get().is_none() {
            self.queue.waiting.lock().retain(|order| !Arc::ptr_eq(&order.end, &self.end));
        }
    }
}

/// The changes of the words of one GPU.
#[derive(Debug)]
struct Queue {
    /// The changes that have not begun.
    waiting: Mutex<VecDeque<Order>>,
    mover: Mutex<Mover>,
}

#[derive(Debug)]
struct Order {
    address: u64,
    change: Change,
    in_use: RegionUse,
    end: End,
}

impl Queue {
    /// Ends and begins changes as far as no copy has to be waited for. Does nothing while another
    /// thread does this.
    fn advance(&self) {
        let Some(mut mover) = self.mover.try_lock() else { return };
        loop {
            if mover.under_way.is_none() {
                let Some(order) = self.waiting.lock().pop_front() else { return };
                mover.begin(order);
            }
            if !mover.go_on() {
                return;
            }
        }
    }
}

/// Makes one change at a time.
#[derive(Debug)]
struct Mover {
    copier: WordCopier,
    under_way: Option<(Order, Step)>,
}

/// The copy that is under way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    Fetch,
    /// Of this value.
    Store(u64),
}

impl Mover {
    fn new(device: u32) -> Result<Self, GpuError> {
        Ok(Self { copier: WordCopier::new(device)?, under_way: None })
    }

    /// Begins the first copy of a change. No copy may be under way.
    fn begin(&mut self, order: Order) {
        match order.change {
            Change::Add(_) => self.copy(order, Step::Fetch),
            Change::Set(value) => self.copy(order, Step::Store(value)),
        }
    }

    /// Goes on with the change that is under way. Returns whether it has ended.
    fn go_on(&mut self) -> bool {
        let Some((order, step)) = self.under_way.take() else { return true };
        match (self.copier.is_done(), step) {
            (Ok(false), step) => {
                self.under_way = Some((order, step));
                return false;
            }
            (Ok(true), Step::Fetch) => {
                let value = order.change.of(self.copier.value());
                self.copy(order, Step::Store(value));
                return self.under_way.is_none();
            }
            (Ok(true), Step::Store(_)) => order.end(Ok(())),
            (Err(e), _) => order.end(Err(e)),
        }
        true
    }

    /// Starts a copy. A copy that cannot be started ends the change.
    fn copy(&mut self, order: Order, step: Step) {
        let address = order.address;
        // SAFETY: the word's region is in use until the change has ended, and no copy runs.
        let started = unsafe {
            match step {
                Step::Fetch => self.copier.fetch(address),
                Step::Store(value) => self.copier.store(address, value),
            }
        };
        match started {
            Ok(()) => self.under_way = Some((order, step)),
            Err(e) => order.end(Err(e)),
        }
    }
}

impl Order {
    /// Ends a change. Its region is no longer in use when the result shows.
    fn end(self, result: Result<(), GpuError>) {
        drop(self.in_use);
        // Nobody else sets it.
        let _ = self.end.set(result);
    }
}
