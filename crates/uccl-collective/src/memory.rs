//! Regions of a group's memory: those that the caller registers, and those of one call.

use std::{any::Any, collections::BTreeMap, sync::Arc};

use parking_lot::Mutex;
use uccl_p2p::{Endpoint, Iov, MrId};

use crate::{
    error::{Error, Result},
    plan::Piece,
};

/// Keeps memory allocated.
pub type Keep = Arc<dyn Any + Send + Sync>;

/// Memory of a call.
#[derive(Clone)]
pub struct Buffer {
    ptr: usize,
    len: usize,
    keep: Keep,
}

impl Buffer {
    /// The `len` bytes at `ptr`.
    ///
    /// # Safety
    /// They must stay allocated as long as `keep` lives, and nobody else may write bytes that are
    /// being sent, or use bytes that are being received.
    pub unsafe fn new(ptr: usize, len: usize, keep: Keep) -> Self {
        Self { ptr, len, keep }
    }

    /// The address of the first.
    #[must_use]
    pub fn ptr(&self) -> usize {
        self.ptr
    }

    /// Their number.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

struct Registration {
    mr: MrId,
    keep: Keep,
}

/// The memory that callers have registered, by start and end.
#[derive(Default)]
pub(crate) struct Registry {
    regions: Mutex<BTreeMap<(usize, usize), Registration>>,
}

impl Registry {
    /// The region that holds a range, if one does.
    pub(crate) fn holding(&self, ptr: usize, len: usize) -> Option<MrId> {
        let end = ptr.checked_add(len)?;
        let regions = self.regions.lock();
        let mut before = regions.range(..=(ptr, usize::MAX)).rev();
        before.find(|((_, until), _)| *until >= end).map(|(_, region)| region.mr)
    }

    /// Registers memory, unless a region holds it already.
    pub(crate) fn register(&self, endpoint: &Endpoint, buffer: &Buffer) -> Result<MrId> {
        let Buffer { ptr, len, .. } = *buffer;
        if let Some(mr) = self.holding(ptr, len) {
            return Ok(mr);
        }
        let end = ptr.checked_add(len).ok_or_else(|| overflow(ptr, len))?;
        // SAFETY: `keep` is kept until the region has ended, and for ever if it cannot end.
        let mr = unsafe { endpoint.register(ptr, len) }?;
        let registration = Registration { mr, keep: Arc::clone(&buffer.keep) };
        self.regions.lock().insert((ptr, end), registration);
        Ok(mr)
    }

    /// Ends the region of exactly this range; `false` if there is none.
    pub(crate) fn deregister(&self, endpoint: &Endpoint, ptr: usize, len: usize) -> Result<bool> {
        let range = (ptr, ptr.checked_add(len).ok_or_else(|| overflow(ptr, len))?);
        let Some(region) = self.regions.lock().remove(&range) else { return Ok(false) };
        if let Err(e) = endpoint.deregister(region.mr) {
            self.regions.lock().insert(range, region);
            return Err(e.into());
        }
        Ok(true)
    }

    /// Ends all regions. Memory that may still be touched is never freed.
    pub(crate) fn clear(&self, endpoint: &Endpoint) {
        for (_, region) in std::mem::take(&mut *self.regions.lock()) {
            let_go(endpoint, region.mr, region.keep);
        }
    }
}

/// Ends a region and frees its memory; keeps the memory for ever if it may still be touched.
fn let_go(endpoint: &Endpoint, mr: MrId, keep: Keep) {
    if let Err(e) = endpoint.deregister(mr)
        && !matches!(e, uccl_p2p::Error::UnknownRegion(_) | uccl_p2p::Error::Closed)
    {
        tracing::warn!("memory of a call is kept for ever: {e}");
        std::mem::forget(keep);
    }
}

/// The regions of one call's buffers.
pub(crate) struct CallRegions {
    endpoint: Endpoint,
    regions: Vec<CallRegion>,
}

struct CallRegion {
    buffer: Buffer,
    mr: MrId,
    /// Whether it is this call's alone.
    is_own: bool,
}

impl CallRegions {
    /// Finds or makes the region of each buffer. A buffer without bytes has none.
    pub(crate) fn of(
        endpoint: &Endpoint,
        registry: &Registry,
        buffers: Vec<Buffer>,
    ) -> Result<Self> {
        // If one fails, the others end with this.
        let mut all =
            Self { endpoint: endpoint.clone(), regions: Vec::with_capacity(buffers.len()) };
        for buffer in buffers {
            let known = registry.holding(buffer.ptr, buffer.len);
            let is_own = known.is_none() && buffer.len > 0;
            let mr = match known {
                Some(mr) => mr,
                None if buffer.is_empty() => MrId(0),
                // SAFETY: `keep` is kept until the region has ended, and for ever if it cannot end.
                None => unsafe { endpoint.register(buffer.ptr, buffer.len) }?,
            };
            all.regions.push(CallRegion { buffer, mr, is_own });
        }
        Ok(all)
    }

    /// A piece, as the engine takes it.
    pub(crate) fn iov(&self, piece: Piece) -> Result<Iov> {
        let outside = || {
            let Piece { buffer, offset, len } = piece;
            Error::Invalid(format!("{len} bytes at {offset} are not inside buffer {buffer}"))
        };
        let region = self.regions.get(piece.buffer).ok_or_else(outside)?;
        let end = piece.offset.checked_add(piece.len).ok_or_else(outside)?;
        if end > region.buffer.len {
            return Err(outside());
        }
        Ok(Iov { mr: region.mr, ptr: region.buffer.ptr + piece.offset, len: piece.len })
    }

    /// Whether a buffer's region is the caller's.
    pub(crate) fn is_registered(&self, buffer: usize) -> bool {
        self.regions.get(buffer).is_some_and(|region| !region.is_own)
    }
}

impl Drop for CallRegions {
    fn drop(&mut self) {
        for region in self.regions.drain(..) {
            if region.is_own {
                let_go(&self.endpoint, region.mr, region.buffer.keep);
            }
        }
    }
}

fn overflow(ptr: usize, len: usize) -> Error {
    Error::Invalid(format!("{len} bytes at {ptr:#x} reach beyond the end of all addresses"))
}

#[cfg(test)]
mod tests {
    use uccl_p2p::Config;

    use super::*;

    #[test]
    fn a_piece_outside_its_buffer_is_refused() {
        let bind = Some([127, 0, 0, 1].into());
        let config = Config { bind, port: Some(0), ..Config::default() };
        let endpoint = Endpoint::new(config).expect("an endpoint");
        let bytes: Keep = Arc::new([0_u64; 8]);
        let ptr = Arc::as_ptr(&bytes).cast::<u8>() as usize;
        // SAFETY: the Arc keeps the bytes, and nothing is moved.
        let buffer = unsafe { Buffer::new(ptr, 64, bytes) };
        let regions = CallRegions::of(&endpoint, &Registry::default(), vec![buffer]);
        let regions = regions.expect("registered");
        let iov = |buffer, offset, len| regions.iov(Piece { buffer, offset, len });
        assert_eq!(iov(0, 60, 4).expect("inside").ptr, ptr + 60);
        assert!(iov(0, 60, 5).is_err());
        assert!(iov(0, usize::MAX, 2).is_err());
        assert!(iov(1, 0, 1).is_err());
    }
}
