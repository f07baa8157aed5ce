//! A channel's completion queue.

use std::{
    ffi::c_void,
    os::fd::{BorrowedFd, RawFd},
    ptr,
};

use uccl_fabric::rail::RailError;

use super::{domain::Domain, library::text, object::Object, raw};

/// How many completions are read at a time.
pub(super) const READ_AT_ONCE: usize = 64;

/// A completion queue, with a descriptor to sleep on if the provider has one.
pub(super) struct Queue {
    cq: Object<raw::Cq>,
    fd: Option<RawFd>,
}

/// The result of reading the queue.
pub(super) enum Read {
    /// This many completions.
    Ended(usize),
    /// The queue is empty.
    Empty,
    /// A request has failed.
    Failed(Box<FailedEntry>),
}

/// A request that has failed.
pub(super) struct FailedEntry {
    pub(super) context: *mut c_void,
    pub(super) errno: i32,
    pub(super) provider_errno: i32,
    pub(super) words: String,
}

impl Queue {
    /// Opens a queue, with a descriptor if possible.
    pub(super) fn open(domain: &Domain, size: usize) -> Result<Self, RailError> {
        let can_wait = trywait(domain).is_some();
        if can_wait && let Ok(cq) = Self::open_cq(domain, size, raw::FI_WAIT_FD) {
            let mut fd: RawFd = -1;
            // SAFETY: for a queue with a descriptor, the command takes a pointer to an int.
            let got = unsafe { cq.control(raw::FI_GETWAIT, (&raw mut fd).cast()) };
            if got.is_ok() && fd >= 0 {
                return Ok(Self { cq, fd: Some(fd) });
            }
        }
        let cq = Self::open_cq(domain, size, raw::FI_WAIT_NONE)
            .map_err(|code| domain.error("fi_cq_open", code))?;
        Ok(Self { cq, fd: None })
    }

    fn open_cq(domain: &Domain, size: usize, wait_obj: i32) -> Result<Object<raw::Cq>, i32> {
        let open = domain.ops().and_then(|ops| ops.cq_open).ok_or(-libc::ENOSYS)?;
        let mut attr = raw::CqAttr {
            size,
            flags: 0,
            format: raw::FI_CQ_FORMAT_CONTEXT,
            wait_obj,
            signaling_vector: 0,
            wait_cond: 0,
            wait_set: ptr::null_mut(),
        };
        let attr = &raw mut attr;
        // SAFETY: the domain is open, the attributes live on; the call makes a queue or fails.
        unsafe { Object::made(|made| open(domain.object().as_ptr(), attr, made, ptr::null_mut())) }
    }

    pub(super) fn object(&self) -> &Object<raw::Cq> {
        &self.cq
    }

    /// The descriptor to watch while asleep.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        // SAFETY: the descriptor is the queue's, which is open while we are borrowed.
        self.fd.map(|fd| unsafe { BorrowedFd::borrow_raw(fd) })
    }

    /// Whether one may sleep on the descriptor, if there is one. False if there is something to
    /// read.
    pub(super) fn may_sleep(&self, domain: &Domain) -> bool {
        // Without a descriptor, `fi_trywait` is not called: a provider may not check whether the
        // queue has one.
        let Some(trywait) = self.fd.and_then(|_| trywait(domain)) else { return true };
        let mut fid = self.cq.fid();
        let _serial = domain.serialize();
        // SAFETY: fabric and queue are open, and the list has one fid.
        unsafe { trywait(domain.fabric().as_ptr(), &raw mut fid, 1) == 0 }
    }

    /// Drives the provider, and takes completions.
    pub(super) fn read(
        &self,
        domain: &Domain,
        entries: &mut [raw::CqEntry; READ_AT_ONCE],
    ) -> Result<Read, RailError> {
        // SAFETY: an open queue's table is the provider's for as long.
        let read = unsafe { self.cq.get().ops.as_ref() }.and_then(|ops| ops.read);
        let read = read.ok_or_else(|| domain.error("fi_cq_read", libc::ENOSYS))?;
        let _serial = domain.serialize();
        // SAFETY: the queue is open, and there is room for that many of its format's entries.
        let count =
            unsafe { read(self.cq.as_ptr(), entries.as_mut_ptr().cast(), READ_AT_ONCE) } as i64;
        match count {
            0 => Ok(Read::Empty),
            1.. => Ok(Read::Ended((count as usize).min(READ_AT_ONCE))),
            _ => match count as i32 {
                code if code == -libc::EAGAIN || code == -libc::EINTR => Ok(Read::Empty),
                code if code == -raw::FI_EAVAIL => self.read_failed(domain),
                code => Err(domain.error("fi_cq_read", code)),
            },
        }
    }

    fn read_failed(&self, domain: &Domain) -> Result<Read, RailError> {
        // SAFETY: an open queue's table is the provider's for as long.
        let ops = unsafe { self.cq.get().ops.as_ref() };
        let read = ops.and_then(|ops| ops.readerr);
        let read = read.ok_or_else(|| domain.error("fi_cq_readerr", libc::ENOSYS))?;
        // SAFETY: numbers and null pointers; the size of the buffer for details is 0.
        let mut entry: raw::CqErrEntry = unsafe { std::mem::zeroed() };
        // SAFETY: the queue is open, and the entry is at least as long as any version's.
        let count = unsafe { read(self.cq.as_ptr(), &raw mut entry, 0) } as i64;
        if count == -i64::from(libc::EAGAIN) || count == 0 {
            return Ok(Read::Empty);
        }
        if count < 0 {
            return Err(domain.error("fi_cq_readerr", count as i32));
        }
        let strerror = ops.and_then(|ops| ops.strerror);
        let own = strerror.and_then(|say| {
            let details = entry.err_data.cast_const();
            // SAFETY: the queue is open and was not read since; no buffer is given for the words.
            let words =
                unsafe { say(self.cq.as_ptr(), entry.prov_errno, details, ptr::null_mut(), 0) };
            text(words)
        });
        let words = match own.filter(|words| !words.is_empty()) {
            Some(own) => format!("{}: {own}", domain.library.words(entry.err)),
            None => domain.library.words(entry.err),
        };
        Ok(Read::Failed(Box::new(FailedEntry {
            context: entry.op_context,
            errno: entry.err.saturating_abs(),
            provider_errno: entry.prov_errno,
            words,
        })))
    }

    /// Closes it.
    pub(super) fn close(&mut self) -> Result<(), i32> {
        self.fd = None;
        self.cq.close()
    }

    /// Leaves it open until the process ends.
    pub(super) fn keep(&mut self) {
        self.cq.keep();
    }
}

type TryWait = unsafe extern "C" fn(*mut raw::Fabric, *mut *mut raw::Fid, i32) -> i32;

fn trywait(domain: &Domain) -> Option<TryWait> {
    // SAFETY: an open fabric's table is the provider's for as long.
    unsafe { domain.fabric().get().ops.as_ref() }?.trywait
}
