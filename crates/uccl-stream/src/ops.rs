//! The operations that a lane has posted and that have not ended, by the numbers that frames carry.

use std::sync::Arc;

use slab::Slab;
use uccl_fabric::{
    lane::{Completion, OpError, OpKind, OpName, Operation, Spans},
    pieces::Stretch,
};

use super::{MAX_READS, MAX_WRITES};

/// An operation that has not ended.
pub(super) struct InFlight {
    pub(super) kind: OpKind,
    pub(super) len: u64,
    pub(super) done: Arc<dyn Completion>,
    /// The destination of a read's data, while no frame is filling it.
    pub(super) target: Option<ReadTarget>,
    /// It was cancelled: its poster and the peer know, but data may still come.
    pub(super) is_disowned: bool,
    /// If set, the operation ends with this error instead of the peer's answer.
    pub(super) doomed: Option<OpError>,
    /// How much has been sent. The peer cannot rightly answer before all of it has been.
    pub(super) sent: SendProgress,
    generation: u32,
}

/// How far an operation has been sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SendProgress {
    Nothing,
    Some,
    All,
}

/// The destination of a read's data.
pub(super) struct ReadTarget {
    pub(super) spans: Spans,
    /// The GPU, if only that GPU reaches it.
    pub(super) device: Option<u32>,
    /// The destination of the data that has not arrived.
    pub(super) rest: Stretch,
    /// Bytes that have arrived.
    pub(super) received: u64,
    /// If set, further data is discarded, and the read ends with this error.
    pub(super) failed: Option<OpError>,
}

/// Operations by number. A number carries a generation, so that an answer to an operation that has
/// already ended is noticed.
#[derive(Default)]
pub(super) struct Ops {
    slab: Slab<InFlight>,
    generation: u32,
    /// Operations that were begun and have not ended.
    reads: usize,
    writes: usize,
    /// An operation could not be begun, because too many were under way.
    waiting: bool,
    /// Such an operation could be begun now.
    reopened: bool,
    pub(super) bytes: u64,
}

impl Ops {
    pub(super) fn insert(&mut self, op: &Operation) -> OpName {
        // Lanes that wrap this one mark their own names with the two highest bits.
        self.generation = self.generation.wrapping_add(1) & (u32::MAX >> 2);
        let len = op.len();
        self.bytes += len;
        let target = (op.kind == OpKind::Read).then(|| ReadTarget {
            spans: op.local.clone(),
            device: op.memory.device_only(),
            rest: Stretch::all(&op.local[..]),
            received: 0,
            failed: None,
        });
        let index = self.slab.insert(InFlight {
            kind: op.kind,
            len,
            done: Arc::clone(&op.done),
            target,
            is_disowned: false,
            doomed: None,
            sent: SendProgress::Nothing,
            generation: self.generation,
        });
        OpName(u64::from(self.generation) << 32 | index as u64)
    }

    pub(super) fn get_mut(&mut self, name: OpName) -> Option<&mut InFlight> {
        let (index, generation) = split(name);
        self.slab.get_mut(index).filter(|op| op.generation == generation)
    }

    pub(super) fn remove(&mut self, name: OpName) -> Option<InFlight> {
        self.get_mut(name)?;
        let op = self.slab.remove(split(name).0);
        self.bytes -= op.len;
        if op.sent != SendProgress::Nothing {
            match op.kind {
                OpKind::Read => self.reads -= 1,
                OpKind::Write => self.writes -= 1,
            }
            self.reopened |= std::mem::take(&mut self.waiting);
        }
        Some(op)
    }

    /// Records that an operation begins to be sent, unless too many are under way already.
    pub(super) fn begin(&mut self, name: OpName) -> bool {
        let (reads, writes) = (self.reads, self.writes);
        let Some(op) = self.get_mut(name) else { return true };
        if op.sent != SendProgress::Nothing {
            return true;
        }
        let has_room = match op.kind {
            OpKind::Read => reads < MAX_READS,
            OpKind::Write => writes < MAX_WRITES,
        };
        if has_room {
            op.sent = SendProgress::Some;
            match op.kind {
                OpKind::Read => self.reads += 1,
                OpKind::Write => self.writes += 1,
            }
        } else {
            self.waiting = true;
        }
        has_room
    }

    /// Sets the error with which an operation will end, if it has none yet.
    pub(super) fn doom(&mut self, name: OpName, error: OpError) {
        if let Some(op) = self.get_mut(name) {
            op.doomed.get_or_insert(error);
        }
    }

    /// Records that all of an operation has been sent.
    pub(super) fn sent(&mut self, name: OpName) {
        if let Some(op) = self.get_mut(name) {
            op.sent = SendProgress::All;
        }
    }

    /// Whether an operation can be begun that could not be before. True only once.
    pub(super) fn take_reopened(&mut self) -> bool {
        std::mem::take(&mut self.reopened)
    }

    pub(super) fn len(&self) -> usize {
        self.slab.len()
    }

    /// Takes all operations, for a lane that dies.
    pub(super) fn drain(&mut self) -> Vec<InFlight> {
        self.bytes = 0;
        (self.reads, self.writes) = (0, 0);
        self.slab.drain().collect()
    }
}

fn split(name: OpName) -> (usize, u32) {
    ((name.0 & 0xFFFF_FFFF) as usize, (name.0 >> 32) as u32)
}
