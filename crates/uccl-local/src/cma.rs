//! Cross-memory attach: copying to and from another process's memory through the kernel.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use uccl_device::Process;
use uccl_fabric::clock::coarse_ms;
use uccl_fabric::mem::{Access, Span};

/// `UIO_MAXIOV`: the most pieces a call takes on either side.
const MAX_IOVS: usize = 1024;
/// Up to this many pieces are kept on the stack.
const FEW: usize = 16;

/// Why a copy failed. The bytes already copied stay copied.
#[derive(Debug, thiserror::Error)]
pub enum CmaError {
    /// The system does not let this process touch that one (ptrace scope, user, container,
    /// seccomp).
    #[error("the system does not allow access to the peer's memory")]
    Forbidden,
    /// The process has ended.
    #[error("the peer process is gone")]
    PeerGone,
    /// Some address, here or there, is not mapped (or not writable).
    #[error("an address of the copy is not mapped, here or at the peer")]
    Fault,
    /// The two sides differ in length.
    #[error("local and remote lengths differ")]
    Length,
    /// Something else.
    #[error("cross-memory attach: {0}")]
    Os(#[source] io::Error),
}

impl CmaError {
    fn last() -> Self {
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EPERM | libc::EACCES | libc::ENOSYS) => Self::Forbidden,
            Some(libc::ESRCH) => Self::PeerGone,
            Some(libc::EFAULT) => Self::Fault,
            _ => Self::Os(error),
        }
    }
}

/// The memory of another process.
#[derive(Debug)]
pub struct PeerMemory {
    process: Process,
    /// When the process was last seen alive, in milliseconds of the coarse clock.
    seen_ms: AtomicU64,
}

impl PeerMemory {
    /// The memory of this process.
    #[must_use]
    pub fn of(process: Process) -> Self {
        Self { process, seen_ms: AtomicU64::new(0) }
    }

    /// Whether the process lived at this tick of the coarse clock. Reuse of a number takes far
    /// longer than a tick, and asking each time would cost a third of a short copy.
    fn lives(&self) -> bool {
        let now = coarse_ms();
        if self.seen_ms.load(Ordering::Relaxed) == now {
            return true;
        }
        let lives = !self.process.has_ended();
        if lives {
            self.seen_ms.store(now, Ordering::Relaxed);
        }
        lives
    }

    /// Copies between `local` memory and the process's, [`Access::Read`] from it and
    /// [`Access::Write`] to it.
    ///
    /// # Errors
    /// As for [`read`].
    ///
    /// # Safety
    /// As for [`read`] or [`write()`].
    pub unsafe fn copy(
        &self,
        access: Access,
        local: &[Span],
        remote: &[(u64, u64)],
    ) -> Result<u64, CmaError> {
        if !self.lives() {
            return Err(CmaError::PeerGone);
        }
        // SAFETY: the caller's promise.
        unsafe { copy(self.process.pid(), access, local, remote) }
    }
}

/// Copies from `remote` ranges (address, length) of process `pid` to `local` memory. Returns how
/// many bytes.
///
/// # Errors
/// When the lengths differ, the process is gone or not accessible to us, or an address is bad.
///
/// # Safety
/// `local` must be memory that may be written during the call.
pub unsafe fn read(pid: i32, local: &[Span], remote: &[(u64, u64)]) -> Result<u64, CmaError> {
    // SAFETY: the caller's promise.
    unsafe { copy(pid, Access::Read, local, remote) }
}

/// Copies from `local` memory to `remote` ranges (address, length) of process `pid`. Returns how
/// many bytes.
///
/// # Errors
/// As for [`read`].
///
/// # Safety
/// `local` must be memory that may be read during the call. The two processes must have agreed that
/// the other one's memory is overwritten.
pub unsafe fn write(pid: i32, local: &[Span], remote: &[(u64, u64)]) -> Result<u64, CmaError> {
    // SAFETY: the caller's promise.
    unsafe { copy(pid, Access::Write, local, remote) }
}

/// Whether `nonce` is at `addr` in process `pid`. If so, copying works, and `pid` is the process
/// that sent us the nonce.
///
/// # Errors
/// The reason why the nonce cannot be read.
pub fn probe(pid: i32, addr: u64, nonce: &[u8; 16]) -> Result<bool, CmaError> {
    let mut found = [0u8; 16];
    let local = Span { addr: found.as_mut_ptr() as usize, len: found.len() };
    // SAFETY: `found` is ours to write.
    unsafe { read(pid, &[local], &[(addr, 16)])? };
    Ok(found == *nonce)
}

/// The pieces of one side that are left.
struct Cursor<'a, T> {
    pieces: &'a [T],
    /// How many bytes of the first piece are copied.
    done: usize,
}

/// A piece of memory, on either side.
trait Piece {
    fn iovec(&self) -> libc::iovec;
}

impl Piece for Span {
    fn iovec(&self) -> libc::iovec {
        libc::iovec { iov_base: self.addr as *mut libc::c_void, iov_len: self.len }
    }
}

impl Piece for (u64, u64) {
    fn iovec(&self) -> libc::iovec {
        libc::iovec { iov_base: self.0 as *mut libc::c_void, iov_len: self.1 as usize }
    }
}

impl<T: Piece> Cursor<'_, T> {
    /// Fills `iovs` with the next pieces that are not empty. Returns how many.
    fn fill(&self, iovs: &mut [libc::iovec]) -> libc::c_ulong {
        let mut done = self.done;
        let left = self.pieces.iter().map(|piece| {
            let libc::iovec { iov_base, iov_len } = piece.iovec();
            let skip = std::mem::take(&mut done);
            libc::iovec { iov_base: iov_base.wrapping_byte_add(skip), iov_len: iov_len - skip }
        });
        let mut count = 0;
        for (iov, piece) in iovs.iter_mut().zip(left.filter(|piece| piece.iov_len > 0)) {
            *iov = piece;
            count += 1;
        }
        count
    }

    fn advance(&mut self, mut bytes: usize) {
        while let Some((first, rest)) = self.pieces.split_first() {
            let left = first.iovec().iov_len - self.done;
            if bytes < left {
                self.done += bytes;
                return;
            }
            bytes -= left;
            self.pieces = rest;
            self.done = 0;
        }
    }
}

fn total<T: Piece>(pieces: &[T]) -> Option<u64> {
    pieces.iter().try_fold(0u64, |sum, piece| sum.checked_add(piece.iovec().iov_len as u64))
}

/// A copy on its way.
struct Copy<'a> {
    pid: i32,
    access: Access,
    want: u64,
    local: Cursor<'a, Span>,
    remote: Cursor<'a, (u64, u64)>,
}

unsafe fn copy(
    pid: i32,
    access: Access,
    local: &[Span],
    remote: &[(u64, u64)],
) -> Result<u64, CmaError> {
    let want = total(local).filter(|want| total(remote) == Some(*want)).ok_or(CmaError::Length)?;
    let longest = local.len().max(remote.len()).min(MAX_IOVS);
    let (local, remote) = (Cursor { pieces: local, done: 0 }, Cursor { pieces: remote, done: 0 });
    let copy = Copy { pid, access, want, local, remote };
    let none = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
    if longest <= FEW {
        // SAFETY: the caller's promise.
        unsafe { copy.run(&mut [none; FEW], &mut [none; FEW]) }
    } else {
        let mut many = vec![none; 2 * longest];
        let (here, there) = many.split_at_mut(longest);
        // SAFETY: the caller's promise.
        unsafe { copy.run(here, there) }
    }
}

impl Copy<'_> {
    /// Calls the kernel until all is copied.
    ///
    /// # Safety
    /// The local pieces must be memory that the access may touch.
    unsafe fn run(
        mut self,
        here: &mut [libc::iovec],
        there: &mut [libc::iovec],
    ) -> Result<u64, CmaError> {
        let mut copied = 0;
        while copied < self.want {
            let (l, r) = (self.local.fill(here), self.remote.fill(there));
            // SAFETY: the vectors are valid for the counts, the kernel checks every address in
            // them, and the caller answers for the local ones.
            let n = unsafe {
                match self.access {
                    Access::Read => {
                        libc::process_vm_readv(self.pid, here.as_ptr(), l, there.as_ptr(), r, 0)
                    }
                    Access::Write => {
                        libc::process_vm_writev(self.pid, here.as_ptr(), l, there.as_ptr(), r, 0)
                    }
                }
            };
            let n = usize::try_from(n).map_err(|_| CmaError::last())?;
            if n == 0 {
                return Err(CmaError::Fault);
            }
            copied += n as u64;
            self.local.advance(n);
            self.remote.advance(n);
        }
        Ok(copied)
    }
}
