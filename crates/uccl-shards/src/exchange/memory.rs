//! The registered memory of a rank's shards.

use uccl_p2p::{Endpoint, Iov, MrId};
use uccl_wire::advert::Advert;

use super::{
    error::{Error, Result},
    mark::Mark,
    shard::{Shard, ShardEntry, Span},
    words::Words,
};

/// The most ranks that may read from one.
pub(crate) const MOST_READERS: usize = 4096;

/// The registered memory of a rank: its shards, its mark, and a word for each of its readers.
pub(crate) struct Memory {
    buffers: Vec<(Span, MrId)>,
    pub(crate) shards: Vec<ShardEntry>,
    pub(crate) mark: Words,
    /// By target: the last version that it has read from here.
    pub(crate) taken: Words,
}

impl Memory {
    /// Registers the allocations of shards, each once.
    ///
    /// # Safety
    /// They must stay allocated until [`close`](Self::close) has returned `Ok`, or the endpoint's
    /// `close` has.
    pub(crate) unsafe fn register(endpoint: &Endpoint, shards: &[Shard]) -> Result<Self> {
        let (mark, taken) = (Words::new(endpoint, 2)?, Words::new(endpoint, MOST_READERS)?);
        mark.set(Mark::default());
        let mut made = Self { buffers: Vec::new(), shards: Vec::new(), mark, taken };
        for shard in shards {
            // SAFETY: the caller's duty is this function's.
            let added = unsafe { made.add(endpoint, shard) };
            if let Err(e) = added {
                made.close(endpoint)?;
                return Err(e);
            }
        }
        Ok(made)
    }

    /// # Safety
    /// As for [`register`](Self::register).
    unsafe fn add(&mut self, endpoint: &Endpoint, shard: &Shard) -> Result<()> {
        let Span { ptr, len } = shard.memory;
        let Some(offset) = shard.ptr.checked_sub(ptr).filter(|offset| *offset <= len) else {
            return Err(Error::Invalid(format!(
                "the shard of {} begins at {:#x}, outside its {len} bytes at {ptr:#x}",
                shard.name, shard.ptr
            )));
        };
        let known = self.buffers.iter().position(|(span, _)| *span == shard.memory);
        let buffer = match known {
            Some(buffer) => buffer,
            None => {
                // SAFETY: the caller keeps the memory allocated.
                let mr = unsafe { endpoint.register(ptr, len) }?;
                self.buffers.push((shard.memory, mr));
                self.buffers.len() - 1
            }
        };
        self.shards.push(ShardEntry {
            name: shard.name.clone(),
            dtype: shard.dtype.clone(),
            element_bytes: shard.element_bytes,
            shape: shard.shape.clone(),
            area: shard.area.clone(),
            buffer,
            offset: offset as u64,
        });
        Ok(())
    }

    /// The adverts of the buffers.
    pub(crate) fn adverts(&self, endpoint: &Endpoint) -> Result<Vec<Advert>> {
        let buffers = self.buffers.iter();
        let iovs: Vec<_> =
            buffers.map(|(span, mr)| Iov { mr: *mr, ptr: span.ptr, len: span.len }).collect();
        Ok(endpoint.advertise_all(&iovs)?)
    }

    /// Part of a buffer.
    pub(crate) fn iov(&self, buffer: usize, offset: u64, len: u64) -> Iov {
        let (span, mr) = self.buffers[buffer];
        Iov { mr, ptr: span.ptr + offset as usize, len: len as usize }
    }

    /// Its mark, as peers see it.
    pub(crate) fn mark(&self) -> Mark {
        Mark::of([self.mark.load(0), self.mark.load(1)]).unwrap_or_default()
    }

    /// Ends all regions. After `Ok` no access of a peer lands in any. Call it again to wait again.
    pub(crate) fn close(&self, endpoint: &Endpoint) -> Result<()> {
        let words = [self.mark.mr(), self.taken.mr()];
        let regions = self.buffers.iter().map(|(_, mr)| *mr).chain(words);
        let mut closed = Ok(());
        for mr in regions {
            if let Err(e) = end_region(endpoint, mr) {
                closed = Err(e);
            }
        }
        closed
    }
}

/// Ends a region, if it has not ended.
pub(crate) fn end_region(endpoint: &Endpoint, mr: MrId) -> Result<()> {
    match endpoint.deregister(mr) {
        Ok(()) | Err(uccl_p2p::Error::UnknownRegion(_) | uccl_p2p::Error::Closed) => Ok(()),
        Err(e) => Err(e.into()),
    }
}
