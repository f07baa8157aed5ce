//! Handing file descriptors to another process of this host: small messages over a unix stream
//! socket.
//!
//! A message is a header of 8 bytes (its length as 32 bits, how many descriptors go with it as 32
//! bits, both little-endian) and its bytes. The descriptors travel with its first byte.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

/// The longest message, in bytes.
pub const MAX_MESSAGE: usize = 64 * 1024;
/// The most descriptors that go with one message.
pub const MAX_FDS: usize = 64;

const HEADER: usize = 8;
/// The most descriptors that may come ahead of their message, and the most that may wait to be
/// sent.
const MAX_WAITING_FDS: usize = 4 * MAX_FDS;
/// How many bytes may wait to be sent.
const MAX_WAITING_BYTES: usize = 8 << 20;

/// A message and the descriptors that came with it.
#[derive(Debug)]
pub struct Message {
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Its descriptors, close-on-exec. Empty if this process could not take them all, because it
    /// has too many open.
    pub fds: Vec<OwnedFd>,
}

/// The process at the other end of a socket, as the system reports it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Peer {
    /// Its process id as seen here; `None` when it cannot be seen from here (another container).
    pub pid: Option<i32>,
    /// Its user id.
    pub uid: u32,
}

/// A message on its way out.
#[derive(Debug)]
struct OutgoingMessage {
    bytes: Vec<u8>,
    sent: usize,
    /// Sent with the first byte.
    fds: Vec<OwnedFd>,
}

/// Descriptors that came together: those of one message.
#[derive(Debug)]
struct Batch {
    fds: Vec<OwnedFd>,
    /// There were more than this process could take.
    cut: bool,
}

/// A non-blocking socket that carries messages with descriptors.
#[derive(Debug)]
pub struct FdSocket {
    stream: UnixStream,
    outgoing: VecDeque<OutgoingMessage>,
    incoming: Vec<u8>,
    batches: VecDeque<Batch>,
    ended: bool,
}

fn broken(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

fn would_block(error: rustix::io::Errno) -> bool {
    error == rustix::io::Errno::AGAIN || error == rustix::io::Errno::INTR
}

impl FdSocket {
    /// Wraps a connected socket.
    ///
    /// # Errors
    /// When it cannot be made non-blocking.
    pub fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        let (outgoing, incoming, batches) = Default::default();
        Ok(Self { stream, outgoing, incoming, batches, ended: false })
    }

    /// Connects to the listener at an abstract name, without waiting.
    ///
    /// # Errors
    /// [`io::ErrorKind::ConnectionRefused`] when nobody listens there,
    /// [`io::ErrorKind::WouldBlock`] when too many wait there already.
    pub fn connect(name: &[u8]) -> io::Result<Self> {
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
        let address = SocketAddrUnix::new_abstract_name(name)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        rustix::net::connect(&socket, &address)?;
        Self::new(socket.into())
    }

    /// The process at the other end: the one that made the connection, or listened for it.
    ///
    /// # Errors
    /// The system's error.
    pub fn peer(&self) -> io::Result<Peer> {
        let mut cred = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut len = size_of::<libc::ucred>() as libc::socklen_t;
        // SAFETY: `cred` is writable for the `len` bytes given.
        let rc = unsafe {
            let out = (&raw mut cred).cast();
            libc::getsockopt(
                self.stream.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                out,
                &raw mut len,
            )
        };
        if rc != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Peer { pid: (cred.pid > 0).then_some(cred.pid), uid: cred.uid })
    }

    /// Sends a message with copies of `fds`. The part that the socket does not take is kept;
    /// [`flush`](Self::flush) sends it.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] when it is too long or has too many descriptors. An error
    /// for which [`is_want`] is true leaves the socket as it was; others are the system's errors.
    pub fn send(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        if bytes.len() > MAX_MESSAGE || fds.len() > MAX_FDS {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut framed = Vec::with_capacity(HEADER + bytes.len());
        framed.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
        framed.extend_from_slice(&(fds.len() as u32).to_le_bytes());
        framed.extend_from_slice(bytes);
        if !self.flush()? {
            return self.keep(framed, 0, fds);
        }
        match send_once(self.stream.as_fd(), &framed, fds) {
            Ok(sent) if sent == framed.len() => Ok(()),
            // The descriptors went with the first byte.
            Ok(sent) => self.keep(framed, sent, &[]),
            Err(error) if would_block(error) => self.keep(framed, 0, fds),
            Err(error) => Err(error.into()),
        }
    }

    /// Keeps the unsent rest of a message for [`flush`](Self::flush).
    fn keep(&mut self, bytes: Vec<u8>, sent: usize, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let waiting =
            |of: fn(&OutgoingMessage) -> usize| self.outgoing.iter().map(of).sum::<usize>();
        let full = waiting(|message| message.bytes.len()) + bytes.len() > MAX_WAITING_BYTES
            || waiting(|message| message.fds.len()) + fds.len() > MAX_WAITING_FDS;
        // A message that was sent in part must be finished.
        if full && sent == 0 {
            return Err(io::ErrorKind::QuotaExceeded.into());
        }
        let fds = fds.iter().map(BorrowedFd::try_clone_to_owned).collect::<io::Result<_>>()?;
        self.outgoing.push_back(OutgoingMessage { bytes, sent, fds });
        Ok(())
    }

    /// Whether messages wait to be sent, because the peer has not read those before them.
    pub fn is_waiting(&self) -> bool {
        !self.outgoing.is_empty()
    }

    /// Sends kept messages, as far as the socket takes them. `true` when none is left; otherwise
    /// wait until the socket is writable. A message is dropped if the system has no room for its
    /// descriptors.
    ///
    /// # Errors
    /// The system's error; [`io::ErrorKind::BrokenPipe`] when the peer is gone.
    pub fn flush(&mut self) -> io::Result<bool> {
        while let Some(first) = self.outgoing.front_mut() {
            match first.send(self.stream.as_fd()) {
                Ok(()) if first.sent == first.bytes.len() => drop(self.outgoing.pop_front()),
                Ok(()) => {}
                Err(error) if would_block(error) => return Ok(false),
                Err(error) if !first.fds.is_empty() && is_want(&error.into()) => {
                    drop(self.outgoing.pop_front());
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(true)
    }

    /// The next message. `None` when no whole message has come yet. Non-blocking.
    ///
    /// # Errors
    /// [`io::ErrorKind::UnexpectedEof`] when the peer has closed (with nothing more to come),
    /// [`io::ErrorKind::InvalidData`] when it sends something invalid, otherwise the system's
    /// error.
    pub fn recv(&mut self) -> io::Result<Option<Message>> {
        self.recv_within(&mut usize::MAX.clone())
    }

    /// As [`recv`](Self::recv), reading from the socket at most `reads` times: a peer can send as
    /// fast as we read.
    ///
    /// # Errors
    /// As there.
    pub fn recv_within(&mut self, reads: &mut usize) -> io::Result<Option<Message>> {
        loop {
            if let Some(message) = self.parse()? {
                return Ok(Some(message));
            }
            if self.ended {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            if *reads == 0 || !self.fill()? {
                return Ok(None);
            }
            *reads -= 1;
        }
    }

    /// Takes a whole message out of the bytes that have come.
    fn parse(&mut self) -> io::Result<Option<Message>> {
        let Some((header, rest)) = self.incoming.split_first_chunk::<HEADER>() else {
            return Ok(None);
        };
        let [l0, l1, l2, l3, c0, c1, c2, c3] = *header;
        let len = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
        let count = u32::from_le_bytes([c0, c1, c2, c3]) as usize;
        if len > MAX_MESSAGE || count > MAX_FDS {
            return Err(broken("a message longer than agreed"));
        }
        // The descriptors come with the header's first byte, or not at all.
        let complete =
            self.batches.front().is_some_and(|batch| batch.cut || batch.fds.len() == count);
        if count > 0 && !complete {
            return Err(broken("a message without its descriptors"));
        }
        let Some(bytes) = rest.get(..len) else { return Ok(None) };
        let bytes = bytes.to_vec();
        self.incoming.drain(..HEADER + len);
        let batch = if count > 0 { self.batches.pop_front() } else { None };
        let fds = batch.filter(|batch| !batch.cut).map_or_else(Vec::new, |batch| batch.fds);
        Ok(Some(Message { bytes, fds }))
    }

    /// Reads once. `false` when nothing is there.
    fn fill(&mut self) -> io::Result<bool> {
        let mut chunk = [0; 4096];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [IoSliceMut::new(&mut chunk)];
        let received =
            rustix::net::recvmsg(&self.stream, &mut slices, &mut control, RecvFlags::CMSG_CLOEXEC);
        let received = match received {
            Err(error) if would_block(error) => return Ok(false),
            other => other?,
        };
        let cut = received.flags.contains(rustix::net::ReturnFlags::CTRUNC);
        let mut batch = Batch { fds: Vec::new(), cut };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                batch.fds.extend(fds);
            }
        }
        if cut {
            batch.fds.clear();
        }
        if cut || !batch.fds.is_empty() {
            self.batches.push_back(batch);
        }
        // A batch without descriptors counts as well: it has cost a little.
        let waiting: usize = self.batches.iter().map(|batch| batch.fds.len().max(1)).sum();
        if waiting > MAX_WAITING_FDS {
            return Err(broken("more descriptors than agreed"));
        }
        self.ended = received.bytes == 0;
        self.incoming.extend_from_slice(chunk.get(..received.bytes).unwrap_or_default());
        Ok(true)
    }
}

impl OutgoingMessage {
    fn send(&mut self, socket: BorrowedFd<'_>) -> rustix::io::Result<()> {
        let fds: Vec<_> = self.fds.iter().map(AsFd::as_fd).collect();
        let rest = self.bytes.get(self.sent..).unwrap_or_default();
        self.sent += send_once(socket, rest, &fds)?;
        self.fds.clear();
        Ok(())
    }
}

/// Sends as many bytes as the socket takes, and returns their number.
fn send_once(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
) -> rustix::io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)
}

/// Whether a message was not sent because something is missing: descriptors, memory, or a peer that
/// reads.
#[must_use]
pub fn is_want(error: &io::Error) -> bool {
    let wants = [libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::ENOBUFS, libc::ETOOMANYREFS];
    error.kind() == io::ErrorKind::QuotaExceeded
        || error.raw_os_error().is_some_and(|code| wants.contains(&code))
}

impl AsFd for FdSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl AsRawFd for FdSocket {
    fn as_raw_fd(&self) -> RawFd {
        self.stream.as_raw_fd()
    }
}

/// Listens at an abstract name, which is free again when the listener is dropped. Non-blocking.
#[derive(Debug)]
pub struct FdListener {
    listener: UnixListener,
}

impl FdListener {
    /// Listens at `name`.
    ///
    /// # Errors
    /// [`io::ErrorKind::AddrInUse`] when another listener has the name, otherwise the system's
    /// error.
    pub fn bind(name: &[u8]) -> io::Result<Self> {
        let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener })
    }

    /// The next connection, or `None` when nobody waits.
    ///
    /// # Errors
    /// The system's error.
    pub fn accept(&self) -> io::Result<Option<FdSocket>> {
        match self.listener.accept() {
            Ok((stream, _)) => FdSocket::new(stream).map(Some),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl AsFd for FdListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl AsRawFd for FdListener {
    fn as_raw_fd(&self) -> RawFd {
        self.listener.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek, Write};

    use super::*;

    fn pair() -> (FdSocket, FdSocket) {
        let (a, b) = UnixStream::pair().unwrap();
        (FdSocket::new(a).unwrap(), FdSocket::new(b).unwrap())
    }

    fn file(text: &str) -> std::fs::File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file
    }

    fn text(fd: OwnedFd) -> String {
        let mut file = std::fs::File::from(fd);
        let mut text = String::new();
        file.rewind().unwrap();
        file.read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn messages_come_in_order_with_their_descriptors() {
        let (mut a, mut b) = pair();
        let files: Vec<_> = (0..MAX_FDS).map(|i| file(&format!("file {i}"))).collect();
        for count in [0, 1, MAX_FDS, 0, 3] {
            let fds: Vec<_> = files[..count].iter().map(AsFd::as_fd).collect();
            a.send(&vec![count as u8; count * 100], &fds).unwrap();
        }
        for count in [0, 1, MAX_FDS, 0, 3] {
            let message = b.recv().unwrap().unwrap();
            assert_eq!(message.bytes, vec![count as u8; count * 100]);
            let texts: Vec<_> = message.fds.into_iter().map(text).collect();
            assert_eq!(texts, (0..count).map(|i| format!("file {i}")).collect::<Vec<_>>());
        }
        assert!(b.recv().unwrap().is_none());
        drop(a);
        assert_eq!(b.recv().unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn messages_that_do_not_fit_the_socket_are_kept() {
        let (mut a, mut b) = pair();
        let one = file("one");
        let sent = 40;
        for i in 0..sent {
            a.send(&vec![i; MAX_MESSAGE], &[one.as_fd()]).unwrap();
        }
        assert!(!a.flush().unwrap(), "the socket took it all: the test needs more");
        let mut got = 0;
        while got < sent {
            match b.recv().unwrap() {
                Some(message) => {
                    assert_eq!((message.bytes, message.fds.len()), (vec![got; MAX_MESSAGE], 1));
                    got += 1;
                }
                None => assert!(a.flush().is_ok()),
            }
        }
        assert!(a.flush().unwrap());
    }

    #[test]
    fn received_descriptors_are_closed_on_exec() {
        let (mut a, mut b) = pair();
        a.send(b"", &[file("x").as_fd()]).unwrap();
        let message = b.recv().unwrap().unwrap();
        let flags = rustix::io::fcntl_getfd(&message.fds[0]).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    }

    #[test]
    fn too_much_is_refused_on_both_sides() {
        let (mut a, _b) = pair();
        assert!(a.send(&vec![0; MAX_MESSAGE + 1], &[]).is_err());
        let one = file("one");
        assert!(a.send(b"", &[one.as_fd(); MAX_FDS + 1]).is_err());
        let oversized =
            [(MAX_MESSAGE as u32 + 1, 0u32), (u32::MAX, 0), (0, MAX_FDS as u32 + 1), (0, 1)];
        for (len, fds) in oversized {
            let (mut raw, stream) = UnixStream::pair().unwrap();
            let mut socket = FdSocket::new(stream).unwrap();
            raw.write_all(&[len.to_le_bytes(), fds.to_le_bytes()].concat()).unwrap();
            assert_eq!(
                socket.recv().unwrap_err().kind(),
                io::ErrorKind::InvalidData,
                "{len} {fds}"
            );
        }
    }

    #[test]
    fn descriptors_without_messages_are_bounded() {
        let (raw, stream) = UnixStream::pair().unwrap();
        let mut socket = FdSocket::new(stream).unwrap();
        let one = file("one");
        let fds = [one.as_fd(); MAX_FDS];
        // A message of which only the header's first bytes come, each with descriptors.
        for _ in 0..7 {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            control.push(SendAncillaryMessage::ScmRights(&fds));
            rustix::net::sendmsg(&raw, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL)
                .unwrap();
        }
        assert_eq!(socket.recv().unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn a_peer_that_does_not_read_costs_a_bounded_amount() {
        let (mut a, mut b) = pair();
        let one = file("one");
        let mut sent = 0;
        let refused = loop {
            match a.send(&vec![7; MAX_MESSAGE], &[one.as_fd()]) {
                Ok(()) => sent += 1,
                Err(error) => break error,
            }
            assert!(sent < 1000, "nothing bounds it");
        };
        assert!(is_want(&refused), "{refused}");
        for _ in 0..sent {
            while b.recv().unwrap().is_none() {
                a.flush().unwrap();
            }
        }
        a.send(b"and on", &[one.as_fd()]).unwrap();
        let message = b.recv().unwrap().unwrap();
        assert_eq!((message.bytes.as_slice(), message.fds.len()), (&b"and on"[..], 1));
    }

    #[test]
    fn a_reader_may_leave_off() {
        let (mut a, mut b) = pair();
        let sent = 50;
        for _ in 0..sent {
            a.send(&[1; 1000], &[]).unwrap();
        }
        let mut reads = 2;
        let mut got = 0;
        while b.recv_within(&mut reads).unwrap().is_some() {
            got += 1;
        }
        assert!((1..10).contains(&got), "{got}");
        while b.recv().unwrap().is_some() {
            got += 1;
        }
        assert_eq!(got, sent);
    }

    #[test]
    fn more_descriptors_than_can_be_taken_leave_the_message() {
        let (raw, stream) = UnixStream::pair().unwrap();
        let mut socket = FdSocket::new(stream).unwrap();
        let one = file("one");
        let send = |fds: &[BorrowedFd<'_>]| {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2 * MAX_FDS))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            control.push(SendAncillaryMessage::ScmRights(fds));
            let framed = [&1u32.to_le_bytes()[..], &1u32.to_le_bytes(), b"x"].concat();
            let flags = SendFlags::NOSIGNAL;
            rustix::net::sendmsg(&raw, &[IoSlice::new(&framed)], &mut control, flags).unwrap();
        };
        // The kernel cuts the descriptors that do not fit. To the reader it looks as if it had too
        // many open.
        send(&[one.as_fd(); 2 * MAX_FDS]);
        send(&[one.as_fd()]);
        let next = |socket: &mut FdSocket| socket.recv().unwrap().unwrap().fds.len();
        assert_eq!((next(&mut socket), next(&mut socket)), (0, 1));
    }

    #[test]
    fn a_message_may_come_byte_by_byte() {
        let (mut raw, stream) = UnixStream::pair().unwrap();
        let mut socket = FdSocket::new(stream).unwrap();
        for byte in [3, 0, 0, 0, 0, 0, 0, 0, b'a', b'b'] {
            raw.write_all(&[byte]).unwrap();
            assert!(socket.recv().unwrap().is_none());
        }
        raw.write_all(b"c").unwrap();
        assert_eq!(socket.recv().unwrap().unwrap().bytes, b"abc");
    }

    #[test]
    fn a_listener_knows_the_process_that_came() {
        let name = format!("uccl-test-{}-{:?}", std::process::id(), std::thread::current().id());
        let listener = FdListener::bind(name.as_bytes()).unwrap();
        assert!(listener.accept().unwrap().is_none());
        assert_eq!(FdListener::bind(name.as_bytes()).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        let mut client = FdSocket::connect(name.as_bytes()).unwrap();
        let mut server = listener.accept().unwrap().unwrap();
        let me =
            Peer { pid: Some(std::process::id() as i32), uid: rustix::process::getuid().as_raw() };
        assert_eq!((client.peer().unwrap(), server.peer().unwrap()), (me, me));
        client.send(b"hello", &[]).unwrap();
        assert_eq!(server.recv().unwrap().unwrap().bytes, b"hello");
        drop(listener);
        let error = FdSocket::connect(name.as_bytes()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }
}
