//! Copies between this process's memory and another's.

use std::io;

/// Which way bytes go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// From the other process into this one.
    Read,
    /// From this process into the other one.
    Write,
}

/// Copies `len` bytes between `local` and address `remote` of process `pid`.
///
/// # Errors
/// The kernel's error: EPERM if it does not let this process touch that one.
///
/// # Safety
/// This process must own the `len` bytes at `local` for reading and, for [`Way::Read`], for
/// writing. The two processes must have agreed that this one writes to the other's memory.
pub unsafe fn copy(pid: u32, remote: u64, local: *mut u8, len: usize, way: Way) -> io::Result<()> {
    let pid = libc::pid_t::try_from(pid).map_err(io::Error::other)?;
    let mut done = 0;
    while done < len {
        let mine = libc::iovec { iov_base: local.wrapping_add(done).cast(), iov_len: len - done };
        let theirs = libc::iovec {
            iov_base: (remote as usize).wrapping_add(done) as *mut libc::c_void,
            iov_len: len - done,
        };
        // SAFETY: `mine` is the caller's to lend; the kernel checks `theirs`.
        let moved = unsafe {
            match way {
                Way::Read => libc::process_vm_readv(pid, &mine, 1, &theirs, 1, 0),
                Way::Write => libc::process_vm_writev(pid, &mine, 1, &theirs, 1, 0),
            }
        };
        match usize::try_from(moved) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(moved) => done += moved,
            Err(_) => return Err(io::Error::last_os_error()),
        }
    }
    Ok(())
}
