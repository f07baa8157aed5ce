//! Sockets that never block.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream},
    ops::RangeInclusive,
    os::fd::AsRawFd,
    time::Duration,
};

use rustix::event::{PollFd, PollFlags, Timespec};
use socket2::{Domain, SockRef, Socket, TcpKeepalive, Type};

/// The congestion control for loopback, where the system's may pace.
const LOOPBACK_CONGESTION: &[u8] = b"cubic";

/// Memory of a system call: address and length.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub(crate) addr: *mut u8,
    pub(crate) len: usize,
}

impl Span {
    pub(crate) const EMPTY: Self = Self { addr: std::ptr::null_mut(), len: 0 };

    pub(crate) fn of(bytes: &[u8]) -> Self {
        Self { addr: bytes.as_ptr().cast_mut(), len: bytes.len() }
    }

    pub(crate) fn of_mut(bytes: &mut [u8]) -> Self {
        Self { addr: bytes.as_mut_ptr(), len: bytes.len() }
    }

    /// The first bytes, `most` at most.
    pub(crate) fn first(self, most: usize) -> Self {
        Self { len: self.len.min(most), ..self }
    }

    /// The bytes.
    ///
    /// # Safety
    /// The memory is readable, and does not change while the slice lives.
    pub(crate) unsafe fn bytes<'a>(self) -> &'a [u8] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: the caller promises the memory.
        unsafe { std::slice::from_raw_parts(self.addr, self.len) }
    }

    /// The rest behind the first `done` bytes.
    pub(crate) fn after(self, done: usize) -> Self {
        let done = done.min(self.len);
        Self { addr: self.addr.wrapping_add(done), len: self.len - done }
    }
}

/// Opens the socket that a process listens on: all addresses, or loopback's if it has no others.
pub(crate) fn listen(addrs: &[IpAddr], ports: &RangeInclusive<u16>) -> io::Result<TcpListener> {
    let is_local = addrs.iter().all(IpAddr::is_loopback);
    let has_six = addrs.iter().any(IpAddr::is_ipv6);
    let has_four = addrs.iter().any(IpAddr::is_ipv4);
    let ip: IpAddr = match (is_local, has_six, has_four) {
        (true, true, false) => Ipv6Addr::LOCALHOST.into(),
        (true, false, _) => Ipv4Addr::LOCALHOST.into(),
        (false, false, _) => Ipv4Addr::UNSPECIFIED.into(),
        (_, true, _) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let mut last = io::Error::from(io::ErrorKind::AddrInUse);
    for port in ports.clone() {
        match listen_at(SocketAddr::new(ip, port)) {
            Ok(listener) => return Ok(listener),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn listen_at(addr: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, None)?;
    if let IpAddr::V6(ip) = addr.ip() {
        socket.set_only_v6(!ip.is_unspecified())?;
    }
    socket.set_reuse_address(true)?;
    socket.bind(&addr.into())?;
    socket.listen(4096)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

/// Begins to connect, from an address of this host's if one is given.
pub(crate) fn begin_connect(from: Option<IpAddr>, to: SocketAddr) -> io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    if let Some(ip) = from {
        socket.bind(&SocketAddr::new(ip, 0).into())?;
    }
    match socket.connect(&to.into()) {
        Ok(()) => {}
        Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {}
        Err(error) => return Err(error),
    }
    Ok(socket.into())
}

/// Whether a socket that connects is connected.
pub(crate) fn is_connected(stream: &TcpStream) -> io::Result<bool> {
    let mut fds = [PollFd::new(stream, PollFlags::OUT)];
    rustix::event::poll(&mut fds, Some(&Timespec::default()))?;
    if fds[0].revents().is_empty() {
        return Ok(false);
    }
    match stream.take_error()? {
        Some(error) => Err(error),
        // A port may connect to itself where the kernel picks it as the source.
        None if stream.local_addr()? == stream.peer_addr()? => {
            Err(io::ErrorKind::ConnectionRefused.into())
        }
        None => Ok(true),
    }
}

/// Linux's number of the option for the longest time between two retransmissions, in milliseconds.
/// Kernels before 6.15 do not have it.
const TCP_RTO_MAX_MS: libc::c_int = 44;

/// Has a link that comes back be noticed soon: the kernel would double the time between two
/// attempts each time.
fn retransmit_often(stream: &TcpStream) {
    for (option, value) in [(libc::TCP_THIN_LINEAR_TIMEOUTS, 1), (TCP_RTO_MAX_MS, 1000)] {
        let value: libc::c_int = value;
        // SAFETY: the value lives through the call, and has the length that is told.
        let result = unsafe {
            libc::setsockopt(
                stream.as_raw_fd(),
                libc::IPPROTO_TCP,
                option,
                (&raw const value).cast(),
                size_of_val(&value) as libc::socklen_t,
            )
        };
        if result != 0 {
            let error = io::Error::last_os_error();
            tracing::trace!("the kernel does not have TCP's option {option}: {error}");
        }
    }
}

/// Sets the options of a connected socket. The kernel gives a peer up that is silent for `limit`.
pub(crate) fn tune(stream: &TcpStream, limit: Duration) -> io::Result<()> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    retransmit_often(stream);
    let socket = SockRef::from(stream);
    socket.set_tcp_user_timeout(Some(limit))?;
    let interval = (limit / 4).clamp(Duration::from_secs(1), Duration::from_secs(60));
    socket.set_tcp_keepalive(
        &TcpKeepalive::new().with_time(interval).with_interval(interval).with_retries(3),
    )?;
    let is_local = match (stream.local_addr(), stream.peer_addr()) {
        (Ok(local), Ok(peer)) => peer.ip().is_loopback() || peer.ip() == local.ip(),
        _ => false,
    };
    if is_local && let Err(error) = socket.set_tcp_congestion(LOOPBACK_CONGESTION) {
        tracing::debug!("loopback keeps the system's congestion control: {error}");
    }
    Ok(())
}

/// Resets the connection at once: bytes that the kernel has queued never leave.
pub(crate) fn reset(stream: &TcpStream) {
    if let Err(error) = rustix::net::connect_unspec(stream) {
        tracing::trace!("resetting a socket that is gone already: {error}");
    }
}

/// Sends; `None` when it would block.
///
/// # Safety
/// The memory is readable.
pub(crate) unsafe fn send(stream: &TcpStream, spans: &[Span]) -> io::Result<Option<usize>> {
    with_header(spans, |header| {
        // SAFETY: the header and its vectors live through the call; the caller promises the memory.
        unsafe {
            libc::sendmsg(stream.as_raw_fd(), header, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT)
        }
    })
}

/// Receives; `None` when it would block, 0 at the end of the stream.
///
/// # Safety
/// The memory is writable.
pub(crate) unsafe fn recv(stream: &TcpStream, spans: &[Span]) -> io::Result<Option<usize>> {
    with_header(spans, |header| {
        // SAFETY: the header and its vectors live through the call; the caller promises the memory.
        unsafe { libc::recvmsg(stream.as_raw_fd(), header, libc::MSG_DONTWAIT) }
    })
}

#[cfg(test)]
thread_local! {
    /// System calls of this thread that send and receive.
    pub(crate) static CALLS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

fn with_header(
    spans: &[Span],
    call: impl Fn(*mut libc::msghdr) -> isize,
) -> io::Result<Option<usize>> {
    const MOST: usize = 4;
    let mut vectors = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; MOST];
    let used = spans.len().min(MOST);
    for (vector, span) in vectors.iter_mut().zip(spans) {
        *vector = libc::iovec { iov_base: span.addr.cast(), iov_len: span.len };
    }
    // SAFETY: all zeroes is an empty message header.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = vectors.as_mut_ptr();
    header.msg_iovlen = used;
    loop {
        #[cfg(test)]
        CALLS.set(CALLS.get() + 1);
        let count = call(&raw mut header);
        if let Ok(count) = usize::try_from(count) {
            return Ok(Some(count));
        }
        let error = io::Error::last_os_error();
        match error.kind() {
            io::ErrorKind::Interrupted => {}
            io::ErrorKind::WouldBlock => return Ok(None),
            _ => return Err(error),
        }
    }
}
