//! A GPU's memory of a point. The CPU cannot touch it: a copy on the host is filled and checked.

use anyhow::{Context as _, Result};
use uccl_device::cuda::{Context, DeviceBuffer, Direction, Priority, Stream};

use super::host::{HostBuffer, POISON, too_much};
use crate::pieces::Pieces;

pub(crate) struct GpuBuffer {
    memory: DeviceBuffer,
    stream: Stream,
}

impl GpuBuffer {
    pub(crate) fn new(context: &'static Context, len: usize) -> Result<Self> {
        let memory = DeviceBuffer::new(context, len).with_context(|| too_much(len))?;
        Ok(Self { memory, stream: Stream::new(context, Priority::Normal)? })
    }

    pub(crate) fn address(&self) -> usize {
        self.memory.address() as usize
    }

    pub(crate) fn len(&self) -> usize {
        self.memory.len_bytes()
    }

    pub(crate) fn poison(&mut self) -> Result<()> {
        let (address, len) = (self.memory.address(), self.len());
        // SAFETY: the whole of one allocation, which lives until after the wait; the two sides
        // agree on when transfers run, which is not now.
        unsafe { self.stream.fill(address, POISON, len) }?;
        Ok(self.stream.synchronize()?)
    }

    pub(crate) fn fill(&mut self, pieces: &Pieces, seed: u64) -> Result<()> {
        let mut pattern = HostBuffer::heap(self.len())?;
        pattern.fill(pieces, seed);
        let (to, from) = (self.memory.address(), pattern.address() as u64);
        self.copy(to, from, Direction::HostToDevice)
    }

    pub(crate) fn check(&self, pieces: &Pieces, seed: u64) -> Result<Option<String>> {
        let arrived = HostBuffer::heap(self.len())?;
        let (to, from) = (arrived.address() as u64, self.memory.address());
        self.copy(to, from, Direction::DeviceToHost)?;
        Ok(arrived.check(pieces, seed))
    }

    /// Copies all of its memory to or from host memory that is as long and that nobody else
    /// touches.
    fn copy(&self, to: u64, from: u64, direction: Direction) -> Result<()> {
        // SAFETY: both are as long as this buffer, the host's is the caller's own and lives until
        // after the wait; no transfer runs now.
        unsafe { self.stream.copy(to, from, self.len(), direction) }?;
        Ok(self.stream.synchronize()?)
    }
}
