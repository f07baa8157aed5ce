//! A memory region: memory that is registered with a device.

use std::{
    os::fd::{AsRawFd, BorrowedFd},
    ptr::NonNull,
    sync::Arc,
};

use parking_lot::Mutex;
use uccl_fabric::{mem::Span, rail::RailError, region::Rights};

use super::{
    ffi::{
        abi::{self, access},
        check, errno,
    },
    pd::Pd,
};

/// A registered piece of memory. The device reaches it until it has [ended](Self::end) or is
/// dropped.
pub(super) struct Mr {
    /// None once it has ended.
    raw: Mutex<Option<NonNull<abi::Mr>>>,
    lkey: u32,
    rkey: u32,
    pd: Arc<Pd>,
}

// SAFETY: verbs may be called from any thread; the library does its own locking.
unsafe impl Send for Mr {}
// SAFETY: as above.
unsafe impl Sync for Mr {}

/// How memory may be reached.
#[derive(Clone, Copy)]
pub(super) struct Reach {
    /// The peers' rights. Our own requests may read and write.
    pub(super) rights: Rights,
    /// The device's writes may overtake each other on the PCI bus.
    pub(super) relaxed: bool,
}

impl Reach {
    /// For memory that no peer reaches.
    pub(super) const OURS: Self = Self { rights: Rights::NONE, relaxed: false };

    fn flags(self) -> u32 {
        let flag = |is_set, flag| if is_set { flag } else { 0 };
        access::LOCAL_WRITE
            | flag(self.rights.read, access::REMOTE_READ)
            | flag(self.rights.write, access::REMOTE_WRITE)
            | flag(self.relaxed, access::RELAXED_ORDERING)
    }
}

/// A part of a dma-buf, which is a file that stands for a GPU's memory.
pub(super) struct DmaBuf<'a> {
    /// The file.
    pub(super) fd: BorrowedFd<'a>,
    /// Where in the file the memory begins.
    pub(super) offset: u64,
}

impl Mr {
    /// Registers memory. The error is an errno.
    pub(super) fn new(pd: &Arc<Pd>, span: Span, reach: Reach) -> Result<Self, i32> {
        let (verbs, addr) = (pd.verbs(), std::ptr::with_exposed_provenance_mut(span.addr));
        let raw = match (reach.relaxed, verbs.reg_mr_iova2) {
            (true, Some(reg_mr_iova2)) => {
                // SAFETY: the domain lives. The kernel checks that the memory exists; the caller
                // that registers it keeps it mapped.
                unsafe { reg_mr_iova2(pd.raw(), addr, span.len, span.addr as u64, reach.flags()) }
            }
            _ => {
                let flags = Reach { relaxed: false, ..reach }.flags();
                // SAFETY: as above.
                unsafe { (verbs.reg_mr)(pd.raw(), addr, span.len, flags as i32) }
            }
        };
        Self::from_raw(pd, raw)
    }

    /// Registers a GPU's memory as a dma-buf. `None` if the library is too old for that. The error
    /// is an errno.
    pub(super) fn of_dmabuf(
        pd: &Arc<Pd>,
        span: Span,
        file: &DmaBuf<'_>,
        reach: Reach,
    ) -> Option<Result<Self, i32>> {
        let reg_dmabuf_mr = pd.verbs().reg_dmabuf_mr?;
        let (offset, iova) = (file.offset, span.addr as u64);
        let (fd, flags) = (file.fd.as_raw_fd(), reach.flags() as i32);
        // SAFETY: the domain lives and the descriptor is open; the kernel checks the range.
        let raw = unsafe { reg_dmabuf_mr(pd.raw(), offset, span.len, iova, fd, flags) };
        Some(Self::from_raw(pd, raw))
    }

    fn from_raw(pd: &Arc<Pd>, raw: *mut abi::Mr) -> Result<Self, i32> {
        let raw = NonNull::new(raw).ok_or_else(errno)?;
        // SAFETY: just made, and its keys do not change.
        let (lkey, rkey) = unsafe { ((*raw.as_ptr()).lkey, (*raw.as_ptr()).rkey) };
        Ok(Self { raw: Mutex::new(Some(raw)), lkey, rkey, pd: Arc::clone(pd) })
    }

    /// The lkey by which our requests name it.
    pub(super) fn lkey(&self) -> u32 {
        self.lkey
    }

    /// The rkey by which a peer's requests name it.
    pub(super) fn rkey(&self) -> u32 {
        self.rkey
    }

    /// Deregisters the memory. Does nothing if that has been done. If the device is gone, this
    /// succeeds with any result of the device, as it reaches nothing any more.
    ///
    /// # Errors
    /// When the device did not deregister it, and may still reach the memory.
    pub(super) fn end(&self) -> Result<(), RailError> {
        let mut raw = self.raw.lock();
        let Some(there) = *raw else { return Ok(()) };
        // SAFETY: it has not been deregistered, and no request of ours names it any more.
        let returned = unsafe { (self.pd.verbs().dereg_mr)(there.as_ptr()) };
        let error = check(returned).map_err(|errno| self.pd.context().error("ibv_dereg_mr", errno));
        match error {
            Err(error) if !self.pd.context().is_gone() => Err(error),
            _ => {
                *raw = None;
                Ok(())
            }
        }
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            tracing::error!(%error, "memory stays registered until the process ends");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_get_the_access_that_their_rights_name() {
        let flags = |rights, relaxed| Reach { rights, relaxed }.flags();
        let both = access::LOCAL_WRITE | access::REMOTE_READ | access::REMOTE_WRITE;
        assert_eq!(flags(Rights::ALL, false), both);
        assert_eq!(flags(Rights::READ, false), access::LOCAL_WRITE | access::REMOTE_READ);
        assert_eq!(flags(Rights::WRITE, false), access::LOCAL_WRITE | access::REMOTE_WRITE);
        assert_eq!(Reach::OURS.flags(), access::LOCAL_WRITE);
        assert_eq!(flags(Rights::ALL, true), both | access::RELAXED_ORDERING);
    }
}
