//! The connection manager, by which iWARP's queue pairs are joined: the channel of its events, and its
//! identifiers, each of which listens or is a connection.

use std::{
    ffi::CStr,
    net::{IpAddr, SocketAddr},
    os::fd::BorrowedFd,
    ptr::{self, NonNull},
    sync::Arc,
};

use socket2::SockAddr;

use super::{
    context::{complain, set_nonblocking},
    ffi::{
        Cm, check,
        cm_abi::{self, ConnParam, cm_event},
        errno,
    },
};
use crate::rma::rail::RailError;

/// How long the kernel looks for the way to a peer, in ms.
const RESOLVE_TIMEOUT_MS: i32 = 3000;

/// Where events of identifiers show.
pub(super) struct Events {
    raw: NonNull<cm_abi::EventChannel>,
    cm: &'static Cm,
}

// SAFETY: librdmacm may be called from any thread; it does its own locking.
unsafe impl Send for Events {}
// SAFETY: as above.
unsafe impl Sync for Events {}

/// What has happened to a connection.
pub(super) struct Event {
    pub(super) what: What,
    /// Which identifier it is about; it is only compared.
    id: *mut cm_abi::CmId,
}

/// What has happened.
pub(super) enum What {
    /// The device for the way to the peer is known.
    AddressResolved,
    /// The way to the peer is known.
    RouteResolved,
    /// Somebody wants to connect, and gives these bytes.
    Request(Id, Vec<u8>),
    /// It is connected.
    Established,
    /// It is not, or not any more.
    Lost(String),
    /// The device was removed.
    Removed,
    /// Nothing that matters.
    Other,
}

impl Events {
    pub(super) fn new(cm: &'static Cm) -> Result<Arc<Self>, RailError> {
        // SAFETY: it takes nothing.
        let raw = unsafe { (cm.create_event_channel)() };
        let raw = NonNull::new(raw).ok_or_else(|| match errno() {
            libc::ENODEV | libc::ENOENT | libc::EACCES | libc::EPERM => RailError::Unavailable(
                "iWARP needs /dev/infiniband/rdma_cm, to read and write: modprobe rdma_ucm; in a \
                 container, pass the folder along"
                    .to_owned(),
            ),
            errno => RailError::os("rdma_create_event_channel", errno),
        })?;
        let events = Self { raw, cm };
        set_nonblocking(events.fd())
            .map_err(|errno| RailError::os("fcntl on connection events", errno))?;
        Ok(Arc::new(events))
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel lives, and its descriptor is open as long as it does.
        unsafe { BorrowedFd::borrow_raw((*self.raw.as_ptr()).fd) }
    }

    /// Takes an event, if there is one, without blocking.
    pub(super) fn next(self: &Arc<Self>) -> Result<Option<Event>, RailError> {
        let mut raw = ptr::null_mut();
        // SAFETY: the channel lives, the pointer is to a live one, and the descriptor does not block.
        if let Err(errno) = check(unsafe { (self.cm.get_event)(self.raw.as_ptr(), &raw mut raw) }) {
            return match errno {
                libc::EAGAIN | libc::EINTR => Ok(None),
                errno => Err(RailError::os("rdma_get_cm_event", errno)),
            };
        }
        // SAFETY: an event was taken, which is valid until it is acknowledged below.
        let event = unsafe { &*raw };
        let taken = Event { what: self.what(event), id: event.id };
        // SAFETY: taken above, acknowledged once and not used afterwards.
        complain("rdma_ack_cm_event", unsafe { (self.cm.ack_event)(raw) });
        Ok(Some(taken))
    }

    fn what(self: &Arc<Self>, event: &cm_abi::CmEvent) -> What {
        let lost = |why: &str| {
            let error = std::io::Error::from_raw_os_error(event.status.wrapping_abs());
            What::Lost(if event.status == 0 { why.to_owned() } else { format!("{why} ({error})") })
        };
        match event.event {
            cm_event::ADDR_RESOLVED => What::AddressResolved,
            cm_event::ROUTE_RESOLVED => What::RouteResolved,
            cm_event::CONNECT_REQUEST => match NonNull::new(event.id) {
                Some(raw) => {
                    let id = Id { raw, events: Arc::clone(self) };
                    What::Request(id, private_data(&event.param))
                }
                None => What::Other,
            },
            cm_event::ESTABLISHED => What::Established,
            cm_event::ADDR_ERROR | cm_event::ROUTE_ERROR => lost("there is no way to the peer"),
            cm_event::UNREACHABLE => lost("the peer did not answer"),
            cm_event::REJECTED => lost("the peer's port refuses"),
            cm_event::CONNECT_ERROR => lost("the connection could not be made"),
            cm_event::DISCONNECTED => lost("the peer's end was closed, or does not answer"),
            cm_event::DEVICE_REMOVAL => What::Removed,
            cm_event::TIMEWAIT_EXIT | cm_event::ADDR_CHANGE => What::Other,
            other => {
                tracing::debug!(event = other, "event of the connection manager");
                What::Other
            }
        }
    }
}

fn private_data(param: &ConnParam) -> Vec<u8> {
    let (data, len) = (param.private_data.cast::<u8>(), param.private_data_len);
    if data.is_null() {
        return Vec::new();
    }
    // SAFETY: a request's event has so many bytes, until it is acknowledged.
    unsafe { std::slice::from_raw_parts(data, len.into()) }.to_vec()
}

impl Drop for Events {
    fn drop(&mut self) {
        // SAFETY: identifiers hold it, so none is left; all its events were acknowledged when taken.
        unsafe { (self.cm.destroy_event_channel)(self.raw.as_ptr()) };
    }
}

/// An identifier of the connection manager. Its queue pair is destroyed before it.
pub(super) struct Id {
    raw: NonNull<cm_abi::CmId>,
    events: Arc<Events>,
}

// SAFETY: librdmacm may be called from any thread; it does its own locking.
unsafe impl Send for Id {}

/// What both ends say about a connection.
#[derive(Clone, Copy)]
pub(super) struct Terms {
    /// The number of our queue pair.
    pub(super) qp_num: u32,
    /// RDMA reads that it may have under way.
    pub(super) reads_asked: u8,
    /// RDMA reads that it answers at a time.
    pub(super) reads_answered: u8,
}

impl Id {
    pub(super) fn new(events: &Arc<Events>) -> Result<Self, RailError> {
        let mut raw = ptr::null_mut();
        let (channel, context) = (events.raw.as_ptr(), ptr::null_mut());
        // SAFETY: the channel lives, and the pointer is to a live one.
        let returned =
            unsafe { (events.cm.create_id)(channel, &raw mut raw, context, cm_abi::PS_TCP) };
        done("rdma_create_id", returned)?;
        let raw = NonNull::new(raw).ok_or_else(|| RailError::os("rdma_create_id", libc::EIO))?;
        Ok(Self { raw, events: Arc::clone(events) })
    }

    /// Listens on a port of its own, of this address; says which.
    pub(super) fn listen(&self, ip: IpAddr, backlog: i32) -> Result<u16, RailError> {
        let address = SockAddr::from(SocketAddr::new(ip, 0));
        let cm = self.events.cm;
        // SAFETY: the identifier lives, and so does the address during the call.
        let returned = unsafe { (cm.bind_addr)(self.raw.as_ptr(), address.as_ptr().cast()) };
        done(&format!("rdma_bind_addr to {ip}"), returned)?;
        // SAFETY: the identifier lives.
        done("rdma_listen", unsafe { (cm.listen)(self.raw.as_ptr(), backlog) })?;
        // SAFETY: as above.
        Ok(u16::from_be(unsafe { (cm.get_src_port)(self.raw.as_ptr()) }))
    }

    /// Begins to look for the way from our address to the peer's.
    pub(super) fn resolve(&self, ip: IpAddr, peer: SocketAddr) -> Result<(), RailError> {
        let (from, to) = (SockAddr::from(SocketAddr::new(ip, 0)), SockAddr::from(peer));
        let (from, to) = (from.as_ptr().cast(), to.as_ptr().cast());
        let resolve = self.events.cm.resolve_addr;
        // SAFETY: the identifier lives, and so do the addresses during the call.
        let returned = unsafe { resolve(self.raw.as_ptr(), from, to, RESOLVE_TIMEOUT_MS) };
        done(&format!("rdma_resolve_addr from {ip} to {peer}"), returned)
    }

    /// Goes on, once the address is resolved.
    pub(super) fn resolve_route(&self) -> Result<(), RailError> {
        // SAFETY: the identifier lives.
        let returned =
            unsafe { (self.events.cm.resolve_route)(self.raw.as_ptr(), RESOLVE_TIMEOUT_MS) };
        done("rdma_resolve_route", returned)
    }

    /// Asks the peer for a connection, with these bytes. NICs return at once; siw when TCP has connected, or has
    /// been refused, or after the kernel's patience (net.ipv4.tcp_syn_retries) where nobody answers: therefore it is
    /// called only when somebody did.
    pub(super) fn connect(&self, terms: &Terms, private: &[u8]) -> Result<(), RailError> {
        let param = param(terms, private);
        // SAFETY: the identifier lives, and so do the struct and the bytes during the call.
        done("rdma_connect", unsafe {
            (self.events.cm.connect)(self.raw.as_ptr(), &raw const param)
        })
    }

    /// Grants a request.
    pub(super) fn accept(&self, terms: &Terms) -> Result<(), RailError> {
        let param = param(terms, &[]);
        // SAFETY: as above.
        done("rdma_accept", unsafe { (self.events.cm.accept)(self.raw.as_ptr(), &raw const param) })
    }

    /// Refuses a request.
    pub(super) fn reject(&self) {
        // SAFETY: the identifier lives, and no bytes go with it.
        let returned = unsafe { (self.events.cm.reject)(self.raw.as_ptr(), ptr::null(), 0) };
        if let Err(errno) = check(returned) {
            tracing::debug!(errno, "rdma_reject");
        }
    }

    /// Whether an event is about this one.
    pub(super) fn is_of(&self, event: &Event) -> bool {
        self.raw.as_ptr() == event.id
    }

    /// The name of the device that it is bound to; `None` before it is, or where it is to none.
    pub(super) fn device(&self) -> Option<String> {
        // SAFETY: the identifier lives; what it is bound to the library keeps open as long as it does.
        let device = unsafe {
            let context = (*self.raw.as_ptr()).verbs.as_ref()?;
            context.device.as_ref()?
        };
        // SAFETY: the name ends with 0.
        let name = unsafe { CStr::from_ptr((&raw const device.name).cast()) };
        Some(name.to_string_lossy().into_owned())
    }
}

impl Drop for Id {
    fn drop(&mut self) {
        // SAFETY: given back once; all its events were acknowledged when taken.
        complain("rdma_destroy_id", unsafe { (self.events.cm.destroy_id)(self.raw.as_ptr()) });
    }
}

fn param(terms: &Terms, private: &[u8]) -> ConnParam {
    ConnParam {
        private_data: private.as_ptr().cast(),
        private_data_len: u8::try_from(private.len()).unwrap_or(u8::MAX),
        responder_resources: terms.reads_answered,
        initiator_depth: terms.reads_asked,
        flow_control: 0,
        retry_count: 0,
        rnr_retry_count: 0,
        srq: 0,
        qp_num: terms.qp_num,
    }
}

fn done(what: &str, returned: i32) -> Result<(), RailError> {
    check(returned).map_err(|errno| RailError::os(what, errno))
}
