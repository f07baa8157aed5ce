//! The operations that a lane has posted and that have not ended, under the numbers that travel in
//! frames.

use std::sync::Arc;

use slab::Slab;

use super::{MAX_READS, MAX_WRITES, cursor::Cursor};

use crate::lane::{Completion, OpError, OpKind, OpName, Operation, Spans};

/// An operation that has not ended.
pub(super) struct InFlight {
    pub(super) kind: OpKind,
    pub(super) len: u64,
    pub(super) done: Arc<dyn Completion>,
    /// Where a read's data goes, while no frame is filling it.
    pub(super) target: Option<ReadTarget>,
    /// Nobody wants it any more, and the peer has been told.
    pub(super) is_disowned: bool,
    /// How it ends whatever the peer says.
    pub(super) doomed: Option<OpError>,
    /// Until all of it has been sent, no answer to it can be true.
    pub(super) sent: Sent,
    generation: u32,
}

/// How far an operation has been sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Sent {
    Nothing,
    Some,
    All,
}

/// Where a read's data goes.
pub(super) struct ReadTarget {
    pub(super) spans: Spans,
    /// The GPU that alone reaches it.
    pub(super) device: Option<u32>,
    /// Where the next byte goes.
    pub(super) at: Cursor,
    /// Bytes that have arrived.
    pub(super) received: u64,
    /// Data is thrown away from now on.
    pub(super) failed: Option<OpError>,
}

/// Operations by number. A number carries a generation, so an answer to an operation that has ended
/// is noticed.
#[derive(Default)]
pub(super) struct Ops {
    slab: Slab<InFlight>,
    generation: u32,
    /// Operations that were begun and have not ended.
    reads: usize,
    writes: usize,
    /// Somebody could not begin an operation.
    waiting: bool,
    /// Now he could.
    reopened: bool,
    pub(super) bytes: u64,
}

impl Ops {
    pub(super) fn insert(&mut self, op: &Operation) -> OpName {
        // Lanes that wrap this one tell their own names apart by the two highest bits.
        self.generation = self.generation.wrapping_add(1) & (u32::MAX >> 2);
        let len = op.len();
        self.bytes += len;
        let target = (op.kind == OpKind::Read).then(|| ReadTarget {
            spans: op.local.clone(),
            device: op.memory.device_only(),
            at: Cursor::default(),
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
            sent: Sent::Nothing,
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
        if op.sent != Sent::Nothing {
            match op.kind {
                OpKind::Read => self.reads -= 1,
                OpKind::Write => self.writes -= 1,
            }
            self.reopened |= std::mem::take(&mut self.waiting);
        }
        Some(op)
    }

    /// Notes that an operation begins to be sent, unless too many are under way already.
    pub(super) fn begin(&mut self, name: OpName) -> bool {
        let (reads, writes) = (self.reads, self.writes);
        let Some(op) = self.get_mut(name) else { return true };
        if op.sent != Sent::Nothing {
            return true;
        }
        let has_room = match op.kind {
            OpKind::Read => reads < MAX_READS,
            OpKind::Write => writes < MAX_WRITES,
        };
        if has_room {
            op.sent = Sent::Some;
            match op.kind {
                OpKind::Read => self.reads += 1,
                OpKind::Write => self.writes += 1,
            }
        } else {
            self.waiting = true;
        }
        has_room
    }

    /// Notes how an operation is to end, if nothing has been noted before.
    pub(super) fn doom(&mut self, name: OpName, error: OpError) {
        if let Some(op) = self.get_mut(name) {
            op.doomed.get_or_insert(error);
        }
    }

    /// Notes that all of an operation has been sent.
    pub(super) fn sent(&mut self, name: OpName) {
        if let Some(op) = self.get_mut(name) {
            op.sent = Sent::All;
        }
    }

    /// Whether an operation can be begun that could not be before; says so once.
    pub(super) fn take_reopened(&mut self) -> bool {
        std::mem::take(&mut self.reopened)
    }

    pub(super) fn len(&self) -> usize {
        self.slab.len()
    }

    /// Takes everything, for a lane that dies.
    pub(super) fn drain(&mut self) -> Vec<InFlight> {
        self.bytes = 0;
        (self.reads, self.writes) = (0, 0);
        self.slab.drain().collect()
    }
}

fn split(name: OpName) -> (usize, u32) {
    ((name.0 & 0xFFFF_FFFF) as usize, (name.0 >> 32) as u32)
}
