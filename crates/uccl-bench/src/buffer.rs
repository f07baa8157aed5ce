//! Memory of a point: filled, poisoned, looked at.

mod gpu;
mod host;

use anyhow::Result;
use uccl_p2p::Endpoint;

pub(super) use self::{
    gpu::GpuBuffer,
    host::{HostBuffer, POISON},
};
use super::{
    pieces::Pieces,
    place::{self, Place},
};

/// Memory of one transfer, wherever it lies.
pub(crate) enum Buffer {
    Host(HostBuffer),
    Gpu(GpuBuffer),
}

impl Buffer {
    pub(crate) fn new(endpoint: &Endpoint, place: Place, len: usize) -> Result<Self> {
        Ok(match place {
            Place::Heap => Self::Host(HostBuffer::heap(len)?),
            Place::Alloc => Self::Host(HostBuffer::shared(endpoint, len)?),
            Place::Gpu(gpu) => Self::Gpu(GpuBuffer::new(place::context(gpu)?, len)?),
            Place::Pinned(gpu) => Self::Host(HostBuffer::pinned(gpu, len)?),
        })
    }

    pub(crate) fn address(&self) -> usize {
        match self {
            Self::Host(buffer) => buffer.address(),
            Self::Gpu(buffer) => buffer.address(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Host(buffer) => buffer.len(),
            Self::Gpu(buffer) => buffer.len(),
        }
    }

    pub(crate) fn poison(&mut self) -> Result<()> {
        match self {
            Self::Host(buffer) => {
                buffer.poison();
                Ok(())
            }
            Self::Gpu(buffer) => buffer.poison(),
        }
    }

    /// Fills pieces that lie at `pieces` with the pattern of a seed.
    pub(crate) fn fill(&mut self, pieces: &Pieces, seed: u64) -> Result<()> {
        match self {
            Self::Host(buffer) => {
                buffer.fill(pieces, seed);
                Ok(())
            }
            Self::Gpu(buffer) => buffer.fill(pieces, seed),
        }
    }

    /// Checks memory that was poisoned and then written to; returns a description of the first
    /// fault.
    pub(crate) fn check(&self, pieces: &Pieces, seed: u64) -> Result<Option<String>> {
        match self {
            Self::Host(buffer) => Ok(buffer.check(pieces, seed)),
            Self::Gpu(buffer) => buffer.check(pieces, seed),
        }
    }
}
