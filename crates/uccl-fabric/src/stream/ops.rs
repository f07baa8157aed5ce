//! The operations that a lane has posted and that have not ended, under the numbers that travel in
//! frames.

use std::sync::Arc;

use slab::Slab;

use crate::lane::{Completion, OpError, OpKind, OpName, Operation, Spans};

/// An operation that has not ended.
pub(super) struct InFlight {
    pub(super) kind: OpKind,
    pub(super) len: u64,
    pub(super) done: Arc<dyn Completion>,
    /// Where a read's data goes, while no frame is filling it.
    pub(super) target: Option<ReadTarget>,
    /// Cut short: it ends in [`OpError::Cancelled`] whatever the peer says.
    pub(super) cut: bool,
    generation: u32,
}

/// Where a read's data goes.
pub(super) struct ReadTarget {
    pub(super) spans: Spans,
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
    reads: usize,
    pub(super) bytes: u64,
}

impl Ops {
    /// How many of them are reads.
    pub(super) fn reads(&self) -> usize {
        self.reads
    }

    pub(super) fn insert(&mut self, op: &Operation) -> OpName {
        self.generation = self.generation.wrapping_add(1);
        let len = op.len();
        self.bytes += len;
        self.reads += usize::from(op.kind == OpKind::Read);
        let target = (op.kind == OpKind::Read).then(|| ReadTarget {
            spans: op.local.clone(),
            received: 0,
            failed: None,
        });
        let index = self.slab.insert(InFlight {
            kind: op.kind,
            len,
            done: Arc::clone(&op.done),
            target,
            cut: false,
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
        self.reads -= usize::from(op.kind == OpKind::Read);
        Some(op)
    }

    pub(super) fn len(&self) -> usize {
        self.slab.len()
    }

    /// Takes everything, for a lane that dies.
    pub(super) fn drain(&mut self) -> Vec<InFlight> {
        self.bytes = 0;
        self.reads = 0;
        self.slab.drain().collect()
    }
}

fn split(name: OpName) -> (usize, u32) {
    ((name.0 & 0xFFFF_FFFF) as usize, (name.0 >> 32) as u32)
}
