//! `process_vm_readv` and `process_vm_writev`: one copy straight between two processes' memory.

use std::{io, time::Duration};

use anyhow::{Context, Result, bail};

use super::{Channel, LimitRequest, Reply, Row, Size, sized};
use crate::bench::{
    buffer::Buffer,
    control::{Request, unexpected},
};

/// Another process's memory.
struct Remote {
    pid: libc::pid_t,
    address: u64,
}

#[derive(Clone, Copy)]
enum Way {
    Read,
    Write,
}

impl Way {
    fn op(self) -> &'static str {
        match self {
            Self::Read => "vm-read",
            Self::Write => "vm-write",
        }
    }
}

pub(super) fn serve(len: u64, channel: &mut Channel) -> Result<Reply> {
    let mut buffer = Buffer::heap(usize::try_from(len)?)?;
    buffer.poison();
    let address = buffer.address() as u64;
    channel.send(&Reply::Mapped { pid: std::process::id(), address })?;
    match channel.next()? {
        Some(Request::Release) => Ok(Reply::Done),
        _ => bail!("memory was lent, and not given back"),
    }
}

pub(super) fn measure(
    channel: &mut Channel,
    sizes: &[Size],
    time: Duration,
    row: &mut impl FnMut(Row),
) -> Result<()> {
    let len = sizes.iter().max().map_or(1, |size| size.0);
    let remote = match channel.ask(&Request::Limit(LimitRequest::Memory { len }))? {
        Reply::Mapped { pid, address } => Remote { pid: pid.try_into()?, address },
        other => return Err(unexpected(&other)),
    };
    let mut local = Buffer::heap(usize::try_from(len)?)?;
    local.poison();
    for way in [Way::Read, Way::Write] {
        for &size in sizes {
            let measured =
                sized(way.op(), size, time, || copy(&remote, &local, size.0 as usize, way));
            row(measured.unwrap_or_else(|error| Row {
                note: Some(format!("{error:#}; see uccl doctor")),
                ..Row::limit(way.op(), size.0)
            }));
        }
    }
    channel.order(&Request::Release)
}

fn copy(remote: &Remote, local: &Buffer, len: usize, way: Way) -> Result<()> {
    let mut done = 0;
    while done < len {
        let mine = libc::iovec {
            iov_base: local.as_mut_ptr().wrapping_add(done).cast(),
            iov_len: len - done,
        };
        let theirs = libc::iovec {
            iov_base: (remote.address as usize + done) as *mut libc::c_void,
            iov_len: len - done,
        };
        // SAFETY: `mine` lies inside `local`, which is at least `len` bytes long and which nobody else
        // holds; the kernel checks `theirs`.
        let moved = unsafe {
            match way {
                Way::Read => libc::process_vm_readv(remote.pid, &mine, 1, &theirs, 1, 0),
                Way::Write => libc::process_vm_writev(remote.pid, &mine, 1, &theirs, 1, 0),
            }
        };
        match usize::try_from(moved) {
            Ok(0) => bail!("the kernel moved nothing"),
            Ok(moved) => done += moved,
            Err(_) => return Err(io::Error::last_os_error()).context("the kernel refused"),
        }
    }
    Ok(())
}
