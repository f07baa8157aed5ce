//! Payload for GPU memory: it is received into chunks of locked host memory, and copied from there while the next
//! payload is being received.

use std::collections::VecDeque;

use uccl_device::cuda::{Direction, GpuError};
use uccl_fabric::{
    gpu::{CHUNK, Chunk, Copier, CopyBy, Copying},
    lane::OpName,
    mem::{Located, Span},
    pieces::Stretch,
    signal::Word,
};
use uccl_wire::frame::Status;

use super::ops::ReadTarget;

/// The most chunks that are copied to GPUs at once.
const AHEAD: usize = 4;

/// What received data belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Purpose {
    /// A write of the peer's.
    Write(u64),
    /// A read of ours.
    Read(OpName),
}

/// How an operation ends once its data has landed.
pub(super) enum End {
    /// The peer gets this answer. If it is a good one, the word changes first.
    Ack(Status, Option<Word>),
    /// Our read ends.
    Data(ReadTarget),
}

/// A chunk that is being filled.
pub(super) struct Filling {
    pub(super) chunk: Chunk,
    /// Bytes in the chunk.
    pub(super) len: usize,
    /// What of its operation's memory follows, from the place of the first byte on.
    pub(super) rest: Stretch,
}

/// A copy that was started, or the end of an operation.
struct Upload {
    copy: Option<Copying>,
    purpose: Purpose,
    end: Option<End>,
}

/// A copy that has ended, or the end of an operation that has been reached.
pub(super) struct Landed {
    pub(super) purpose: Purpose,
    pub(super) result: Result<(), GpuError>,
    pub(super) end: Option<End>,
}

/// Data on its way to GPUs, in the order in which it came.
pub(super) struct Uploader {
    copier: Copier,
    filling: Option<Filling>,
    under_way: VecDeque<Upload>,
}

impl Uploader {
    pub(super) fn new(by: &CopyBy) -> Self {
        Self { copier: Copier::new(by), filling: None, under_way: VecDeque::new() }
    }

    /// Whether all copies have landed.
    pub(super) fn is_idle(&self) -> bool {
        self.under_way.is_empty()
    }

    /// Whether a copy may be writing our region in this slot.
    pub(super) fn touches(&mut self, slot: u32) -> bool {
        let Self { copier, under_way, .. } = self;
        let copies = under_way.iter().filter_map(|upload| upload.copy.as_ref());
        copies.into_iter().any(|copy| copier.may_touch(copy, slot))
    }

    /// Room for data that belongs at the start of `rest`. `None`: copies must end first.
    pub(super) fn room(&mut self, device: u32, rest: Stretch) -> Result<Option<Span>, GpuError> {
        if self.filling.is_none() {
            if self.under_way.len() >= AHEAD {
                return Ok(None);
            }
            let chunk = self.copier.chunk(device)?;
            self.filling = Some(Filling { chunk, len: 0, rest });
        }
        Ok(self.filling.as_ref().map(|filling| Span {
            addr: filling.chunk.addr() + filling.len,
            len: CHUNK - filling.len,
        }))
    }

    /// Records that this many bytes were put into the room.
    pub(super) fn filled(&mut self, len: usize) {
        if let Some(filling) = &mut self.filling {
            filling.len += len;
        }
    }

    /// Whether the chunk being filled is full.
    pub(super) fn is_full(&self) -> bool {
        self.filling.as_ref().is_some_and(|filling| filling.len == CHUNK)
    }

    /// Takes out the chunk that is being filled.
    pub(super) fn take(&mut self) -> Option<Filling> {
        self.filling.take()
    }

    /// Starts to copy a chunk to its place.
    ///
    /// # Errors
    /// No copy of it runs then.
    ///
    /// # Safety
    /// The memory must be as long as the data in the chunk. It must stay valid until this has [landed](Self::landed);
    /// memory in the regions of `slots`, while it is [touched](Self::touches).
    pub(super) unsafe fn start(
        &mut self,
        purpose: Purpose,
        chunk: Chunk,
        memory: &[Located],
        slots: impl IntoIterator<Item = u32>,
    ) -> Result<(), GpuError> {
        // SAFETY: the caller's promise.
        let copy = unsafe { self.copier.start(chunk, memory, slots, Direction::HostToDevice)? };
        self.under_way.push_back(Upload { copy: Some(copy), purpose, end: None });
        Ok(())
    }

    /// Makes an operation end when all the copies before it have landed.
    pub(super) fn end(&mut self, purpose: Purpose, end: End) {
        self.under_way.push_back(Upload { copy: None, purpose, end: Some(end) });
    }

    /// Changes the answer to a write whose data did not all land.
    pub(super) fn fail(&mut self, purpose: Purpose, status: Status) {
        for upload in self.under_way.iter_mut().filter(|upload| upload.purpose == purpose) {
            if let Some(End::Ack(ack, _)) = &mut upload.end {
                *ack = status;
            }
        }
    }

    /// The next copy or end, if it has landed.
    pub(super) fn landed(&mut self) -> Option<Landed> {
        let first = self.under_way.front()?;
        let result = match &first.copy {
            Some(copy) => self.copier.ended(copy)?,
            None => Ok(()),
        };
        let Upload { copy, purpose, end } = self.under_way.pop_front()?;
        drop(copy.map(|copy| self.copier.release(copy)));
        Some(Landed { purpose, result, end })
    }

    /// Waits until no copy runs any more.
    pub(super) fn settle(&mut self) {
        self.copier.settle();
    }

    /// Waits as [`settle`](Self::settle) does and forgets everything, for a lane that dies.
    pub(super) fn clear(&mut self) {
        self.settle();
        self.filling = None;
        self.under_way.clear();
    }
}
