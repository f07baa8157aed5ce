//! Datagrams that arrive: several at a time (`recvmmsg`), some of them joined by the kernel (GRO).

use std::io;

use libc::{c_int, cmsghdr, iovec, mmsghdr, msghdr};

use crate::socket::UdpSocket;

/// Buffers that one call fills.
const BUFFERS: usize = 16;
/// Bytes of a buffer: the longest run of datagrams that the kernel joins.
const BUFFER: usize = 1 << 16;
/// Congestion experienced (RFC 3168, section 5).
const CE: u8 = 0b11;

/// Room for the control messages of a buffer, aligned for their heads.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct Control([u8; 64]);

/// Buffers for datagrams.
pub(crate) struct Inlet {
    bytes: Box<[u8]>,
    controls: [Control; BUFFERS],
    runs: [Run; BUFFERS],
}

/// Datagrams of one length, one behind the other; the last may be shorter.
#[derive(Clone, Copy, Default)]
struct Run {
    len: usize,
    /// Bytes of each; 0 for a single one.
    segment: usize,
    is_marked: bool,
}

impl Inlet {
    pub(crate) fn new() -> Self {
        Self {
            bytes: vec![0; BUFFERS * BUFFER].into_boxed_slice(),
            controls: [Control([0; 64]); BUFFERS],
            runs: [Run::default(); BUFFERS],
        }
    }

    /// Receives from a socket. Returns how many buffers were filled, and whether more may be there.
    ///
    /// # Errors
    /// Of the socket. An error that a datagram of ours has met is none.
    pub(crate) fn receive(&mut self, socket: &UdpSocket) -> io::Result<(usize, bool)> {
        let none = iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        let mut iovs = [none; BUFFERS];
        // SAFETY: all fields of an mmsghdr may be zero.
        let mut messages: [mmsghdr; BUFFERS] = unsafe { std::mem::zeroed() };
        let buffers = self.bytes.chunks_mut(BUFFER).zip(&mut self.controls).zip(&mut iovs);
        for (message, ((buffer, control), iov)) in messages.iter_mut().zip(buffers) {
            *iov = iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: BUFFER };
            message.msg_hdr.msg_iov = iov;
            message.msg_hdr.msg_iovlen = 1;
            message.msg_hdr.msg_control = control.0.as_mut_ptr().cast();
            message.msg_hdr.msg_controllen = control.0.len() as _;
        }
        // SAFETY: buffers and control buffers are as long as they are named, and live until the
        // call has returned.
        let got = unsafe {
            libc::recvmmsg(
                socket.raw(),
                messages.as_mut_ptr(),
                BUFFERS as u32,
                libc::MSG_DONTWAIT as _,
                std::ptr::null_mut(),
            )
        };
        let Ok(got) = usize::try_from(got) else {
            let error = io::Error::last_os_error();
            return match error.raw_os_error() {
                Some(libc::EAGAIN | libc::EINTR | libc::ECONNREFUSED) => Ok((0, false)),
                _ => Err(error),
            };
        };
        for (run, message) in self.runs.iter_mut().zip(&messages[..got.min(BUFFERS)]) {
            *run = run_of(&message.msg_hdr, message.msg_len as usize);
        }
        Ok((got, got == BUFFERS))
    }

    /// The datagrams of the first `filled` buffers, and whether a queue marked each (ECN).
    pub(crate) fn datagrams(&self, filled: usize) -> impl Iterator<Item = (&[u8], bool)> {
        let buffers = self.bytes.chunks(BUFFER).zip(&self.runs).take(filled);
        buffers.flat_map(|(buffer, run)| {
            let bytes = buffer.get(..run.len).unwrap_or_default();
            let segment = if run.segment == 0 { bytes.len().max(1) } else { run.segment };
            bytes.chunks(segment).map(move |datagram| (datagram, run.is_marked))
        })
    }
}

/// Reads the control messages of a buffer.
fn run_of(message: &msghdr, len: usize) -> Run {
    let mut run = Run { len, ..Run::default() };
    // SAFETY: the kernel has written the control messages of this message and their length.
    let mut next: *const cmsghdr = unsafe { libc::CMSG_FIRSTHDR(message) };
    while !next.is_null() {
        // SAFETY: a control message that the kernel has written.
        let (head, data) = unsafe { (*next, libc::CMSG_DATA(next)) };
        match (head.cmsg_level, head.cmsg_type) {
            // SAFETY: the kernel writes one byte (ip(7)).
            (libc::IPPROTO_IP, libc::IP_TOS) => run.is_marked = unsafe { *data } & CE == CE,
            (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                // SAFETY: the kernel writes an int (ipv6(7)).
                let class = unsafe { data.cast::<c_int>().read_unaligned() };
                run.is_marked = class as u8 & CE == CE;
            }
            (libc::SOL_UDP, libc::UDP_GRO) => {
                // SAFETY: the kernel writes an int (udp(7)).
                let segment = unsafe { data.cast::<c_int>().read_unaligned() };
                run.segment = usize::try_from(segment).unwrap_or(0);
            }
            _ => {}
        }
        // SAFETY: as for the first one.
        next = unsafe { libc::CMSG_NXTHDR(message, next) };
    }
    run
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, UdpSocket as PlainSocket};

    use rustix::event::{PollFd, PollFlags, poll};
    use socket2::SockRef;

    use super::*;

    /// The first datagrams that come to a socket.
    fn arrivals(socket: &UdpSocket) -> Vec<(Vec<u8>, bool)> {
        let mut inlet = Inlet::new();
        loop {
            let (filled, _) = inlet.receive(socket).expect("received");
            if filled > 0 {
                let owned = |(bytes, is_marked): (&[u8], bool)| (bytes.to_vec(), is_marked);
                return inlet.datagrams(filled).map(owned).collect();
            }
            poll(&mut [PollFd::new(socket, PollFlags::IN)], None).expect("polled");
        }
    }

    #[test]
    fn marks_of_queues_are_seen() {
        let socket = UdpSocket::bind(Ipv4Addr::LOCALHOST.into(), true).expect("a socket");
        let other = PlainSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a socket");
        for (class, is_marked) in [(0b10, false), (0b11, true), (0b01, false)] {
            SockRef::from(&other).set_tos_v4(class).expect("set");
            other.send_to(b"one", (Ipv4Addr::LOCALHOST, socket.port())).expect("sent");
            assert_eq!(arrivals(&socket), [(b"one".to_vec(), is_marked)], "{class:#b}");
        }
    }
}
