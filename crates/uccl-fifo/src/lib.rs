//! Two named pipes between processes of one host, as a pipe of bytes.
//!
//! This is the smallest link there is, kept as an example: `docs/new-link.md` walks through it. The
//! accepting end [offers](offer) a pair of FIFOs under a name that both ends know. The connecting
//! end [joins](join) them and removes the names. [`uccl_stream`](https://docs.rs/uccl-stream) makes
//! a lane of the returned halves.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::Arc,
};

use parking_lot::Mutex;
use rustix::{
    event::epoll,
    fs::{CWD, Mode, OFlags},
    io::Errno,
    net::RecvFlags,
    pipe,
};
use uccl_fabric::{
    mem::Span,
    pipe::{Backlog, Pipe, PipeRx, PipeTx, uninterrupted},
};

/// Capacity of each FIFO in bytes, if the kernel allows the user this much.
const CAPACITY: usize = 1 << 20;
/// The joining end's first byte. Before it arrives, an empty FIFO does not mean that the peer has
/// closed.
const HELLO: u8 = 0x55;

/// Both directions of an end.
pub struct FifoPipe(Arc<Ends>);
/// The sending half.
pub struct FifoTx {
    ends: Arc<Ends>,
    /// Whether room for bytes wakes a sleeping thread.
    is_armed: bool,
}
/// The receiving half.
pub struct FifoRx {
    ends: Arc<Ends>,
    /// The peer has both FIFOs open: from now on an empty FIFO without a writer has ended.
    is_joined: bool,
}

/// The FIFOs of an end; `None` after a cut.
struct Ends {
    /// Open for reading as well: a cut can take unread bytes back, and a write never lacks a
    /// reader.
    outgoing: Mutex<Option<OwnedFd>>,
    incoming: Mutex<Option<OwnedFd>>,
    /// The socket over which the two ends agreed on the FIFOs. Its end shows that the peer has left
    /// before it joined, or has taken its first byte back.
    agreed: Mutex<Option<OwnedFd>>,
    /// Readable when bytes have come, or room that the sender waits for.
    epoll: OwnedFd,
    /// Paths of both FIFOs. The joining end removes them, or the drop of an end.
    names: [PathBuf; 2],
}

/// Makes and opens two FIFOs in `folder`, with names that begin with `name`: the end that is
/// joined. `agreed` is the socket over which both ends agreed on the name; each keeps its end of
/// it as long as its pipe.
///
/// # Errors
/// The names are taken, or the folder cannot be written.
pub fn offer(folder: &Path, name: &str, agreed: OwnedFd) -> io::Result<(FifoPipe, FifoTx, FifoRx)> {
    let names = names(folder, name);
    for path in &names {
        rustix::fs::mkfifoat(CWD, path, Mode::RUSR | Mode::WUSR)?;
    }
    Ok(Ends::open(names, agreed)?.halves(false))
}

/// Opens the FIFOs that the peer has made, and removes their names. `agreed` is as for [`offer`].
///
/// # Errors
/// The FIFOs do not exist or belong to another user.
pub fn join(folder: &Path, name: &str, agreed: OwnedFd) -> io::Result<(FifoPipe, FifoTx, FifoRx)> {
    let [to_us, to_peer] = names(folder, name);
    let ends = Ends::open([to_peer, to_us], agreed)?;
    ends.remove_names();
    if let Some(outgoing) = &*ends.outgoing.lock() {
        rustix::io::write(outgoing, &[HELLO])?;
    }
    Ok(ends.halves(true))
}

/// Paths of the FIFO from the offering end to the joining end, and of the FIFO back.
fn names(folder: &Path, name: &str) -> [PathBuf; 2] {
    ["out", "in"].map(|direction| folder.join(format!("{name}-{direction}")))
}

impl Ends {
    fn open(names: [PathBuf; 2], agreed: OwnedFd) -> io::Result<Self> {
        let flags = OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let open = |path: &Path, mode| rustix::fs::open(path, flags | mode, Mode::empty());
        let (outgoing, incoming) =
            (open(&names[0], OFlags::RDWR)?, open(&names[1], OFlags::RDONLY)?);
        // The kernel refuses users with many pipes. The FIFO then keeps its size.
        let _ = pipe::fcntl_setpipe_size(&outgoing, CAPACITY);
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let data = epoll::EventData::new_u64(0);
        epoll::add(&epoll, &incoming, data, epoll::EventFlags::IN)?;
        epoll::add(&epoll, &outgoing, data, epoll::EventFlags::empty())?;
        epoll::add(&epoll, &agreed, data, epoll::EventFlags::RDHUP)?;
        let [outgoing, incoming, agreed] =
            [outgoing, incoming, agreed].map(|end| Mutex::new(Some(end)));
        Ok(Self { outgoing, incoming, agreed, epoll, names })
    }

    fn halves(self, is_joined: bool) -> (FifoPipe, FifoTx, FifoRx) {
        let ends = Arc::new(self);
        (
            FifoPipe(Arc::clone(&ends)),
            FifoTx { ends: Arc::clone(&ends), is_armed: false },
            FifoRx { ends, is_joined },
        )
    }

    /// Whether the peer has closed its end of the socket.
    fn has_left(&self) -> bool {
        let agreed = self.agreed.lock();
        let peek = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        let peeked = agreed.as_ref().map(|socket| rustix::net::recv(socket, &mut [0], peek));
        !matches!(peeked, Some(Ok((1.., _)) | Err(Errno::AGAIN | Errno::INTR)))
    }

    fn remove_names(&self) {
        self.names.iter().for_each(|path| _ = std::fs::remove_file(path));
    }

    /// Sets whether room for bytes wakes a sleeping thread.
    fn watch_room(&self, outgoing: &OwnedFd, is_watched: bool) -> io::Result<()> {
        let flags = if is_watched { epoll::EventFlags::OUT } else { epoll::EventFlags::empty() };
        Ok(epoll::modify(&self.epoll, outgoing, epoll::EventData::new_u64(0), flags)?)
    }
}

impl Drop for Ends {
    fn drop(&mut self) {
        self.remove_names();
    }
}

impl PipeTx for FifoTx {
    unsafe fn send(&mut self, spans: &[Span]) -> io::Result<usize> {
        let outgoing = self.ends.outgoing.lock();
        let outgoing = outgoing.as_ref().ok_or(io::ErrorKind::BrokenPipe)?;
        if self.is_armed {
            self.ends.watch_room(outgoing, false)?;
            self.is_armed = false;
        }
        vectored(spans, |iov, count| {
            // SAFETY: the caller keeps the spans readable during the call, and the list has `count`
            // entries.
            unsafe { libc::writev(outgoing.as_raw_fd(), iov, count) }
        })
        .map(|sent| sent.unwrap_or(0))
    }

    fn arm(&mut self) -> io::Result<bool> {
        let outgoing = self.ends.outgoing.lock();
        self.ends.watch_room(outgoing.as_ref().ok_or(io::ErrorKind::BrokenPipe)?, true)?;
        self.is_armed = true;
        Ok(true)
    }
}

impl PipeRx for FifoRx {
    unsafe fn recv(&mut self, spans: &[Span]) -> io::Result<Option<usize>> {
        let incoming = self.ends.incoming.lock();
        let incoming = incoming.as_ref().ok_or(io::ErrorKind::BrokenPipe)?;
        if !self.is_joined {
            let mut hello = [0];
            match rustix::io::read(incoming, &mut hello) {
                Ok(0) | Err(Errno::AGAIN) if self.ends.has_left() => return Ok(Some(0)),
                Ok(0) | Err(Errno::AGAIN) => return Ok(None),
                Ok(_) => self.is_joined = true,
                Err(e) => return Err(e.into()),
            }
        }
        vectored(spans, |iov, count| {
            // SAFETY: the caller keeps the spans writable during the call, and the list has `count`
            // entries.
            unsafe { libc::readv(incoming.as_raw_fd(), iov, count) }
        })
    }

    fn backlog(&mut self) -> Backlog {
        let unread = self.ends.incoming.lock().as_ref().map(rustix::io::ioctl_fionread);
        let bytes = unread.and_then(Result::ok).unwrap_or(0) as usize;
        Backlog { bytes, has_ended: self.ends.has_left() }
    }
}

impl Pipe for FifoPipe {
    type Tx = FifoTx;
    type Rx = FifoRx;

    const LINK: &'static str = "fifo";

    fn fd(&self) -> BorrowedFd<'_> {
        self.0.epoll.as_fd()
    }

    fn room_is_writable(&self) -> bool {
        false
    }

    fn cut(&self) {
        // Takes back the bytes that the peer has not read: they never arrive.
        if let Some(outgoing) = self.0.outgoing.lock().take() {
            let mut rest = vec![0; 64 << 10];
            while rustix::io::read(&outgoing, &mut rest).is_ok_and(|taken| taken > 0) {}
        }
        drop(self.0.incoming.lock().take());
        drop(self.0.agreed.lock().take());
    }
}

/// Makes a vectored call over as many spans as one call takes. `None`: the call would block.
fn vectored(
    spans: &[Span],
    call: impl Fn(*const libc::iovec, libc::c_int) -> isize,
) -> io::Result<Option<usize>> {
    let iovec = |span: &Span| libc::iovec { iov_base: span.addr as *mut _, iov_len: span.len };
    let iov: Vec<_> = spans.iter().take(libc::UIO_MAXIOV as usize).map(iovec).collect();
    uninterrupted(|| call(iov.as_ptr(), iov.len() as libc::c_int))
}
