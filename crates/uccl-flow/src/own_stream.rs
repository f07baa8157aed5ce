//! A flow's own stream at the sender: its socket, and the bytes that go again over the next one.

use std::net::TcpStream;

use uccl_wire::flow::{FlowHead, HEAD_LEN, HeadKind};

use crate::{
    core::History,
    socket::{self, Span},
};

/// The most bytes that the receiver is not known to have.
const WINDOW: usize = 512 << 10;

/// The own stream of a sending flow.
pub(crate) struct OwnStream {
    socket: Option<TcpStream>,
    history: History,
    notes: [u8; 4 * HEAD_LEN],
    /// Bytes of notes.
    filled: usize,
    last_error: String,
    /// The flow is closed: the place of the note that says so, behind its messages.
    end: Option<u64>,
}

impl OwnStream {
    pub(crate) fn new(socket: TcpStream, small_max: usize) -> Self {
        Self {
            socket: Some(socket),
            // A message that `close` cuts, its head, and notes.
            history: History::new(WINDOW, small_max + 4 * HEAD_LEN),
            notes: [0; 4 * HEAD_LEN],
            filled: 0,
            last_error: String::new(),
            end: None,
        }
    }

    pub(crate) fn is_up(&self) -> bool {
        self.socket.is_some()
    }

    pub(crate) fn history(&self) -> &History {
        &self.history
    }

    /// Why the last stream ended; empty if none has.
    pub(crate) fn last_error(&self) -> &str {
        &self.last_error
    }

    /// Sends the rest of a message's head and of its payload. `None`: none of it now.
    ///
    /// # Safety
    /// The memory is readable.
    pub(crate) unsafe fn send(&mut self, head: Span, payload: Span) -> Option<usize> {
        if !self.push() {
            return None;
        }
        if head.len == HEAD_LEN && self.history.take_ask() {
            self.history.append(&FlowHead::note(HeadKind::Ping, 0, 0).encode());
            if !self.push() {
                return None;
            }
        }
        if self.history.is_asked() && self.history.room() < WINDOW / 4 {
            self.read();
        }
        let room = self.history.room();
        let head = head.first(room);
        let payload = payload.first(room - head.len);
        if head.len + payload.len == 0 {
            return None;
        }
        // SAFETY: the caller promises the memory.
        match unsafe { socket::send(self.socket.as_ref()?, &[head, payload]) } {
            Ok(None) => None,
            Ok(Some(count)) => {
                let of_head = count.min(head.len);
                for part in [head.first(of_head), payload.first(count - of_head)] {
                    // SAFETY: the caller promises the memory.
                    self.history.record(unsafe { part.bytes() });
                }
                Some(count)
            }
            Err(error) => {
                self.lose(&error.to_string());
                None
            }
        }
    }

    /// Sends a note. It is part of the stream, and goes again as messages do.
    pub(crate) fn tell(&mut self, note: &FlowHead) {
        self.history.append(&note.encode());
        self.push();
    }

    /// Sends the bytes that go again. False if some are left, or there is no stream.
    pub(crate) fn push(&mut self) -> bool {
        while let Some(socket) = &self.socket {
            let bytes = self.history.unsent();
            if bytes.is_empty() {
                return true;
            }
            // SAFETY: the bytes live through the call.
            match unsafe { socket::send(socket, &[Span::of(bytes)]) } {
                Ok(None) => return false,
                Ok(Some(count)) => self.history.on_sent(count),
                Err(error) => self.lose(&error.to_string()),
            }
        }
        false
    }

    /// Takes the receiver's confirmations, and sees whether the stream has ended.
    pub(crate) fn read(&mut self) {
        while let Some(socket) = &self.socket {
            let room = Span::of_mut(&mut self.notes).after(self.filled);
            // SAFETY: the rest of the stream's own buffer.
            match unsafe { socket::recv(socket, &[room]) } {
                Ok(None) => return,
                Ok(Some(0)) => return self.lose("the peer closed the stream"),
                Ok(Some(count)) => self.filled += count,
                Err(error) => return self.lose(&error.to_string()),
            }
            let (heads, _) = self.notes[..self.filled].as_chunks::<HEAD_LEN>();
            let is_right = heads.iter().all(|bytes| match FlowHead::decode(bytes) {
                Ok(FlowHead { kind: HeadKind::Ack, message, .. }) => self.history.confirm(message),
                _ => false,
            });
            let taken = heads.len() * HEAD_LEN;
            if !is_right {
                return self.lose("the peer confirms bytes that it cannot have");
            }
            self.notes.copy_within(taken..self.filled, 0);
            self.filled -= taken;
        }
    }

    /// The receiver says by another way that it has so many bytes. False if it cannot have.
    pub(crate) fn confirm(&mut self, received: u64) -> bool {
        self.history.confirm(received)
    }

    /// Closes the stream; the flow needs another one.
    pub(crate) fn lose(&mut self, cause: &str) {
        self.socket = None;
        self.filled = 0;
        cause.clone_into(&mut self.last_error);
    }

    /// The flow has ended otherwise: nothing is left to do.
    pub(crate) fn abandon(&mut self) {
        self.lose("the flow has ended");
        self.end = None;
    }

    /// Goes on over another stream, behind the bytes that the receiver has. False if it cannot
    /// have these.
    pub(crate) fn resume(&mut self, socket: TcpStream, received: u64) -> bool {
        if !self.history.resume(received) {
            return false;
        }
        self.socket = Some(socket);
        self.push();
        true
    }

    /// Sends the note of the end, behind the rest of a message that has begun.
    ///
    /// # Safety
    /// The memory is readable.
    pub(crate) unsafe fn finish(&mut self, rest: [Span; 2]) {
        for part in rest {
            // SAFETY: the caller promises the memory.
            self.history.append(unsafe { part.bytes() });
        }
        self.end = Some(self.history.end());
        self.tell(&FlowHead::note(HeadKind::End, 0, 0));
    }

    /// Whether the note of the end has been kept, so that the flow lives until the receiver has it.
    pub(crate) fn is_closing(&self) -> bool {
        self.end.is_some()
    }

    /// Whether the receiver has all messages of a flow that is closed, and the note of the end is
    /// on its way.
    pub(crate) fn is_finished(&self) -> bool {
        let has_all = self.end.is_some_and(|end| self.history.confirmed() >= end);
        has_all && self.is_up() && self.history.unsent().is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::Read,
        net::{Ipv4Addr, TcpListener},
    };

    use super::*;

    fn ends() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let addr = listener.local_addr().expect("an address");
        let near = TcpStream::connect(addr).expect("a connection");
        (near, listener.accept().expect("a connection").0)
    }

    #[test]
    fn a_note_is_a_part_of_the_stream_and_goes_again() {
        let (near, mut far) = ends();
        let mut own = OwnStream::new(near, 1000);
        let note = FlowHead::note(HeadKind::Ring, 7, 5);
        own.tell(&note);
        let mut came = [0; HEAD_LEN];
        far.read_exact(&mut came).expect("the note");
        assert_eq!((came, own.history().end()), (note.encode(), HEAD_LEN as u64));
        let (near, mut far) = ends();
        own.lose("a test");
        assert!(own.resume(near, 0), "the receiver has not read it");
        far.read_exact(&mut came).expect("the note");
        assert_eq!(came, note.encode());
        let (near, mut far) = ends();
        own.lose("a test");
        assert!(own.resume(near, HEAD_LEN as u64), "the receiver has read it");
        drop(own);
        assert_eq!(far.read(&mut came).expect("the end"), 0, "it does not come twice");
    }
}
