//! Memory that peers of the same host can map: allocate tensors here, and they are reached at memory speed.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::RwLock;

use crate::mem::Span;
use crate::region::SharedBacking;
use crate::shm::Segment;

/// All shared memory of this process, by where it starts.
static REGISTRY: RwLock<BTreeMap<usize, Weak<SharedBuf>>> = RwLock::new(BTreeMap::new());

/// Page-aligned, zeroed memory in a sealed memfd. It goes with the last [`Arc`].
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
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let segment = Segment::create("uccl-buf", len)?;
        let id = NEXT
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |id| id.checked_add(1))
            .map_err(|_| io::Error::other("too many shared buffers"))?;
        let buf = Arc::new(Self { id, segment });
        REGISTRY.write().insert(buf.span().addr, Arc::downgrade(&buf));
        Ok(buf)
    }

    /// What peers know it by. Ids are not used again.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.id
    }

    /// All of it.
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

    /// Asks for its pages now.
    ///
    /// # Errors
    /// When the memory is not there.
    pub fn populate(&self) -> io::Result<()> {
        self.segment.populate()
    }
}

impl Drop for SharedBuf {
    fn drop(&mut self) {
        // Before it is unmapped, so that a newcomer at the same address finds the place free.
        REGISTRY.write().remove(&self.span().addr);
    }
}

/// The shared memory that holds all of `span`, and where in it.
#[must_use]
pub fn lookup(span: Span) -> Option<(SharedBacking, Arc<SharedBuf>)> {
    let buf = REGISTRY.read().range(..=span.addr).next_back()?.1.upgrade()?;
    let offset = span.addr - buf.span().addr;
    if offset > buf.span().len || span.len > buf.span().len - offset {
        return None;
    }
    Some((SharedBacking { id: buf.id, offset: offset as u64 }, buf))
}
