//! Byte pipes: what the stream protocol runs over (a TCP socket, a shared-memory ring).

use std::io;

use crate::mem::Span;

/// The sending half of a byte pipe. Never blocks.
pub trait PipeTx: Send {
    /// Sends bytes gathered from `spans`, in order, and says how many; 0 when the pipe is full.
    ///
    /// # Safety
    /// Every span must be readable memory for the duration of the call.
    unsafe fn send(&mut self, spans: &[Span]) -> io::Result<usize>;
}

/// The receiving half of a byte pipe. Never blocks.
pub trait PipeRx: Send {
    /// Receives bytes scattered into `spans`, in order. `None` when nothing is there yet, `Some(0)`
    /// when the peer has closed.
    ///
    /// # Safety
    /// Every span must be writable memory for the duration of the call.
    unsafe fn recv(&mut self, spans: &[Span]) -> io::Result<Option<usize>>;
}
