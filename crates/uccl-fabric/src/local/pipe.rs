//! A byte pipe over two rings in shared memory. The peer is woken only when it sleeps.

use std::{io, os::fd::BorrowedFd, sync::Arc};

use super::bell::Bell;
use crate::{
    mem::Span,
    pipe::{Pipe, PipeRx, PipeTx},
    shm::{RingRx, RingTx},
};

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
}

impl ShmPipe {
    pub(super) fn new(tx: RingTx, rx: RingRx, bell: &Arc<Bell>) -> (Self, ShmTx, ShmRx) {
        (
            Self(Arc::clone(bell)),
            ShmTx { ring: tx, bell: Arc::clone(bell) },
            ShmRx { ring: rx, bell: Arc::clone(bell) },
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
            _ => {}
        }
        Ok(got)
    }

    fn arm(&mut self) -> io::Result<bool> {
        // What is not taken in now would wake the sleeper at once.
        self.bell.listen();
        Ok(!self.bell.ended() && self.ring.prepare_sleep())
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
