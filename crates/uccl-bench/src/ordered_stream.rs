//! Transfers in the order of a CUDA stream: each follows work on it, and later work on the stream
//! follows the transfer. The host waits for neither.
//!
//! The work changes the transfer's bytes, so that the bytes show whether the order was kept: the
//! bytes to send are right only between the work before their transfer and the work after it, and
//! the stream itself copies received bytes for the check.

use anyhow::{Context as _, Result};
use uccl_device::cuda::{DeviceBuffer, Direction, Priority, Stream};
use uccl_p2p::CudaStream;

use super::{
    buffer::{HostBuffer, POISON},
    kinds::OpKind,
    place,
};

/// Bytes of a transfer that work on the stream touches, at most: its first ones.
const HEAD: usize = 4 << 10;

/// A stream, and the memory that work on it needs.
pub(crate) struct OrderedStream {
    stream: Stream,
    gpu: u32,
    /// The first bytes of each slot: as they are to be sent, or as the stream found them after
    /// their transfer.
    heads: DeviceBuffer,
    head_len: usize,
    sends: bool,
}

impl OrderedStream {
    /// For `slots` buffers on a GPU, the first pieces of which are `piece_len` long.
    pub(crate) fn new(gpu: u32, op: OpKind, slots: usize, piece_len: usize) -> Result<Self> {
        let context = place::context(gpu)?;
        let head_len = piece_len.min(HEAD);
        let heads = DeviceBuffer::new(context, head_len * slots)
            .with_context(|| format!("no memory for the work of {slots} transfers"))?;
        let stream = Stream::new(context, Priority::Normal)?;
        Ok(Self { stream, gpu, heads, head_len, sends: op != OpKind::Read })
    }

    /// The stream that transfers are posted behind, and that waits for them.
    pub(crate) fn stream(&self) -> CudaStream {
        // SAFETY: the stream lives as long as this, and the calls that get it end before.
        unsafe { CudaStream::new(self.gpu, self.stream.handle()) }
    }

    /// The work before the transfer of a slot with its first piece at `piece`.
    pub(crate) fn before(&self, slot: usize, piece: usize) -> Result<()> {
        match self.sends {
            true => self.copy(piece as u64, self.head(slot)),
            false => self.poison_head(piece),
        }
    }

    /// The work after it.
    pub(crate) fn after(&self, slot: usize, piece: usize) -> Result<()> {
        match self.sends {
            true => self.poison_head(piece),
            false => self.copy(self.head(slot), piece as u64),
        }
    }

    /// Moves the bytes to send from a filled slot into `heads`, and poisons them in the slot.
    pub(crate) fn keep(&self, slot: usize, piece: usize) -> Result<()> {
        if self.sends {
            self.copy(self.head(slot), piece as u64)?;
            self.poison_head(piece)?;
        }
        self.finish()
    }

    /// The first byte that the stream copied before it arrived, if any, in a slot that was read.
    /// The slot itself has been checked.
    pub(crate) fn check(&self, slot: usize, piece: usize) -> Result<Option<String>> {
        if self.sends {
            return Ok(None);
        }
        let (seen, there) = (self.on_host(self.head(slot))?, self.on_host(piece as u64)?);
        let first = seen.bytes().iter().zip(there.bytes()).position(|(seen, there)| seen != there);
        Ok(first.map(|at| format!("its stream went on before byte {at} had arrived")))
    }

    /// Waits until all the work has ended.
    pub(crate) fn finish(&self) -> Result<()> {
        Ok(self.stream.synchronize()?)
    }

    fn head(&self, slot: usize) -> u64 {
        self.heads.address() + (slot * self.head_len) as u64
    }

    fn copy(&self, to: u64, from: u64) -> Result<()> {
        // SAFETY: memory of this GPU, of a slot and of `heads`, both of which live until the stream
        // is idle (see the Drop of the owner of the slots); transfers touch the slot in the order
        // of the stream.
        Ok(unsafe { self.stream.copy(to, from, self.head_len, Direction::DeviceToDevice) }?)
    }

    fn poison_head(&self, piece: usize) -> Result<()> {
        // SAFETY: as in `copy`.
        Ok(unsafe { self.stream.fill(piece as u64, POISON, self.head_len) }?)
    }

    fn on_host(&self, from: u64) -> Result<HostBuffer> {
        let copy = HostBuffer::heap(self.head_len)?;
        let (to, len) = (copy.address() as u64, self.head_len);
        // SAFETY: both ranges are `len` bytes long; the host's is this function's own, and the wait
        // ends before it is freed.
        unsafe { self.stream.copy(to, from, len, Direction::DeviceToHost) }?;
        self.finish()?;
        Ok(copy)
    }
}
