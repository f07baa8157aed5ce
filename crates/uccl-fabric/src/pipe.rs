//! Byte pipes, which carry the stream protocol: a TCP socket, a shared-memory ring.

use std::{io, os::fd::BorrowedFd};

use crate::mem::Span;

/// The sending half of a byte pipe. Never blocks.
pub trait PipeTx: Send {
    /// Sends bytes gathered from `spans`, in order. Returns how many; 0 when the pipe is full.
    ///
    /// # Safety
    /// Every span must be readable memory for the duration of the call.
    unsafe fn send(&mut self, spans: &[Span]) -> io::Result<usize>;

    /// Whether it holds bytes that it has accepted and not sent yet. A later send, even an empty
    /// one, continues with them.
    fn is_holding(&self) -> bool {
        false
    }

    /// Prepares for sleep with bytes unsent: from now on the pipe's descriptor shows when there is
    /// room. Returns false if there is room already.
    fn arm(&mut self) -> io::Result<bool> {
        Ok(true)
    }
}

/// The bytes that have come over a pipe and were not received.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Backlog {
    /// Their number, as far as the pipe knows it.
    pub bytes: usize,
    /// Whether the peer has ended the pipe behind them.
    pub has_ended: bool,
}

/// The receiving half of a byte pipe. Never blocks.
pub trait PipeRx: Send {
    /// Receives bytes scattered into `spans`, in order. `None` when nothing is there yet, `Some(0)`
    /// when the peer has closed.
    ///
    /// # Safety
    /// Every span must be writable memory for the duration of the call.
    unsafe fn recv(&mut self, spans: &[Span]) -> io::Result<Option<usize>>;

    /// Whether the peer is known to have cut the pipe. Bytes from before the cut may still be
    /// received, but none of them may be put into memory that the peer writes: the peer has given
    /// those operations up. Checked now and then, not at every call.
    fn is_cut(&mut self) -> bool {
        false
    }

    /// Looks at the bytes that have come, for a caller that receives nothing for a while. It may
    /// cost system calls.
    fn backlog(&mut self) -> Backlog;

    /// Prepares for sleep: from now on the pipe's descriptor shows when there are bytes. Returns
    /// false if there are some already.
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

    /// Cuts the pipe in both directions: the peer sees its end, our halves fail, and bytes that
    /// have not left yet never do.
    ///
    fn cut(&self);
}

/// Makes a system call that moves bytes, and repeats it when a signal interrupts it. Returns how
/// many bytes moved, or `None` when the call would block.
///
/// # Errors
/// Any other error of the call, which returns a negative number and sets `errno`.
#[inline]
pub fn uninterrupted(call: impl Fn() -> isize) -> io::Result<Option<usize>> {
    loop {
        match usize::try_from(call()) {
            Ok(moved) => return Ok(Some(moved)),
            Err(_) => match io::Error::last_os_error() {
                e if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                e if e.kind() == io::ErrorKind::Interrupted => {}
                e => return Err(e),
            },
        }
    }
}
