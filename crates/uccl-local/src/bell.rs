//! The socket between two processes of a host. It wakes the other side, hands it descriptors of
//! shared memory, and ends when the other side dies. The other side's process is watched as well.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd, RawFd},
    sync::{
        Arc,
        atomic::{
            AtomicBool,
            Ordering::{Relaxed, SeqCst},
        },
    },
};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec};
use smallvec::{SmallVec, smallvec};
use uccl_device::Process;
use uccl_fabric::alloc::Shareable;
use uccl_wire::gpu_offer::{GpuOffer, Means};

use crate::{
    cuda_ipc::{OfferedMemory, Owner},
    fdpass::{FdSocket, is_want},
    offers::{Line, RETRACT, with_id},
    shm::Direct,
};

const OFFER: u8 = 1;
const OFFER_GPU: u8 = 3;
/// Largest shared memory that is mapped for a peer.
const MAX_MAPPING: usize = 1 << 46;
/// The most reads of the socket in one call: the thread that listens has other work as well.
const READS: usize = 16;

/// One end of the socket.
pub(super) struct Bell {
    line: Mutex<Line>,
    fd: RawFd,
    /// The peer, if it is another process: its children keep the socket open beyond its death.
    peer: Option<Process>,
    direct: Arc<Direct>,
    /// The process that offers us GPU memory.
    owner: Owner,
    /// The socket must not be used any more.
    ended: AtomicBool,
    /// Our end has been shut, which the peer sees.
    hung_up: AtomicBool,
    /// The peer has closed its end, or died.
    gone: AtomicBool,
    /// A warning has been logged that an offer of the peer's cannot be used.
    warned: AtomicBool,
}

impl Bell {
    pub(super) fn new(socket: FdSocket, direct: Arc<Direct>, owner: Owner) -> Self {
        let fd = socket.as_raw_fd();
        let pid =
            socket.peer().ok().and_then(|peer| peer.pid).filter(|_| owner != Owner::Ourselves);
        Self {
            // If the number means another process by now, then the peer is dead, and the socket
            // shows that.
            peer: pid.and_then(|pid| Process::open(pid).ok()),
            line: Mutex::new(Line::new(socket)),
            fd,
            direct,
            owner,
            ended: AtomicBool::new(false),
            hung_up: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            warned: AtomicBool::new(false),
        }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the socket lives as long as we do, and is never replaced.
        unsafe { BorrowedFd::borrow_raw(self.fd) }
    }

    /// The descriptor that becomes readable when the peer dies, even if the socket stays open.
    pub(super) fn peers_end(&self) -> Option<BorrowedFd<'_>> {
        self.peer.as_ref().and_then(Process::handle)
    }

    /// Whether the socket cannot be used any more: the peer is gone, or we have hung up.
    pub(super) fn ended(&self) -> bool {
        self.ended.load(SeqCst)
    }

    /// Whether the peer is known to have closed its end. It makes no more accesses then.
    pub(super) fn gone(&self) -> bool {
        self.gone.load(SeqCst)
    }

    /// Wakes the peer.
    pub(super) fn ring(&self) {
        let rung = self.line.lock().ring();
        self.note(rung);
    }

    /// Offers memory to the peer, which opens it at its first use. If descriptors for that are
    /// missing, the offer is dropped, and the peer does without it.
    pub(super) fn offer(&self, memory: &Shareable) {
        match memory {
            Shareable::Gpu(memory) => {
                let mut bytes = vec![OFFER_GPU];
                bytes.extend(memory.offer().encode());
                self.say(|line| line.offer(memory.id(), &bytes, &memory.fds()));
            }
            Shareable::Host(memory) => {
                let id = memory.id();
                self.say(|line| line.offer(id, &with_id(OFFER, id), &[memory.fd()]));
            }
        }
    }

    /// Makes the peer forget shared memory, as soon as it reads.
    pub(super) fn retract(&self, id: u32) {
        self.say(|line| line.retract(id));
    }

    /// Sends a message that the peer can do without.
    fn say(&self, say: impl FnOnce(&mut Line) -> io::Result<()>) {
        let said = say(&mut self.line.lock());
        match said {
            Err(e) if is_want(&e) => tracing::debug!("not said to a peer of this host: {e}"),
            said => self.note(said),
        }
    }

    /// An error of the socket ends its use.
    fn note(&self, result: io::Result<()>) {
        if result.is_err() {
            self.ended.store(true, SeqCst);
        }
    }

    /// Handles the messages that have come from the peer. [`Self::ended`] shows an error or the end
    /// of the socket.
    pub(super) fn listen(&self) {
        let mut line = self.line.lock();
        let mut reads = READS;
        loop {
            match line.socket.recv_within(&mut reads) {
                Ok(None) => break,
                Ok(Some(message)) => {
                    if let Err(e) = self.handle_message(message.bytes.as_slice(), message.fds) {
                        self.warn_once(&e);
                    }
                }
                Err(e) => {
                    let gone = [io::ErrorKind::UnexpectedEof, io::ErrorKind::ConnectionReset];
                    if gone.contains(&e.kind()) {
                        self.gone.store(true, SeqCst);
                    }
                    self.ended.store(true, SeqCst);
                    return;
                }
            }
        }
        self.note(line.flush());
    }

    /// Logs that the peer's memory must be reached in another, slower way. Warns only once, because
    /// the peer decides how often this happens.
    fn warn_once(&self, e: &io::Error) {
        if self.warned.swap(true, Relaxed) {
            tracing::debug!("cannot use the peer's shared memory: {e}");
        } else {
            tracing::warn!("cannot use the peer's shared memory: {e}");
        }
    }

    /// Checks whether the peer is gone. Reads no messages: they must stay there to wake a thread
    /// that sleeps.
    pub(super) fn look(&self) {
        let mut fds: SmallVec<[PollFd<'_>; 2]> =
            smallvec![PollFd::from_borrowed_fd(self.fd(), PollFlags::RDHUP)];
        fds.extend(self.peers_end().map(|end| PollFd::from_borrowed_fd(end, PollFlags::IN)));
        let looked = rustix::event::poll(&mut fds, Some(&Timespec::default()));
        if looked.is_ok_and(|found| found > 0) {
            self.gone.store(true, SeqCst);
            self.ended.store(true, SeqCst);
        }
    }

    fn handle_message(&self, bytes: &[u8], fds: Vec<std::os::fd::OwnedFd>) -> io::Result<()> {
        match *bytes {
            [OFFER, a, b, c, d] => {
                let id = u32::from_le_bytes([a, b, c, d]);
                let fd = fds.into_iter().next().ok_or(io::ErrorKind::InvalidData)?;
                self.direct.insert_mapping(id, fd, MAX_MAPPING)
            }
            [OFFER_GPU, ref offer @ ..] => {
                let wrong = |e: &dyn std::fmt::Display| {
                    io::Error::new(io::ErrorKind::InvalidData, e.to_string())
                };
                let offer = GpuOffer::decode(offer).map_err(|e| wrong(&e))?;
                let needed = match &offer.means {
                    Means::Descriptors(lens) => lens.len(),
                    Means::Handle(_) => 0,
                };
                if fds.len() != needed {
                    return Err(wrong(&format!("{} descriptors, not {needed}", fds.len())));
                }
                let id = offer.id;
                self.direct.insert_gpu(id, OfferedMemory::new(offer, fds, self.owner)?)
            }
            [RETRACT, a, b, c, d] => {
                self.direct.remove_mapping(u32::from_le_bytes([a, b, c, d]));
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Shuts our end. The peer's end is still watched: only its close proves that the peer accesses
    /// nothing any more. The peer must not see our end close either while a copy to or from its
    /// memory is under way: then this only marks the socket as ended, and must be called again.
    pub(super) fn hang_up(&self) {
        self.ended.store(true, SeqCst);
        if self.direct.is_idle() && !self.hung_up.swap(true, SeqCst) {
            // If this fails, the peer is gone already.
            let _ = rustix::net::shutdown(self.fd(), rustix::net::Shutdown::Write);
        }
    }
}
