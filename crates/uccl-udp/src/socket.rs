//! A socket of a path, and its options.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
};

use libc::{c_int, socklen_t};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

/// Bytes that a socket asks the kernel to keep for it. The kernel allows less, as
/// `net.core.rmem_max` says.
const ROOM: usize = 4 << 20;
/// ECN-capable transport, ECT(0) (RFC 3168, section 5).
const ECT0: c_int = 0b10;

/// A socket that does not block, bound to a port of its own.
#[derive(Debug)]
pub(crate) struct UdpSocket {
    socket: Socket,
    port: u16,
}

impl UdpSocket {
    /// Binds to a free port of an address. `joins` asks for datagrams that the kernel has joined
    /// (GRO); it does so where it can.
    pub(crate) fn bind(ip: IpAddr, joins: bool) -> io::Result<Self> {
        let domain = if ip.is_ipv4() { Domain::IPV4 } else { Domain::IPV6 };
        let socket = Socket::new(domain, Type::DGRAM, Some(Protocol::UDP))?;
        socket.set_nonblocking(true)?;
        // With less room the window is smaller.
        let _ = socket.set_recv_buffer_size(ROOM);
        let _ = socket.set_send_buffer_size(ROOM);
        let options = match ip {
            IpAddr::V4(_) => [
                (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_PROBE),
                (libc::IPPROTO_IP, libc::IP_TOS, ECT0),
                (libc::IPPROTO_IP, libc::IP_RECVTOS, 1),
            ],
            IpAddr::V6(_) => [
                (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_PROBE),
                (libc::IPPROTO_IPV6, libc::IPV6_TCLASS, ECT0),
                (libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS, 1),
            ],
        };
        for (level, name, value) in options {
            set(&socket, level, name, value)?;
        }
        if joins {
            // An older kernel hands out each datagram by itself.
            let _ = set(&socket, libc::SOL_UDP, libc::UDP_GRO, 1);
        }
        socket.bind(&SockAddr::from(SocketAddr::new(ip, 0)))?;
        let port = socket.local_addr()?.as_socket().map_or(0, |addr| addr.port());
        Ok(Self { socket, port })
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Bytes of datagrams for which the kernel has room. It counts its own overhead too, which is
    /// as much again for the shortest frames.
    pub(crate) fn room(&self) -> u32 {
        let size = self.socket.recv_buffer_size().unwrap_or(0);
        u32::try_from(size / 2).unwrap_or(u32::MAX)
    }

    /// Whether the kernel cuts a long buffer into datagrams (GSO).
    pub(crate) fn can_cut(&self) -> bool {
        set(&self.socket, libc::SOL_UDP, libc::UDP_SEGMENT, 0).is_ok()
    }

    pub(crate) fn raw(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

impl AsFd for UdpSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn set(socket: &Socket, level: c_int, name: c_int, value: c_int) -> io::Result<()> {
    let len = size_of::<c_int>() as socklen_t;
    // SAFETY: the descriptor is open; the value is an int, and has its length.
    let set = unsafe {
        libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const value).cast(), len)
    };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
