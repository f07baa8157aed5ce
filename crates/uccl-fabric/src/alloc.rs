//! Memory that peers of the same host can map: allocate tensors here, and they are reached at
//! memory speed.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Weak};

use parking_lot::RwLock;

use crate::gpu::GpuShare;
use crate::mem::{Span, next_id};
use crate::rights::SharedBacking;
use crate::shm::Segment;

/// All shared memory of this process, by start address.
static REGISTRY: RwLock<BTreeMap<usize, Weak<SharedBuf>>> = RwLock::new(BTreeMap::new());

/// Page-aligned, zeroed memory in a sealed memfd. Freed with the last [`Arc`].
#[derive(Debug)]
pub struct SharedBuf {
    id: u32,
    segment: Segment,
}

impl SharedBuf {
    /// Allocates `len` bytes (at least one).
    ///
    /// # Errors
    /// As for [`Segment::create`].
    pub fn new(len: usize) -> io::Result<Arc<Self>> {
        let segment = Segment::create("uccl-buf", len)?;
        let id = next_id()?;
        let buf = Arc::new(Self { id, segment });
        REGISTRY.write().insert(buf.span().addr, Arc::downgrade(&buf));
        Ok(buf)
    }

    /// The id that peers use for it. Ids are never reused.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Its whole address range, in this process.
    #[must_use]
    pub fn span(&self) -> Span {
        Span { addr: self.segment.as_ptr() as usize, len: self.segment.len() }
    }

    /// Where it starts.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.segment.as_ptr()
    }

    /// The memfd, to hand to peers.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.segment.fd()
    }

    /// Allocates all of its pages now.
    ///
    /// # Errors
    /// When there is not enough memory.
    pub fn populate(&self) -> io::Result<()> {
        self.segment.populate()
    }
}

impl Drop for SharedBuf {
    fn drop(&mut self) {
        // Before it is unmapped: after that, a new buffer may be at the same address, with an entry
        // of its own here.
        REGISTRY.write().remove(&self.span().addr);
    }
}

/// The shared memory that contains all of `span`, and the offset of `span` in it.
#[must_use]
pub fn lookup(span: Span) -> Option<(SharedBacking, Arc<SharedBuf>)> {
    let buf = REGISTRY.read().range(..=span.addr).next_back()?.1.upgrade()?;
    let offset = span.addr - buf.span().addr;
    if offset > buf.span().len || span.len > buf.span().len - offset {
        return None;
    }
    Some((SharedBacking { id: buf.id, offset: offset as u64 }, buf))
}

/// Memory that peers on this host can access directly once it was offered to them.
#[derive(Clone, Debug)]
pub enum Shareable {
    /// GPU memory.
    Gpu(Arc<GpuShare>),
    /// Host memory, from [`SharedBuf::new`].
    Host(Arc<SharedBuf>),
}

impl Shareable {
    /// The id that peers use for it.
    #[must_use]
    pub fn id(&self) -> u32 {
        match self {
            Self::Gpu(memory) => memory.id(),
            Self::Host(memory) => memory.id(),
        }
    }

    /// Its whole address range, in this process.
    #[must_use]
    pub fn span(&self) -> Span {
        match self {
            Self::Gpu(memory) => memory.span(),
            Self::Host(memory) => memory.span(),
        }
    }

    /// The id and the offset of `span`, which must lie within this memory.
    #[must_use]
    pub fn backing_of(&self, span: Span) -> SharedBacking {
        SharedBacking { id: self.id(), offset: (span.addr - self.span().addr) as u64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_range_inside_finds_its_backing() {
        let buf = SharedBuf::new(10_000).unwrap();
        let Span { addr, len } = buf.span();
        assert_eq!((addr % 4096, len), (0, 10_000));
        for (offset, len) in [(0, 10_000), (0, 0), (123, 45), (9_999, 1), (10_000, 0)] {
            let (backing, found) = lookup(Span { addr: addr + offset, len }).unwrap();
            assert_eq!(backing, SharedBacking { id: buf.id(), offset: offset as u64 });
            assert_eq!(found.id(), buf.id());
        }
        for (offset, len) in [(0, 10_001), (9_999, 2), (1, usize::MAX), (10_000, 1)] {
            let found = lookup(Span { addr: addr + offset, len });
            assert!(found.is_none_or(|(backing, _)| backing.id != buf.id()), "{offset} {len}");
        }
        let outside = Box::new(0u64);
        assert!(lookup(Span { addr: &raw const *outside as usize, len: 8 }).is_none());
    }

    #[test]
    fn it_goes_with_the_last_share() {
        let buf = SharedBuf::new(4096).unwrap();
        let span = buf.span();
        let (_, share) = lookup(span).unwrap();
        let id = buf.id();
        drop(buf);
        assert_eq!(lookup(span).unwrap().0.id, id);
        drop(share);
        assert!(lookup(span).is_none_or(|(backing, _)| backing.id != id));
        assert!(SharedBuf::new(0).is_err());
    }
}
