//! A stream that receives chunks.

use std::{io::ErrorKind, net::TcpStream, sync::Arc};

use uccl_wire::flow::{FlowHead, HEAD_LEN, HeadKind};

use crate::{
    shared::FlowsState,
    sink::{Place, Sink},
    socket::{self, Span},
};

/// Bytes of a turn, after which other streams get theirs.
const TURN_LEN: usize = 1 << 20;
/// The most bytes of notes that wait for a peer that does not read them.
const MOST_NOTES: usize = 1 << 20;

/// A stream of a peer's bundle, as its thread has it.
pub(crate) struct InboundStream {
    shared: Arc<FlowsState>,
    pub(crate) instance: u64,
    pub(crate) socket: TcpStream,
    head: [u8; HEAD_LEN],
    head_filled: usize,
    chunk: Option<InboundChunk>,
    /// Chunks that have come, and those that the sender knows of.
    count: u64,
    told: u64,
    /// The sender asks for an acknowledgement.
    is_asked: bool,
    notes: Vec<u8>,
    is_closed_by_peer: bool,
    dropped: Box<[u8]>,
}

struct InboundChunk {
    head: FlowHead,
    sink: Option<Arc<Sink>>,
    got: usize,
    /// Bytes that are kept aside.
    aside: Option<Vec<u8>>,
}

impl InboundStream {
    pub(crate) fn new(shared: Arc<FlowsState>, instance: u64, socket: TcpStream) -> Self {
        let mut stream = Self {
            instance,
            socket,
            head: [0; HEAD_LEN],
            head_filled: 0,
            chunk: None,
            count: 0,
            told: 0,
            is_asked: false,
            notes: Vec::new(),
            is_closed_by_peer: false,
            dropped: vec![0; 16 << 10].into_boxed_slice(),
            shared,
        };
        stream.shared.visitors.lock().open(instance);
        // An earlier stream may have taken such notes along.
        let sinks: Vec<_> = stream.shared.sinks.read().values().cloned().collect();
        for sink in sinks.iter().filter(|sink| sink.peer.instance == instance) {
            stream.note_posted(sink.flow, sink.posted());
        }
        stream
    }

    pub(crate) fn note_posted(&mut self, flow: u64, posted: u64) {
        self.notes.extend(FlowHead::note(HeadKind::Posted, flow, posted).encode());
    }

    /// Receives. True if there may be more than fits into a turn.
    pub(crate) fn read(&mut self) -> Result<bool, String> {
        let mut bytes = 0;
        while bytes < TURN_LEN {
            match self.receive()? {
                Some(count) => bytes += count,
                None => {
                    self.write()?;
                    return Ok(false);
                }
            }
        }
        self.write()?;
        Ok(true)
    }

    /// Sends the notes.
    pub(crate) fn write(&mut self) -> Result<(), String> {
        if self.told < self.count || std::mem::take(&mut self.is_asked) {
            self.told = self.count;
            self.notes.extend(FlowHead::note(HeadKind::Ack, 0, self.count).encode());
        }
        while !self.notes.is_empty() {
            // SAFETY: the notes live through the call.
            match unsafe { socket::send(&self.socket, &[Span::of(&self.notes)]) } {
                Ok(None) if self.notes.len() > MOST_NOTES => {
                    return Err("the peer does not read its notes".into());
                }
                Ok(None) => return Ok(()),
                Ok(Some(count)) => drop(self.notes.drain(..count)),
                Err(error) => return Err(error.to_string()),
            }
        }
        Ok(())
    }

    /// One system call. `None`: there is no more.
    fn receive(&mut self) -> Result<Option<usize>, String> {
        let Some(chunk) = &mut self.chunk else { return self.receive_head() };
        let left = chunk.head.len as usize - chunk.got;
        let place = match (&chunk.sink, &chunk.aside) {
            (Some(_), Some(_)) => Place::Aside,
            (Some(sink), None) => sink.begin_landing(&chunk.head),
            (None, _) => Place::Drop,
        };
        let room = match &place {
            Place::Land(span) => span.after(chunk.got),
            Place::Drop => {
                let len = left.min(self.dropped.len());
                Span::of_mut(&mut self.dropped[..len])
            }
            Place::Aside => {
                let aside = chunk.aside.get_or_insert_with(|| vec![0; chunk.head.len as usize]);
                Span::of_mut(aside).after(chunk.got)
            }
        };
        // The head of the next chunk comes along.
        let behind = if room.len == left { Span::of_mut(&mut self.head) } else { Span::EMPTY };
        // SAFETY: a landing keeps the memory until its end; all else is the stream's own.
        let result = unsafe { socket::recv(&self.socket, &[room, behind]) };
        let count = result.as_ref().map_or(0, |count| count.unwrap_or(0));
        let placed = count.min(room.len);
        chunk.got += placed;
        let is_whole = chunk.got == chunk.head.len as usize;
        if let (Place::Land(_), Some(sink)) = (&place, &chunk.sink) {
            sink.end_landing(&chunk.head, is_whole);
        }
        self.head_filled = count - placed;
        if is_whole {
            self.end_chunk();
            if self.head_filled == HEAD_LEN {
                self.begin_chunk()?;
            }
        }
        match result {
            Ok(Some(0)) => {
                self.is_closed_by_peer = true;
                Err("the peer closed the stream".into())
            }
            Ok(count) => Ok(count),
            Err(error) => {
                self.is_closed_by_peer = error.kind() == ErrorKind::ConnectionReset;
                Err(error.to_string())
            }
        }
    }

    fn receive_head(&mut self) -> Result<Option<usize>, String> {
        let room = Span::of_mut(&mut self.head).after(self.head_filled);
        // SAFETY: the rest of the stream's own head.
        match unsafe { socket::recv(&self.socket, &[room]) } {
            Ok(None) => Ok(None),
            Ok(Some(0)) => {
                self.is_closed_by_peer = true;
                Err("the peer closed the stream".into())
            }
            Ok(Some(count)) => {
                self.head_filled += count;
                if self.head_filled == HEAD_LEN {
                    self.begin_chunk()?;
                }
                Ok(Some(count))
            }
            Err(error) => {
                self.is_closed_by_peer = error.kind() == ErrorKind::ConnectionReset;
                Err(error.to_string())
            }
        }
    }

    fn begin_chunk(&mut self) -> Result<(), String> {
        self.head_filled = 0;
        let head = FlowHead::decode(&self.head).map_err(|error| error.to_string())?;
        if head.kind == HeadKind::Ping {
            self.is_asked = true;
            self.shared.visitors.lock().hear(self.instance);
            return Ok(());
        }
        if head.kind == HeadKind::Sent {
            self.shared.visitors.lock().hear(self.instance);
            self.answer(head.flow);
            return Ok(());
        }
        if head.kind != HeadKind::Chunk || head.len > super::usher::MOST_CHUNK_LEN {
            return Err(format!("{head:?} is no chunk"));
        }
        let sink = self.shared.sinks.read().get(&head.flow).cloned();
        let sink = sink.filter(|sink| sink.peer.instance == self.instance);
        self.chunk = Some(InboundChunk { head, sink, got: 0, aside: None });
        Ok(())
    }

    /// Says how far a flow is with its own stream.
    fn answer(&mut self, flow: u64) {
        let sink = self.shared.sinks.read().get(&flow).cloned();
        let progress = sink.filter(|sink| sink.peer.instance == self.instance);
        let note = match progress.and_then(|sink| sink.take_progress()) {
            Some((received, is_waiting)) => FlowHead {
                tag: u32::from(is_waiting),
                ..FlowHead::note(HeadKind::Received, flow, received)
            },
            None => FlowHead::note(HeadKind::End, flow, 0),
        };
        self.notes.extend(note.encode());
    }

    fn end_chunk(&mut self) {
        let Some(chunk) = self.chunk.take() else { return };
        self.count += 1;
        let Some(sink) = chunk.sink else { return };
        if let Some(bytes) = chunk.aside {
            sink.keep_early(chunk.head, bytes.into());
        }
        self.note_posted(sink.flow, sink.posted());
    }
}

impl Drop for InboundStream {
    fn drop(&mut self) {
        self.shared.visitors.lock().close(self.instance, self.is_closed_by_peer);
    }
}
