//! `process_vm_readv` and `process_vm_writev`: one copy straight between two processes' memory.

use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::{Channel, LimitRequest, Reply, Row, Size, sized};
use crate::{
    buffer::HostBuffer,
    control::{Request, unexpected},
    vm::{Way, copy},
};

pub(super) fn serve(len: u64, channel: &mut Channel) -> Result<Reply> {
    let mut buffer = HostBuffer::heap(usize::try_from(len)?)?;
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
    let (pid, address) = match channel.ask(&Request::Limit(LimitRequest::Memory { len }))? {
        Reply::Mapped { pid, address } => (pid, address),
        other => return Err(unexpected(&other)),
    };
    let mut local = HostBuffer::heap(usize::try_from(len)?)?;
    local.poison();
    for (op, way) in [("vm-read", Way::Read), ("vm-write", Way::Write)] {
        for &size in sizes {
            let measured = sized(op, size, time, || {
                // SAFETY: `local` is as long as the largest size, and nobody else holds it; the
                // other side lent its memory for this.
                let copied =
                    unsafe { copy(pid, address, local.as_mut_ptr(), size.0 as usize, way) };
                copied.context("the kernel refused")
            });
            row(measured.unwrap_or_else(|error| Row {
                note: Some(format!("{error:#}; see uccl doctor")),
                ..Row::limit(op, size.0)
            }));
        }
    }
    channel.order(&Request::Release)
}
