//! Registers memory, the host's or a GPU's, with a device.

use std::{os::fd::AsFd, sync::Arc};

use rustix::process::{Resource, getrlimit};
use uccl_device::{MemoryKind, cuda};
use uccl_fabric::{
    mem::Span,
    rail::{KeyBytes, RailError, Registration, RemoteKey},
};

use super::{
    mr::{DmaBuf, Mr, Reach},
    pd::Pd,
};

/// A bit of a local key: the CPU can read the memory, so short writes can be sent inline.
pub(super) const READABLE: u64 = 1 << 32;

/// Memory that a device reaches.
pub(super) struct VerbsRegistration {
    /// `None` for memory of no bytes: devices refuse it, and no peer needs it.
    mr: Option<Mr>,
    base: u64,
    is_readable: bool,
}

impl VerbsRegistration {
    pub(super) fn new(
        pd: &Arc<Pd>,
        span: Span,
        kind: MemoryKind,
        reach: Reach,
    ) -> Result<Self, RailError> {
        let is_readable = matches!(kind, MemoryKind::Host | MemoryKind::Pinned);
        let mr = match (span.len, kind) {
            (0, _) => None,
            (_, MemoryKind::Cuda { .. }) => Some(register_gpu(pd, span, reach)?),
            _ => Some(Mr::new(pd, span, reach).map_err(|errno| refused(pd, span, errno))?),
        };
        Ok(Self { mr, base: span.addr as u64, is_readable })
    }

    /// The rkey by which a peer's requests name it; 0 for memory of no bytes.
    pub(super) fn rkey(&self) -> u32 {
        self.mr.as_ref().map_or(0, Mr::rkey)
    }
}

impl Registration for VerbsRegistration {
    fn end(&self) -> Result<(), RailError> {
        self.mr.as_ref().map_or(Ok(()), Mr::end)
    }

    fn local_key(&self) -> u64 {
        let lkey = self.mr.as_ref().map_or(0, Mr::lkey);
        u64::from(lkey) | if self.is_readable { READABLE } else { 0 }
    }

    fn remote_key(&self) -> RemoteKey {
        RemoteKey { base: self.base, key: KeyBytes::from_slice(&self.rkey().to_le_bytes()) }
    }
}

/// Decodes a key that a peer's [`VerbsRegistration::remote_key`] made.
pub(super) fn import(key: &[u8]) -> Result<u64, RailError> {
    match key.try_into() {
        Ok(key) => Ok(u32::from_le_bytes(key).into()),
        Err(_) => Err(RailError::Peer(format!("a key of {} bytes, not 4", key.len()))),
    }
}

/// Registers a GPU's memory: as a dma-buf, or else with the help of a kernel module that knows the
/// GPU's addresses.
fn register_gpu(pd: &Arc<Pd>, span: Span, reach: Reach) -> Result<Mr, RailError> {
    let by_file = match cuda::DmaBuf::export(span.addr as u64, span.len) {
        Ok(file) => {
            let place = DmaBuf { fd: file.fd.as_fd(), offset: file.offset };
            match Mr::of_dmabuf(pd, span, &place, reach) {
                Some(Ok(mr)) => return Ok(mr),
                Some(Err(errno)) => std::io::Error::from_raw_os_error(errno).to_string(),
                None => "libibverbs is older than 34".to_owned(),
            }
        }
        Err(error) => error.to_string(),
    };
    Mr::new(pd, span, reach).map_err(|errno| RailError::Provider {
        what: attempt(pd, span),
        why: format!(
            "GPU memory can be reached neither by dma-buf ({by_file}) nor by a peer memory module \
             ({}; modprobe nvidia-peermem)",
            std::io::Error::from_raw_os_error(errno)
        ),
    })
}

fn attempt(pd: &Pd, span: Span) -> String {
    let Span { addr, len } = span;
    format!("registering {len} bytes at {addr:#x} with {} (ibv_reg_mr)", pd.context().name())
}

fn refused(pd: &Pd, span: Span, errno: i32) -> RailError {
    let error = std::io::Error::from_raw_os_error(errno);
    let why = match errno {
        libc::ENOMEM | libc::EAGAIN => format!("{error}; {}", no_room(memlock_limit())),
        libc::EFAULT => format!("{error}: some of it is not mapped, or is read-only"),
        libc::EIO | libc::ENODEV => return pd.context().error("ibv_reg_mr", errno),
        _ => error.to_string(),
    };
    RailError::Provider { what: attempt(pd, span), why }
}

/// How many bytes this process may lock, if there is a limit.
fn memlock_limit() -> Option<u64> {
    getrlimit(Resource::Memlock).current
}

/// The remedy when memory cannot be locked for lack of room. Privileged processes may exceed the
/// limit, so the limit may be the driver's own.
fn no_room(limit: Option<u64>) -> String {
    let smaller = "smaller regions may do (recent soft-RoCE takes up to 1 GiB in one)";
    match limit {
        Some(bytes) => format!(
            "this process may lock {} KiB of memory: raise it with ulimit -l unlimited, memlock in \
             /etc/security/limits.conf, or LimitMEMLOCK= of its service; if that is not it, {smaller}",
            bytes >> 10
        ),
        None => format!("the device has no room for a region of this length: {smaller}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_blamed_only_where_there_is_one() {
        assert!(no_room(Some(64 << 10)).starts_with("this process may lock 64 KiB"));
        let unlimited = no_room(None);
        assert!(!unlimited.contains("ulimit") && unlimited.contains("smaller regions"));
    }

    #[test]
    fn keys_of_another_length_are_refused() {
        assert_eq!(import(&[1, 2, 3, 4]).ok(), Some(0x0403_0201));
        for wrong in [&[][..], &[1, 2, 3], &[0; 5], &[0; 256]] {
            assert!(matches!(import(wrong), Err(RailError::Peer(_))), "{wrong:?}");
        }
    }
}
