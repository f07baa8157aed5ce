//! Operations of a group and their requests.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use uccl_p2p::{
    Change, Error, Iov, Op, Request, Signal, Status, TransferHandle, TryOutcome,
    wire::advert::Advert,
};

use super::{
    group::Group,
    slots::{Slots, Ticket},
};
use crate::{fault::Fault, rma_error::RmaError};

/// The time in which operations may end by themselves when their contexts are destroyed.
const GRACE: Duration = Duration::from_millis(100);
/// Every so many passes the ranks' connections are looked at.
const PASSES: u32 = 64;
/// The bytes of a signal's word.
const WORD: u64 = 8;

/// A group of ranks that have joined, with its operations.
pub(crate) struct Coll {
    pub(crate) group: Arc<Group>,
    operations: Mutex<Operations>,
    passes: AtomicU32,
}

/// Contexts of a group: queues of operations, each in order.
pub(crate) struct Contexts {
    pub(crate) coll: Arc<Coll>,
    first: u32,
    count: u32,
}

/// An operation that NCCL asks for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operation {
    pub(crate) context: u32,
    pub(crate) rank: usize,
    pub(crate) op: Op,
    /// Local memory; none for a signal alone.
    pub(crate) local: Option<Iov>,
    /// The region of the rank's, and the offset of its bytes there.
    pub(crate) remote: (usize, u64),
    pub(crate) signal: Option<SignalPlace>,
}

/// The word of a signal, and its change.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SignalPlace {
    pub(crate) region: usize,
    pub(crate) offset: u64,
    pub(crate) change: Change,
}

struct Operations {
    requests: Slots<Stand>,
    /// Places of operations that could not be posted yet, in their order.
    waiting: VecDeque<usize>,
}

/// The state of a request.
struct Stand {
    operation: Operation,
    progress: Progress,
}

enum Progress {
    /// The peer has not told of its region yet, or an earlier operation waits for that: since when.
    Waiting(Instant),
    Posted(TransferHandle),
    Done,
    Failed(RmaError),
}

impl Coll {
    pub(crate) fn new(group: Arc<Group>) -> Arc<Self> {
        let operations = Operations { requests: Slots::new(), waiting: VecDeque::new() };
        Arc::new(Self { group, operations: Mutex::new(operations), passes: AtomicU32::new(0) })
    }

    pub(crate) fn contexts(self: &Arc<Self>, count: u32) -> Contexts {
        Contexts { coll: Arc::clone(self), first: self.group.take_contexts(count), count }
    }

    /// Begins an operation; returns its request.
    pub(crate) fn begin(&self, operation: Operation) -> Result<*const Ticket, Fault> {
        self.group.check()?;
        let operations = &mut *self.operations.lock();
        let is_behind = |place: &usize| {
            let earlier = operations.requests.get(*place);
            earlier.is_some_and(|earlier| earlier.operation.is_ordered_with(&operation))
        };
        let posted = match operations.waiting.iter().any(is_behind) {
            true => None,
            false => self.post(&operation).inspect_err(|error| self.group.fail(error))?,
        };
        let is_waiting = posted.is_none();
        let progress = posted.unwrap_or_else(|| Progress::Waiting(Instant::now()));
        let ticket = operations.requests.insert(Stand { operation, progress });
        if is_waiting {
            // SAFETY: the slots keep the ticket.
            operations.waiting.push_back(unsafe { (*ticket).place() });
        }
        Ok(ticket)
    }

    /// Whether a request has ended; it is gone then.
    pub(crate) fn test(&self, ticket: &Ticket) -> Result<bool, Fault> {
        let operations = &mut *self.operations.lock();
        if !operations.waiting.is_empty() {
            self.post_waiting(operations)?;
        }
        let stand = operations.requests.get_mut(ticket.place());
        let stand = stand.ok_or(Fault::Misuse("test", "the request has ended"))?;
        let ended = match &stand.progress {
            Progress::Waiting(_) => return self.group.check().map(|()| false).map_err(Fault::from),
            Progress::Done => Ok(()),
            Progress::Failed(error) => Err(error.clone()),
            Progress::Posted(transfer) => match transfer.poll() {
                Ok(Status::Pending) => return Ok(false),
                Ok(Status::Done(_)) => Ok(()),
                Ok(Status::Failed(error)) | Err(error) => Err(stand.operation.failed(error)),
            },
        };
        operations.requests.remove(ticket.place());
        ended.inspect_err(|error| self.group.fail(error))?;
        Ok(true)
    }

    /// Takes messages, begins operations that could not begin before, and looks at the ranks now
    /// and then.
    pub(crate) fn progress(&self) -> Result<(), RmaError> {
        self.group.engine.take_notes()?;
        if let Some(mut operations) = self.operations.try_lock()
            && !operations.waiting.is_empty()
        {
            self.post_waiting(&mut operations)?;
        }
        match self.passes.fetch_add(1, Ordering::Relaxed) % PASSES {
            0 => self.group.look_at_members(),
            _ => self.group.check(),
        }
    }

    /// Posts an operation; `None` while the rank's region is not known.
    fn post(&self, operation: &Operation) -> Result<Option<Progress>, RmaError> {
        let Operation { rank, op, context, .. } = *operation;
        let Some(conn) = self.group.conn(rank) else {
            return Err(RmaError::Failed(format!("rank {rank} has left")));
        };
        let Some(target) = self.target(operation)? else { return Ok(None) };
        let (iovs, adverts) = (operation.local.as_slice(), target.memory.as_slice());
        if iovs.is_empty() && target.signal.is_none() {
            return Ok(Some(Progress::Done));
        }
        let signal = target.signal;
        let request = Request { signal, context, ..Request::new(conn, op, iovs, adverts) };
        match self.group.engine.endpoint.try_run_held(&request) {
            Ok(TryOutcome::Done(_)) => Ok(Some(Progress::Done)),
            Ok(TryOutcome::Under(transfer)) => Ok(Some(Progress::Posted(transfer))),
            Err(Error::Full { .. }) => Ok(None),
            Err(error) => Err(operation.failed(error)),
        }
    }

    /// The rank's memory for an operation; `None` while it is not known.
    fn target(&self, operation: &Operation) -> Result<Option<Target>, RmaError> {
        let Operation { rank, remote: (region, offset), .. } = *operation;
        let part = |region, offset, len| {
            let Some(advert) = self.group.region_of(rank, region) else { return Ok(None) };
            let part = advert.part(offset, len);
            let outside = || Error::Invalid(format!("{len} bytes at {offset} of region {region}"));
            part.map(Some).ok_or_else(|| operation.failed(outside()))
        };
        let mut target = Target { memory: None, signal: None };
        if let Some(iov) = operation.local {
            target.memory = part(region, offset, iov.len as u64)?;
            if target.memory.is_none() {
                return Ok(None);
            }
        }
        if let Some(SignalPlace { region, offset, change }) = operation.signal {
            let Some(advert) = part(region, offset, WORD)? else { return Ok(None) };
            target.signal = Some(Signal { advert, change, strong: true });
        }
        Ok(Some(target))
    }

    /// Posts operations that could not be posted before; allocates nothing.
    fn post_waiting(&self, operations: &mut Operations) -> Result<(), RmaError> {
        self.group.engine.take_notes()?;
        let Operations { requests, waiting } = operations;
        let mut held = 0;
        for _ in 0..waiting.len() {
            let Some(place) = waiting.pop_front() else { break };
            let Some(stand) = requests.get(place) else { continue };
            let (operation, Progress::Waiting(since)) = (stand.operation, &stand.progress) else {
                continue;
            };
            // Those that this pass has held back are the last ones.
            let is_behind = waiting.iter().rev().take(held).any(|other| {
                let other = requests.get(*other);
                other.is_some_and(|other| other.operation.is_ordered_with(&operation))
            });
            let progress = match if is_behind { Ok(None) } else { self.post(&operation) } {
                Ok(Some(progress)) => progress,
                Ok(None) if since.elapsed() > self.group.engine.limit => {
                    Progress::Failed(operation.too_late(self.group.engine.limit))
                }
                Ok(None) => {
                    held += 1;
                    waiting.push_back(place);
                    continue;
                }
                Err(error) => Progress::Failed(error),
            };
            if let Some(stand) = requests.get_mut(place) {
                stand.progress = progress;
            }
        }
        Ok(())
    }

    /// Ends the operations of some contexts. Afterwards nothing touches their memory for them.
    fn end(&self, first: u32, count: u32) {
        let is_of_them =
            |stand: &Stand| (first..first.saturating_add(count)).contains(&stand.operation.context);
        let operations = &mut *self.operations.lock();
        let until = Instant::now() + GRACE;
        let mut unfinished = unfinished_ranks(&mut operations.requests, is_of_them);
        while !unfinished.is_empty() && Instant::now() < until {
            thread::yield_now();
            unfinished = unfinished_ranks(&mut operations.requests, is_of_them);
        }
        unfinished.into_iter().for_each(|rank| self.group.give_up(rank));
        let used = operations.requests.used();
        let places: Vec<_> =
            used.filter(|(_, stand)| is_of_them(stand)).map(|(place, _)| place).collect();
        operations.waiting.retain(|place| !places.contains(place));
        for place in places {
            operations.requests.remove(place);
        }
    }

    /// Closes the group, with all that is under way.
    pub(crate) fn close(&self) {
        self.end(0, u32::MAX);
        self.group.close();
    }
}

/// The ranks with operations that have been posted and have not ended.
fn unfinished_ranks(
    requests: &mut Slots<Stand>,
    is_of_them: impl Fn(&Stand) -> bool,
) -> Vec<usize> {
    let is_open = |stand: &Stand| match &stand.progress {
        Progress::Posted(transfer) => matches!(transfer.poll(), Ok(Status::Pending)),
        Progress::Waiting(_) | Progress::Done | Progress::Failed(_) => false,
    };
    let used = requests.used().map(|(_, stand)| &*stand);
    let open = used.filter(|stand| is_of_them(stand) && is_open(stand));
    let mut ranks: Vec<_> = open.map(|stand| stand.operation.rank).collect();
    ranks.sort_unstable();
    ranks.dedup();
    ranks
}

/// The memory of a rank's that an operation is about.
struct Target {
    memory: Option<Advert>,
    signal: Option<Signal>,
}

impl Operation {
    /// Whether the one that is begun first must also be posted first.
    fn is_ordered_with(&self, other: &Self) -> bool {
        (self.context, self.rank) == (other.context, other.rank)
    }

    /// Its region has not been told of in time.
    fn too_late(&self, limit: Duration) -> RmaError {
        let of_signal = self.signal.map_or(0, |signal| signal.region);
        let region = if self.local.is_some() { self.remote.0 } else { of_signal };
        let seconds = limit.as_secs();
        let why = format!("region {region} was not registered there within {seconds} s");
        self.failed(Error::Invalid(why))
    }

    fn failed(&self, error: Error) -> RmaError {
        let action = match (self.op, self.signal) {
            (Op::Read, _) => "get",
            (_, None) => "put",
            (_, Some(_)) => "put with signal",
        };
        RmaError::Peer { action, rank: self.rank, error }
    }
}

impl Contexts {
    /// The engine's number of a context; `None` if there is no such one.
    pub(crate) fn number(&self, context: i32) -> Option<u32> {
        let context = u32::try_from(context).ok().filter(|context| *context < self.count)?;
        Some(self.first + context)
    }

    /// Ends the operations that are under way.
    pub(crate) fn end(&self) {
        self.coll.end(self.first, self.count);
    }
}

#[cfg(test)]
mod tests;
