//! The socket between two processes of a host: wakes the other side, hands it descriptors of shared
//! memory, and ends when the other side dies.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd, RawFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
};

use parking_lot::Mutex;

use crate::{alloc::SharedBuf, fdpass::FdSocket, shm::Direct};

const RING: u8 = 0;
const OFFER: u8 = 1;
const RETRACT: u8 = 2;
/// Largest shared memory that is mapped for a peer.
const MAX_MAPPING: usize = 1 << 46;

/// One end of the socket.
pub(super) struct Bell {
    socket: Mutex<FdSocket>,
    fd: RawFd,
    direct: Arc<Direct>,
    /// Not to be used any more.
    ended: AtomicBool,
    /// The peer has closed its end, or died.
    gone: AtomicBool,
}

impl Bell {
    pub(super) fn new(socket: FdSocket, direct: Arc<Direct>) -> Self {
        let fd = socket.as_raw_fd();
        Self {
            socket: Mutex::new(socket),
            fd,
            direct,
            ended: AtomicBool::new(false),
            gone: AtomicBool::new(false),
        }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the socket lives as long as we do, and is never replaced.
        unsafe { BorrowedFd::borrow_raw(self.fd) }
    }

    /// Whether it is of no more use: the peer is gone, or we have hung up.
    pub(super) fn ended(&self) -> bool {
        self.ended.load(SeqCst)
    }

    /// Whether the peer has closed its end, as far as has been heard: it makes no more accesses then.
    pub(super) fn gone(&self) -> bool {
        self.gone.load(SeqCst)
    }

    /// Wakes the peer.
    pub(super) fn ring(&self) {
        self.say(&[RING], &[]);
    }

    /// Hands shared memory to the peer, which maps it at its first use.
    pub(super) fn offer(&self, memory: &SharedBuf) {
        self.say(&with_id(OFFER, memory.id()), &[memory.fd()]);
    }

    /// Has the peer forget shared memory.
    pub(super) fn retract(&self, id: u32) {
        self.say(&with_id(RETRACT, id), &[]);
    }

    fn say(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        if self.socket.lock().send(bytes, fds).is_err() {
            self.ended.store(true, SeqCst);
        }
    }

    /// Takes in what the peer said. An error or the end of the socket shows as [`Self::ended`].
    pub(super) fn listen(&self) {
        let mut socket = self.socket.lock();
        loop {
            match socket.recv() {
                Ok(None) => break,
                Ok(Some(message)) => {
                    if let Err(e) = self.heard(message.bytes.as_slice(), message.fds) {
                        tracing::warn!("cannot use the peer's shared memory: {e}");
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
        if socket.flush().is_err() {
            self.ended.store(true, SeqCst);
        }
    }

    fn heard(&self, bytes: &[u8], fds: Vec<std::os::fd::OwnedFd>) -> io::Result<()> {
        match *bytes {
            [OFFER, a, b, c, d] => {
                let id = u32::from_le_bytes([a, b, c, d]);
                let fd = fds.into_iter().next().ok_or(io::ErrorKind::InvalidData)?;
                self.direct.insert_mapping(id, fd, MAX_MAPPING)
            }
            [RETRACT, a, b, c, d] => {
                self.direct.remove_mapping(u32::from_le_bytes([a, b, c, d]));
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Ends the conversation on our side. The peer's end is still watched: only when that has come is it
    /// certain that the peer is at nothing.
    pub(super) fn hang_up(&self) {
        self.ended.store(true, SeqCst);
        // Gone already is as good.
        let _ = rustix::net::shutdown(self.fd(), rustix::net::Shutdown::Write);
    }
}

fn with_id(what: u8, id: u32) -> [u8; 5] {
    let [a, b, c, d] = id.to_le_bytes();
    [what, a, b, c, d]
}
