//! A channel's endpoint, and the address vector that holds the peer's address.

use std::{
    ffi::{c_int, c_void},
    ptr,
};

use uccl_fabric::rail::{RailError, Request};
use uccl_wire::libfabric::MAX_NAME;

use super::{
    domain::Domain,
    info::{ip_of, is_socket_address, port_of},
    object::{Object, checked},
    providers,
    queue::Queue,
    raw,
};

/// An enabled endpoint.
pub(super) struct Endpoint {
    ep: Object<raw::Ep>,
    av: Object<raw::Av>,
    name: Vec<u8>,
}

/// The arguments of the provider's call beside the request.
#[derive(Clone, Copy)]
pub(super) struct PostArguments {
    /// The peer's address in the address vector.
    pub(super) peer: u64,
    /// Our memory's descriptor.
    pub(super) descriptor: *mut c_void,
    /// The context that the completion carries.
    pub(super) context: *mut c_void,
    /// Whether another one follows at once.
    pub(super) more: bool,
}

impl Endpoint {
    pub(super) fn open(domain: &Domain, queue: &Queue) -> Result<Self, RailError> {
        let fail = |call: &'static str| move |code| domain.error(call, code);
        let open = domain.ops().and_then(|ops| ops.endpoint);
        let open = open.ok_or_else(|| domain.error("fi_endpoint", libc::ENOSYS))?;
        let av = open_av(domain).map_err(fail("fi_av_open"))?;
        let (info, owner) = (domain.info.as_ptr(), domain.object().as_ptr());
        // SAFETY: domain and info live on, and the call only reads the info; it makes an endpoint
        // or fails.
        let ep =
            unsafe { Object::<raw::Ep>::made(|made| open(owner, info, made, ptr::null_mut())) };
        let ep = ep.map_err(fail("fi_endpoint"))?;
        ep.bind(&av, 0).map_err(fail("fi_ep_bind"))?;
        ep.bind(queue.object(), raw::FI_TRANSMIT | raw::FI_RECV).map_err(fail("fi_ep_bind"))?;
        for (option, name) in providers::not_permitted(&domain.provider) {
            if let Err(code) = forbid(&ep, *option) {
                tracing::debug!(
                    code,
                    provider = domain.provider,
                    "it does not let us switch off {name}"
                );
            }
        }
        if domain.info.first().address_format() == raw::FI_ADDR_STR {
            rename(&ep).map_err(fail("fi_setname"))?;
        }
        ep.enable().map_err(fail("fi_enable"))?;
        let name = name_of(&ep).map_err(fail("fi_getname"))?;
        Ok(Self { ep, av, name })
    }

    /// The provider's name for it, which the peer needs.
    pub(super) fn name(&self) -> &[u8] {
        &self.name
    }

    pub(super) fn object(&self) -> &Object<raw::Ep> {
        &self.ep
    }

    /// Adds the peer's endpoint to the address vector, by the name that the peer sent. Returns its
    /// address there.
    pub(super) fn insert(&self, domain: &Domain, name: &[u8]) -> Result<u64, RailError> {
        let format = domain.info.first().address_format();
        check_name(format, name, &self.name).map_err(|why| RailError::Peer(why.into()))?;
        // SAFETY: an open vector's table is the provider's for as long.
        let insert = unsafe { self.av.get().ops.as_ref() }.and_then(|ops| ops.insert);
        let insert = insert.ok_or_else(|| domain.error("fi_av_insert", libc::ENOSYS))?;
        // Aligned, and followed by zeros, in case a provider reads on.
        let mut buffer = [0u64; MAX_NAME / 8 + 1];
        let (first, bytes) = (buffer.as_mut_ptr().cast::<u8>(), name.len().min(MAX_NAME));
        // SAFETY: no more than the buffer's length is copied, between different places.
        unsafe { ptr::copy_nonoverlapping(name.as_ptr(), first, bytes) };
        let (mut peer, none) = (raw::FI_ADDR_NOTAVAIL, ptr::null_mut());
        // SAFETY: the vector is open, one name of the provider's own format and length lies there,
        // and one answer has room.
        let count = unsafe { insert(self.av.as_ptr(), first.cast(), 1, &raw mut peer, 0, none) };
        match count {
            1 if peer != raw::FI_ADDR_NOTAVAIL => Ok(peer),
            0.. => Err(RailError::Peer("an address that the provider does not take".into())),
            code => Err(domain.error("fi_av_insert", code)),
        }
    }

    /// Gives a request to the provider.
    ///
    /// # Errors
    /// The negative error code that the call returned: -[`libc::EAGAIN`] if there is no room.
    ///
    /// # Safety
    /// The local memory must stay valid and registered until the request has ended, and the
    /// descriptor must be that memory's. The context must have room for the provider's notes for as
    /// long.
    pub(super) unsafe fn post(
        &self,
        domain: &Domain,
        request: &Request,
        posting: PostArguments,
    ) -> Result<(), i32> {
        use uccl_fabric::lane::OpKind::{Read, Write};
        let mut descriptor = posting.descriptor;
        let iov =
            libc::iovec { iov_base: request.local.addr as *mut c_void, iov_len: request.local.len };
        let remote = raw::RmaIov {
            addr: request.remote_addr,
            len: request.local.len,
            key: request.remote_key,
        };
        let message = raw::MsgRma {
            msg_iov: &raw const iov,
            desc: &raw mut descriptor,
            iov_count: 1,
            addr: posting.peer,
            rma_iov: &raw const remote,
            rma_iov_count: 1,
            context: posting.context,
            data: 0,
        };
        // SAFETY: an open endpoint's table is the provider's for as long.
        let ops = unsafe { self.ep.get().rma.as_ref() }.ok_or(-libc::ENOSYS)?;
        let (call, flags) = match request.kind {
            Read => (ops.readmsg, raw::FI_COMPLETION),
            Write => (ops.writemsg, raw::FI_COMPLETION | raw::FI_DELIVERY_COMPLETE),
        };
        let call = call.ok_or(-libc::ENOSYS)?;
        let flags = if posting.more { flags | raw::FI_MORE } else { flags };
        let _serial = domain.serialize();
        // SAFETY: the endpoint is enabled; the message and everything that it points to live during
        // the call, and memory and context beyond it, by the caller's promise.
        let code = unsafe { call(self.ep.as_ptr(), &raw const message, flags) };
        if code < 0 { Err(code as i32) } else { Ok(()) }
    }

    /// Closes the endpoint: from then on it neither sends nor takes anything.
    pub(super) fn close(&mut self) -> Result<(), i32> {
        self.ep.close()
    }

    /// Closes the address vector, after the endpoint.
    pub(super) fn close_rest(&mut self) {
        if let Err(code) = self.av.close() {
            tracing::debug!(code, "an address vector was not closed");
        }
    }

    /// Leaves the endpoint and its address vector open until the process ends.
    pub(super) fn keep(&mut self) {
        self.ep.keep();
        self.av.keep();
    }
}

fn open_av(domain: &Domain) -> Result<Object<raw::Av>, i32> {
    let open = domain.ops().and_then(|ops| ops.av_open).ok_or(-libc::ENOSYS)?;
    let mut attr = raw::AvAttr {
        kind: 0,
        rx_ctx_bits: 0,
        count: 1,
        ep_per_node: 0,
        name: ptr::null(),
        map_addr: ptr::null_mut(),
        flags: 0,
    };
    let attr = &raw mut attr;
    // SAFETY: the domain is open, the attributes live on; the call makes a vector or fails.
    unsafe { Object::made(|made| open(domain.object().as_ptr(), attr, made, ptr::null_mut())) }
}

fn name_of(ep: &Object<raw::Ep>) -> Result<Vec<u8>, i32> {
    // SAFETY: an open endpoint's table is the provider's for as long.
    let get = unsafe { ep.get().cm.as_ref() }.and_then(|ops| ops.getname).ok_or(-libc::ENOSYS)?;
    let (mut name, mut len) = (vec![0; MAX_NAME], MAX_NAME);
    // SAFETY: the endpoint is open, and the buffer is as long as is said.
    let code = unsafe { get(ep.fid(), name.as_mut_ptr().cast(), &raw mut len) };
    if code < 0 {
        return Err(code);
    }
    if len > MAX_NAME {
        return Err(-raw::FI_ETOOSMALL);
    }
    name.truncate(len);
    Ok(name)
}

/// Switches off an option of an endpoint, which must not be enabled yet.
fn forbid(ep: &Object<raw::Ep>, option: c_int) -> Result<(), i32> {
    // SAFETY: an open endpoint's table is the provider's for as long.
    let set = unsafe { ep.get().ops.as_ref() }.and_then(|ops| ops.setopt).ok_or(-libc::ENOSYS)?;
    let (off, len) = (false, size_of::<bool>());
    // SAFETY: the endpoint is open and not enabled; the option is a bool, which lives on.
    checked(unsafe { set(ep.fid(), raw::FI_OPT_ENDPOINT, option, (&raw const off).cast(), len) })
}

/// Gives an endpoint, not enabled yet, a name that none has had, if the provider allows that. `shm`
/// makes names from process ids, and leaves files of these names behind when a process is killed:
/// the next process with that id could not enable an endpoint.
fn rename(ep: &Object<raw::Ep>) -> Result<(), i32> {
    // SAFETY: an open endpoint's table is the provider's for as long.
    let set = unsafe { ep.get().cm.as_ref() }.and_then(|ops| ops.setname);
    let (Some(set), Ok(given)) = (set, name_of(ep)) else {
        return Ok(());
    };
    let random = getrandom::u64().map_err(|_| -libc::EAGAIN)?;
    let mut name = given;
    while name.pop_if(|end| *end == 0).is_some() {}
    name.extend(format!(":{random:016x}\0").bytes());
    // SAFETY: the endpoint is open and not enabled; the name ends with a zero and is as long as is
    // said.
    match unsafe { set(ep.fid(), name.as_mut_ptr().cast(), name.len()) } {
        code if code < 0 && code != -libc::ENOSYS => Err(code),
        _ => Ok(()),
    }
}

/// Checks that bytes from a peer could be the name of an endpoint of the provider that named ours
/// `own`. Providers do not check: they read as many bytes as their names have, or text up to its
/// end.
fn check_name(format: u32, name: &[u8], own: &[u8]) -> Result<(), &'static str> {
    if format == raw::FI_ADDR_STR {
        return check_text_name(name, own);
    }
    if name.len() != own.len() {
        return Err("an endpoint's name of another length than the provider's are");
    }
    if is_socket_address(format) {
        if name.first_chunk::<2>() != own.first_chunk::<2>() {
            return Err("a socket address of another family");
        }
        if ip_of(name).is_none_or(|ip| ip.is_unspecified() || ip.is_multicast()) {
            return Err("a socket address that is nobody's");
        }
        if port_of(name).is_none_or(|port| port == 0) {
            return Err("a socket address without a port");
        }
    } else if name.iter().all(|byte| *byte == 0) {
        return Err("an endpoint's name of nothing but zeros");
    }
    Ok(())
}

/// Names that are text become names of files, so they must not contain paths.
fn check_text_name(name: &[u8], own: &[u8]) -> Result<(), &'static str> {
    let scheme = own.windows(3).position(|at| at == b"://").map_or(0, |at| at + 3);
    let rest = name.strip_prefix(own.get(..scheme).unwrap_or_default());
    let Some((0, text)) = rest.and_then(|rest| rest.split_last()).map(|(end, text)| (*end, text))
    else {
        return Err("an endpoint's name without its scheme or its end");
    };
    let fits = |byte: &u8| byte.is_ascii_alphanumeric() || b":_-".contains(byte);
    let is_sound = !text.is_empty() && text.len() < 200 && text.iter().all(fits);
    is_sound.then_some(()).ok_or("an endpoint's name of strange characters")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_sockets_must_be_somebodys() {
        let own =
            [&(libc::AF_INET as u16).to_ne_bytes()[..], &[1, 2, 127, 0, 0, 1], &[0; 8]].concat();
        let with = |at: usize, bytes: &[u8]| {
            let mut name = own.clone();
            name[at..at + bytes.len()].copy_from_slice(bytes);
            check_name(raw::FI_SOCKADDR_IN, &name, &own)
        };
        assert!(with(2, &[9, 9]).is_ok());
        assert!(with(0, &[0xff, 0xff]).is_err());
        assert!(with(2, &[0, 0]).is_err());
        assert!(with(4, &[0; 4]).is_err());
        assert!(with(4, &[224, 0, 0, 1]).is_err());
        assert!(check_name(raw::FI_SOCKADDR_IN, &own[..15], &own).is_err());
        assert!(check_name(raw::FI_SOCKADDR_IN, &[], &own).is_err());
    }

    #[test]
    fn names_that_are_text_go_nowhere() {
        let own = b"fi_shm://123:0:1\0";
        let check = |name: &[u8]| check_name(raw::FI_ADDR_STR, name, own);
        assert!(check(b"fi_shm://77:0:2\0").is_ok());
        for bad in [
            &b"fi_shm://77:0:2"[..],
            b"fi_shm://\0",
            b"fi_ns://77\0",
            b"fi_shm://../etc\0",
            b"fi_shm://a\0b\0",
            b"",
            b"\0",
        ] {
            assert!(check(bad).is_err(), "{bad:?}");
        }
    }
}
