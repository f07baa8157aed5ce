//! TCP: a byte pipe over a socket, and the options that make it fast.

use std::{
    io,
    net::{IpAddr, Shutdown, SocketAddr, TcpStream},
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    sync::Arc,
    time::Duration,
};

use rustix::event::{PollFd, PollFlags, Timespec};
use socket2::{Domain, SockRef, Socket, TcpKeepalive, Type};
use uccl_fabric::{
    clock::coarse_ms,
    mem::Span,
    pipe::{Backlog, Pipe, PipeRx, PipeTx, uninterrupted},
};

/// The most pieces that one vectored system call takes.
const IOV_MAX: usize = 1024;
/// The congestion control for loopback. The system's own choice is often one for wide area
/// networks, such as BBR, which paces: that costs loopback more than half of its speed.
const LOOPBACK_CONGESTION: &str = "cubic";

/// A connected TCP socket as a pipe.
pub struct TcpPipe(Arc<TcpStream>);

/// The sending half of a [`TcpPipe`].
pub struct TcpTx(Arc<TcpStream>);

/// The receiving half of a [`TcpPipe`].
pub struct TcpRx {
    socket: Arc<TcpStream>,
    is_cut: bool,
    /// When a reset was last looked for, by the coarse clock.
    looked_ms: u64,
}

/// Options that are set on every socket of a connection.
#[derive(Clone, Debug, Default)]
pub struct TcpOptions {
    /// The congestion control; `None` keeps the system's, except on loopback.
    pub congestion: Option<String>,
    /// After this long without an answer the kernel gives the peer up; zero keeps the system's
    /// default.
    pub timeout: Duration,
}

impl TcpPipe {
    /// Makes a pipe of a connected socket.
    pub fn new(stream: TcpStream, options: &TcpOptions) -> io::Result<(Self, TcpTx, TcpRx)> {
        stream.set_nonblocking(true)?;
        tune(&stream, options)?;
        let stream = Arc::new(stream);
        let rx = TcpRx { socket: Arc::clone(&stream), is_cut: false, looked_ms: 0 };
        Ok((Self(Arc::clone(&stream)), TcpTx(stream), rx))
    }
}

/// Sets the options. Fails if a congestion control that was asked for by name cannot be had.
fn tune(stream: &TcpStream, options: &TcpOptions) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = SockRef::from(stream);
    if !options.timeout.is_zero() {
        socket.set_tcp_user_timeout(Some(options.timeout))?;
        let interval = (options.timeout / 4).max(Duration::from_secs(1));
        socket.set_tcp_keepalive(
            &TcpKeepalive::new().with_time(interval).with_interval(interval).with_retries(3),
        )?;
    }
    match &options.congestion {
        Some(name) => socket.set_tcp_congestion(name.as_bytes())?,
        None if is_loopback(stream) => {
            // A process may lack the right to choose. The system's choice works too, but slower.
            if let Err(e) = socket.set_tcp_congestion(LOOPBACK_CONGESTION.as_bytes()) {
                tracing::debug!("loopback keeps the system's congestion control: {e}");
            }
        }
        None => {}
    }
    Ok(())
}

fn is_loopback(stream: &TcpStream) -> bool {
    match (stream.local_addr(), stream.peer_addr()) {
        (Ok(local), Ok(peer)) => peer.ip().is_loopback() || peer.ip() == local.ip(),
        _ => false,
    }
}

/// Opens a listening socket. An unspecified IPv6 address takes IPv4 as well.
pub fn listen(addr: SocketAddr) -> io::Result<std::net::TcpListener> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, None)?;
    if let IpAddr::V6(ip) = addr.ip() {
        socket.set_only_v6(!ip.is_unspecified())?;
    }
    // This cannot steal a port: on Linux it only lets a listener bind beside connections in
    // TIME_WAIT.
    socket.set_reuse_address(true)?;
    socket.bind(&addr.into())?;
    socket.listen(1024)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

impl PipeTx for TcpTx {
    unsafe fn send(&mut self, spans: &[Span]) -> io::Result<usize> {
        with_iovecs(spans, |msg| {
            // SAFETY: the header and its iovecs live through the call; the memory is readable as
            // the caller promises.
            unsafe {
                libc::sendmsg(self.0.as_raw_fd(), msg, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT)
            }
        })
        .map(|sent| sent.unwrap_or(0))
    }
}

impl PipeRx for TcpRx {
    unsafe fn recv(&mut self, spans: &[Span]) -> io::Result<Option<usize>> {
        with_iovecs(spans, |msg| {
            // SAFETY: as above; the memory is writable as the caller promises.
            unsafe { libc::recvmsg(self.socket.as_raw_fd(), msg, libc::MSG_DONTWAIT) }
        })
    }

    /// Linux still hands out received bytes after a reset. A check for one costs a system call, so
    /// it is made once in a tick of the clock, and thus also after any longer pause, as when the
    /// process was stopped.
    fn is_cut(&mut self) -> bool {
        let now = coarse_ms();
        if !self.is_cut && now != self.looked_ms {
            self.looked_ms = now;
            let mut fds = [PollFd::new(&*self.socket, PollFlags::empty())];
            let looked = rustix::event::poll(&mut fds, Some(&Timespec::default()));
            self.is_cut = looked.is_ok() && fds[0].revents().contains(PollFlags::ERR);
        }
        self.is_cut
    }

    fn backlog(&mut self) -> Backlog {
        let mut fds = [PollFd::new(&*self.socket, PollFlags::RDHUP)];
        let looked = rustix::event::poll(&mut fds, Some(&Timespec::default()));
        let bytes = rustix::io::ioctl_fionread(&*self.socket).unwrap_or(0) as usize;
        Backlog { bytes, has_ended: looked.is_ok_and(|shown| shown > 0) }
    }
}

/// Runs a vectored call over as many of the spans as one call takes; `None` when it would block.
fn with_iovecs(
    spans: &[Span],
    call: impl Fn(*mut libc::msghdr) -> isize,
) -> io::Result<Option<usize>> {
    const FEW: usize = 8;
    let count = spans.len().min(IOV_MAX);
    let iovec = |span: &Span| libc::iovec { iov_base: span.addr as *mut _, iov_len: span.len };
    let mut few = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; FEW];
    let mut many;
    let iov = if count <= FEW {
        few.iter_mut().zip(spans).for_each(|(iov, span)| *iov = iovec(span));
        &mut few[..count]
    } else {
        many = spans[..count].iter().map(iovec).collect::<Vec<_>>();
        &mut many[..]
    };
    // SAFETY: all zeroes is an empty message header.
    let mut msg: libc::msghdr = unsafe { std::mem::zeroed() };
    msg.msg_iov = iov.as_mut_ptr();
    msg.msg_iovlen = count;
    let msg = &raw mut msg;
    uninterrupted(|| call(msg))
}

impl Pipe for TcpPipe {
    type Tx = TcpTx;
    type Rx = TcpRx;

    const LINK: &'static str = "tcp";

    fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    fn room_is_writable(&self) -> bool {
        true
    }

    fn cut(&self) {
        // Resets at once and drops queued bytes; a shutdown would send all of them first.
        let reset = rustix::net::connect_unspec(&*self.0).map_err(io::Error::from);
        if let Err(e) = reset.or_else(|_| self.0.shutdown(Shutdown::Both)) {
            tracing::trace!("cutting a socket that is gone already: {e}");
        }
    }
}
