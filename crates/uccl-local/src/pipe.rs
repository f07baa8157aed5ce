//! A byte pipe over two rings in shared memory. The peer is woken only when it sleeps.

use std::{io, os::fd::BorrowedFd, sync::Arc};

use uccl_fabric::{
    clock::coarse_ms,
    mem::Span,
    pipe::{Backlog, Pipe, PipeRx, PipeTx},
};

use super::bell::Bell;
use crate::shm::{RingRx, RingTx};

/// After this many empty receives the clock is read.
const LOOK_AFTER: u32 = 16;

/// Two rings and a bell.
pub struct ShmPipe(Arc<Bell>);

/// The sending half of a [`ShmPipe`].
pub struct ShmTx {
    ring: RingTx,
    bell: Arc<Bell>,
}

/// The receiving half of a [`ShmPipe`].
pub struct ShmRx {
    ring: RingRx,
    bell: Arc<Bell>,
    /// Empty receives since the clock was read.
    empty: u32,
    /// When the peer was last checked, by the coarse clock.
    looked_ms: u64,
}

impl ShmPipe {
    pub(super) fn new(tx: RingTx, rx: RingRx, bell: &Arc<Bell>) -> (Self, ShmTx, ShmRx) {
        (
            Self(Arc::clone(bell)),
            ShmTx { ring: tx, bell: Arc::clone(bell) },
            ShmRx { ring: rx, bell: Arc::clone(bell), empty: 0, looked_ms: 0 },
        )
    }
}

impl PipeTx for ShmTx {
    #[inline]
    unsafe fn send(&mut self, spans: &[Span]) -> io::Result<usize> {
        // SAFETY: the caller's promise.
        let sent = unsafe { self.ring.send(spans)? };
        if sent > 0 && self.ring.reader_needs_wake() {
            self.bell.ring();
        }
        Ok(sent)
    }

    fn arm(&mut self) -> io::Result<bool> {
        Ok(self.ring.prepare_wait_space())
    }
}

impl PipeRx for ShmRx {
    #[inline]
    unsafe fn recv(&mut self, spans: &[Span]) -> io::Result<Option<usize>> {
        // SAFETY: the caller's promise.
        let got = unsafe { self.ring.recv(spans)? };
        match got {
            Some(n) if n > 0 && self.ring.writer_needs_wake() => self.bell.ring(),
            None if self.bell.ended() => return Ok(Some(0)),
            None => {
                self.empty += 1;
                if self.empty == LOOK_AFTER {
                    self.look_after_peer();
                }
            }
            _ => {}
        }
        Ok(got)
    }

    /// Bytes in the ring after the peer has hung up are of operations that the peer has given up:
    /// hanging up is its last step.
    fn is_cut(&mut self) -> bool {
        if self.ring.has_bytes() {
            self.look_after_peer();
        }
        self.bell.ended()
    }

    fn backlog(&mut self) -> Backlog {
        self.bell.look();
        let Backlog { bytes, has_ended } = self.ring.backlog();
        Backlog { bytes, has_ended: has_ended || self.bell.ended() }
    }

    fn arm(&mut self) -> io::Result<bool> {
        // Messages that are left in the socket would wake the sleeper at once.
        self.bell.listen();
        Ok(!self.bell.ended() && self.ring.prepare_sleep())
    }
}

impl ShmRx {
    /// A thread that never sleeps does not notice the socket's end, so it checks here, once in a
    /// tick of the coarse clock. Bytes that were sent before the end are in the ring, and received
    /// first.
    fn look_after_peer(&mut self) {
        self.empty = 0;
        let now = coarse_ms();
        if now != self.looked_ms {
            self.looked_ms = now;
            self.bell.look();
        }
    }
}

impl Pipe for ShmPipe {
    type Tx = ShmTx;
    type Rx = ShmRx;

    const LINK: &'static str = "shm";

    fn fd(&self) -> BorrowedFd<'_> {
        self.0.fd()
    }

    fn room_is_writable(&self) -> bool {
        false
    }

    fn cut(&self) {
        self.0.hang_up();
    }
}
