//! Byte pipes: what the stream protocol runs over (a TCP socket, a shared-memory ring).

use std::{io, os::fd::BorrowedFd};

use crate::mem::Span;

/// The sending half of a byte pipe. Never blocks.
pub trait PipeTx: Send {
    /// Sends bytes gathered from `spans`, in order, and says how many; 0 when the pipe is full.
    ///
    /// # Safety
    /// Every span must be readable memory for the duration of the call.
    unsafe fn send(&mut self, spans: &[Span]) -> io::Result<usize>;

    /// Prepares for sleep with bytes unsent: room shows on the pipe's descriptor from now on. False:
    /// there is room already.
    fn arm(&mut self) -> io::Result<bool> {
        Ok(true)
    }
}

/// The receiving half of a byte pipe. Never blocks.
pub trait PipeRx: Send {
    /// Receives bytes scattered into `spans`, in order. `None` when nothing is there yet, `Some(0)`
    /// when the peer has closed.
    ///
    /// # Safety
    /// Every span must be writable memory for the duration of the call.
    unsafe fn recv(&mut self, spans: &[Span]) -> io::Result<Option<usize>>;

    /// Whether the peer is known to have cut the pipe, where bytes of before may still be handed out: of these nothing
    /// may reach memory that the peer writes. Looked for now and then, not at every call.
    fn is_cut(&mut self) -> bool {
        false
    }

    /// Prepares for sleep: bytes show on the pipe's descriptor from now on. False: there are some
    /// already.
    fn arm(&mut self) -> io::Result<bool> {
        Ok(true)
    }
}

/// Both halves of a byte pipe, and how to sleep on it.
pub trait Pipe: Send + Sync + 'static {
    /// Its sending half.
    type Tx: PipeTx;
    /// Its receiving half.
    type Rx: PipeRx;

    /// Short name of the link, for people.
    const LINK: &'static str;

    /// The descriptor to watch while asleep.
    fn fd(&self) -> BorrowedFd<'_>;

    /// Whether room to send shows as writability of the descriptor (else as readability).
    fn room_is_writable(&self) -> bool;

    /// Cuts the pipe in both directions: the peer sees its end, our halves fail, and what has not left yet never does.
    fn cut(&self);
}
