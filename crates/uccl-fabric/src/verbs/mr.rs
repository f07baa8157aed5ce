//! A memory region: memory that a device has been shown.

use std::{
    os::fd::{AsRawFd, BorrowedFd},
    ptr::NonNull,
    sync::Arc,
};

use super::{
    context::complain,
    ffi::{
        abi::{self, access},
        errno,
    },
    pd::Pd,
};
use crate::mem::Span;

/// A registered piece of memory. The device reaches it until this is dropped.
pub(super) struct Mr {
    raw: NonNull<abi::Mr>,
    pd: Arc<Pd>,
}

// SAFETY: verbs may be called from any thread; the library does its own locking.
unsafe impl Send for Mr {}
// SAFETY: as above.
unsafe impl Sync for Mr {}

/// How memory may be reached: by us, and by peers for reading and writing.
const RIGHTS: u32 = access::LOCAL_WRITE | access::REMOTE_WRITE | access::REMOTE_READ;

/// A stretch of a file that stands for a GPU's memory.
pub(super) struct DmaBuf<'a> {
    /// The file.
    pub(super) fd: BorrowedFd<'a>,
    /// Where in the file the memory begins.
    pub(super) offset: u64,
}

impl Mr {
    /// Registers memory. The error is the system's number.
    pub(super) fn new(pd: &Arc<Pd>, span: Span, relaxed: bool) -> Result<Self, i32> {
        let (verbs, addr) = (pd.verbs(), std::ptr::with_exposed_provenance_mut(span.addr));
        let raw = match (relaxed, verbs.reg_mr_iova2) {
            (true, Some(reg_mr_iova2)) => {
                let rights = RIGHTS | access::RELAXED_ORDERING;
                // SAFETY: the domain lives. The kernel checks that the memory is there; that it stays is
                // what whoever registers promises.
                unsafe { reg_mr_iova2(pd.raw(), addr, span.len, span.addr as u64, rights) }
            }
            // SAFETY: as above.
            _ => unsafe { (verbs.reg_mr)(pd.raw(), addr, span.len, RIGHTS as i32) },
        };
        Self::from_raw(pd, raw)
    }

    /// Registers a GPU's memory by the file that stands for it. `None`: the library is too old for that.
    pub(super) fn of_dmabuf(
        pd: &Arc<Pd>,
        span: Span,
        file: &DmaBuf<'_>,
        relaxed: bool,
    ) -> Option<Result<Self, i32>> {
        let reg_dmabuf_mr = pd.verbs().reg_dmabuf_mr?;
        let rights = if relaxed { RIGHTS | access::RELAXED_ORDERING } else { RIGHTS };
        let (offset, iova) = (file.offset, span.addr as u64);
        let fd = file.fd.as_raw_fd();
        // SAFETY: the domain lives and the descriptor is open; the kernel checks the range.
        let raw = unsafe { reg_dmabuf_mr(pd.raw(), offset, span.len, iova, fd, rights as i32) };
        Some(Self::from_raw(pd, raw))
    }

    fn from_raw(pd: &Arc<Pd>, raw: *mut abi::Mr) -> Result<Self, i32> {
        let raw = NonNull::new(raw).ok_or_else(errno)?;
        Ok(Self { raw, pd: Arc::clone(pd) })
    }

    /// What our requests name it with.
    pub(super) fn lkey(&self) -> u32 {
        // SAFETY: the region lives, and its keys do not change.
        unsafe { (*self.raw.as_ptr()).lkey }
    }

    /// What a peer's requests name it with.
    pub(super) fn rkey(&self) -> u32 {
        // SAFETY: as above.
        unsafe { (*self.raw.as_ptr()).rkey }
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // SAFETY: given back once, and named by nothing of ours afterwards.
        let returned = unsafe { (self.pd.verbs().dereg_mr)(self.raw.as_ptr()) };
        complain("ibv_dereg_mr", returned);
    }
}
