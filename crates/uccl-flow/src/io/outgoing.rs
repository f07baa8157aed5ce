//! A stream that sends chunks.

use std::{net::TcpStream, sync::Arc};

use uccl_wire::flow::{FlowHead, HEAD_LEN, HeadKind};

use crate::{
    bundle::{Bundle, Job, Lease},
    core::Part,
    socket::{self, Span},
};

/// The most chunks of a turn, after which other streams get theirs.
const MOST_CHUNKS: usize = 8;
/// Bytes in place of those that the receiver has.
static FILLER: [u8; 16 << 10] = [0; 16 << 10];

/// A stream of a bundle, as its thread has it.
pub(crate) struct OutboundStream {
    pub(crate) bundle: Arc<Bundle>,
    pub(crate) index: usize,
    pub(crate) socket: TcpStream,
    chunk: Option<OutboundChunk>,
    notes: [u8; 32 * HEAD_LEN],
    filled: usize,
    /// The socket has taken no more; an event follows.
    is_full: bool,
    /// It was full: the next bytes that it takes show that others have left.
    was_full: bool,
}

struct OutboundChunk {
    /// The chunk; none behind a note.
    part: Option<Part>,
    head: [u8; HEAD_LEN],
    /// Bytes of head and chunk.
    sent: usize,
}

impl OutboundStream {
    pub(crate) fn new(bundle: Arc<Bundle>, index: usize, socket: TcpStream) -> Self {
        bundle.on_open(index);
        let notes = [0; 32 * HEAD_LEN];
        Self {
            bundle,
            index,
            socket,
            chunk: None,
            notes,
            filled: 0,
            is_full: false,
            was_full: false,
        }
    }

    /// Something has happened to the socket.
    pub(crate) fn on_event(&mut self) -> Result<(), String> {
        self.was_full |= std::mem::take(&mut self.is_full);
        self.read()
    }

    /// Sends as much as it can. True if there may be more than fits into a turn.
    pub(crate) fn write(&mut self) -> Result<bool, String> {
        for _ in 0..MOST_CHUNKS {
            if self.is_full {
                return Ok(false);
            }
            if self.chunk.is_none() {
                let Some(job) = self.bundle.next(self.index) else { return Ok(false) };
                let (head, part) = match job {
                    Job::Chunk(part) => (head(&part), Some(part)),
                    Job::Note(note) => (note.encode(), None),
                };
                self.chunk = Some(OutboundChunk { head, part, sent: 0 });
            }
            self.send()?;
        }
        Ok(true)
    }

    /// Sends as much of the chunk as the socket takes.
    fn send(&mut self) -> Result<(), String> {
        while let Some(chunk) = &mut self.chunk {
            let head = Span::of(&chunk.head).after(chunk.sent);
            let sent = chunk.sent.saturating_sub(HEAD_LEN) as u64;
            let len = chunk.part.map_or(0, |part| part.len);
            let lease = match &chunk.part {
                Some(part) => self.bundle.lease(self.index, part, sent),
                None => Some(Lease::Filler),
            };
            let (rest, _reading) = match lease.ok_or("a flow was closed within a chunk")? {
                Lease::Memory(span, reading) => (span, Some(reading)),
                Lease::Filler => {
                    let left = (len - sent) as usize;
                    (Span::of(&FILLER[..left.min(FILLER.len())]), None)
                }
            };
            // SAFETY: the head is the chunk's own, and the lease keeps the memory.
            match unsafe { socket::send(&self.socket, &[head, rest]) } {
                Ok(None) => {
                    self.is_full = true;
                    return Ok(());
                }
                Ok(Some(count)) => {
                    chunk.sent += count;
                    if std::mem::take(&mut self.was_full) {
                        self.bundle.on_moved(self.index);
                    }
                    if chunk.sent == HEAD_LEN + len as usize {
                        self.bundle.on_written(self.index);
                        self.chunk = None;
                    }
                }
                Err(error) => return Err(error.to_string()),
            }
        }
        Ok(())
    }

    /// Takes the receiver's notes.
    fn read(&mut self) -> Result<(), String> {
        loop {
            let room = Span::of_mut(&mut self.notes).after(self.filled);
            // SAFETY: the rest of the stream's own buffer.
            match unsafe { socket::recv(&self.socket, &[room]) } {
                Ok(None) => return Ok(()),
                Ok(Some(0)) => return Err("the peer closed the stream".into()),
                Ok(Some(count)) => self.filled += count,
                Err(error) => return Err(error.to_string()),
            }
            let (heads, _) = self.notes[..self.filled].as_chunks::<HEAD_LEN>();
            for bytes in heads {
                let head = FlowHead::decode(bytes).map_err(|error| error.to_string())?;
                self.bundle.on_note(self.index, &head)?;
            }
            let taken = heads.len() * HEAD_LEN;
            self.notes.copy_within(taken..self.filled, 0);
            self.filled -= taken;
        }
    }
}

fn head(part: &Part) -> [u8; HEAD_LEN] {
    let Part { flow, message, tag, total, offset, len, .. } = *part;
    FlowHead { kind: HeadKind::Chunk, tag, flow, message, total, offset, len }.encode()
}
