//! Datagrams on their way out: those of one path together, cut apart by the kernel (GSO) or sent by
//! one `sendmmsg`.

use std::io;

use libc::{c_void, iovec, mmsghdr, msghdr};
use socket2::SockAddr;

use crate::{counters::UdpCounters, socket::UdpSocket};

/// Bytes of a train: the most that one call of GSO takes.
const TRAIN: usize = 65_000;
/// Most datagrams of a train (`UDP_MAX_SEGMENTS` of older kernels).
const MOST: usize = 64;

/// Datagrams of one path and of one length; the last may be shorter.
struct Train {
    bytes: Box<[u8]>,
    len: usize,
    count: usize,
    /// Bytes of each datagram.
    segment: usize,
    /// The last one is shorter, and none may follow.
    is_closed: bool,
}

/// The trains of all paths.
pub(crate) struct Trains {
    trains: Vec<Train>,
    has_gso: bool,
}

/// The kernel does not send datagrams of this length over the interface.
pub(crate) struct TooLong;

/// The way out for one connection at a time.
pub(crate) struct Outlet<'a> {
    pub(crate) trains: &'a mut Trains,
    pub(crate) sockets: &'a [UdpSocket],
    pub(crate) counters: &'a mut UdpCounters,
}

/// Room for one control message, aligned for its head.
#[repr(C, align(8))]
struct Control([u8; 32]);

impl Trains {
    pub(crate) fn new(paths: usize, has_gso: bool) -> Self {
        let empty = || Train {
            bytes: vec![0; TRAIN].into_boxed_slice(),
            len: 0,
            count: 0,
            segment: 0,
            is_closed: false,
        };
        Self { trains: (0..paths).map(|_| empty()).collect(), has_gso }
    }
}

impl Train {
    fn takes(&self, len: usize) -> bool {
        let fits = self.len + len <= TRAIN && self.count < MOST;
        self.count == 0 || fits && !self.is_closed && len <= self.segment
    }
}

impl Outlet<'_> {
    /// Room for a datagram of this length for the peer's socket `to`. It goes out after
    /// [`Outlet::commit`]. `None` for a path that there is not, or a longer one than there is.
    pub(crate) fn room(&mut self, path: usize, to: &SockAddr, len: usize) -> Option<&mut [u8]> {
        if !self.trains.trains.get(path)?.takes(len) {
            // Its length is told of at the end.
            let _ = self.dispatch(path, to);
        }
        let train = self.trains.trains.get_mut(path)?;
        train.bytes.get_mut(train.len..)?.get_mut(..len)
    }

    /// The room of this path and length holds a datagram now.
    pub(crate) fn commit(&mut self, path: usize, len: usize) {
        let Some(train) = self.trains.trains.get_mut(path) else { return };
        if train.count == 0 {
            train.segment = len;
        }
        train.is_closed = len < train.segment;
        (train.len, train.count) = (train.len + len, train.count + 1);
    }

    /// Sends everything. `to` has the peer's sockets by path.
    pub(crate) fn finish(&mut self, to: &[SockAddr]) -> Result<(), TooLong> {
        let mut result = Ok(());
        for (path, to) in to.iter().enumerate() {
            if self.dispatch(path, to).is_err() {
                result = Err(TooLong);
            }
        }
        result
    }

    /// Sends a train. Datagrams that the kernel does not take now are lost, as in a network.
    fn dispatch(&mut self, path: usize, to: &SockAddr) -> Result<(), TooLong> {
        let Some(train) = self.trains.trains.get_mut(path).filter(|train| train.count > 0) else {
            return Ok(());
        };
        let Some(socket) = self.sockets.get(path) else { return Ok(()) };
        self.counters.sent += train.count as u64;
        let result = if train.count > 1 && self.trains.has_gso {
            let cut = send_cut(socket, to, train);
            let is_refused =
                |e: &io::Error| matches!(e.raw_os_error(), Some(libc::EIO | libc::EINVAL));
            if cut.as_ref().is_err_and(is_refused) {
                let apart = send_apart(socket, to, train);
                // The interface does not checksum (udp(7)): from now on without. Datagrams that
                // are too long fail both ways.
                self.trains.has_gso = apart.is_err();
                apart
            } else {
                cut
            }
        } else {
            send_apart(socket, to, train)
        };
        (train.len, train.count, train.is_closed) = (0, 0, false);
        match result {
            Err(e) if e.raw_os_error() == Some(libc::EMSGSIZE) => Err(TooLong),
            Err(_) => {
                self.counters.unsent += 1;
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }
}

fn message(to: &SockAddr, iov: &mut iovec) -> msghdr {
    // SAFETY: all fields of a msghdr may be zero.
    let mut message: msghdr = unsafe { std::mem::zeroed() };
    message.msg_name = to.as_ptr().cast_mut().cast::<c_void>();
    message.msg_namelen = to.len();
    message.msg_iov = iov;
    message.msg_iovlen = 1;
    message
}

fn iov(bytes: &mut [u8]) -> iovec {
    iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }
}

/// Sends a train as one buffer, which the kernel cuts.
fn send_cut(socket: &UdpSocket, to: &SockAddr, train: &mut Train) -> io::Result<()> {
    let mut control = Control([0; 32]);
    let mut iov = iov(&mut train.bytes[..train.len]);
    let mut message = message(to, &mut iov);
    message.msg_control = control.0.as_mut_ptr().cast();
    // SAFETY: a computation.
    message.msg_controllen = unsafe { libc::CMSG_SPACE(2) } as _;
    // SAFETY: the control buffer is aligned and has room for a head and two bytes.
    unsafe {
        let head = libc::CMSG_FIRSTHDR(&raw const message);
        (*head).cmsg_level = libc::SOL_UDP;
        (*head).cmsg_type = libc::UDP_SEGMENT;
        (*head).cmsg_len = libc::CMSG_LEN(2) as _;
        libc::CMSG_DATA(head).cast::<u16>().write_unaligned(train.segment as u16);
    }
    // SAFETY: name, bytes and control live until the call has returned.
    let sent = unsafe { libc::sendmsg(socket.raw(), &raw const message, libc::MSG_NOSIGNAL) };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Sends the datagrams of a train one by one, in as few calls as the kernel needs.
fn send_apart(socket: &UdpSocket, to: &SockAddr, train: &mut Train) -> io::Result<()> {
    let none = iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
    let mut iovs = [none; MOST];
    let parts = train.bytes[..train.len].chunks_mut(train.segment.max(1));
    let count = iovs.iter_mut().zip(parts).map(|(place, part)| *place = iov(part)).count();
    // SAFETY: all fields of an mmsghdr may be zero.
    let mut messages: [mmsghdr; MOST] = unsafe { std::mem::zeroed() };
    for (place, iov) in messages.iter_mut().zip(&mut iovs[..count]) {
        place.msg_hdr = message(to, iov);
    }
    let mut done = 0;
    while let Some(rest) = messages[..count].get_mut(done..).filter(|rest| !rest.is_empty()) {
        // SAFETY: names and bytes live until the call has returned; there are as many as are named.
        let sent = unsafe {
            libc::sendmmsg(
                socket.raw(),
                rest.as_mut_ptr(),
                rest.len() as u32,
                libc::MSG_NOSIGNAL as _,
            )
        };
        match usize::try_from(sent) {
            Ok(sent) if sent > 0 => done += sent,
            Ok(_) => return Ok(()),
            Err(_) => return Err(io::Error::last_os_error()),
        }
    }
    Ok(())
}
