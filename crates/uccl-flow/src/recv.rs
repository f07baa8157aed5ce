//! The receiving end of a flow.

mod local;

use std::sync::Arc;

use uccl_wire::flow::{FlowHead, HEAD_LEN, HeadKind};

use crate::{
    MAX_GROUP,
    error::{FlowError, Peer},
    flows::Flows,
    port::Mail,
    sink::{Sink, SinkState},
    slots::Slot,
    socket::{self, Span},
};

/// Memory for a message.
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    /// Its address.
    pub ptr: *mut u8,
    /// Its length in bytes; a message may be shorter.
    pub len: usize,
    /// The tag of the message that belongs here, for groups of several buffers.
    pub tag: u32,
}

/// The receiving end of a flow. Any thread may use it, one at a time without waiting for another.
/// Dropping it closes it.
pub struct RecvFlow {
    sink: Arc<Sink>,
    flows: Flows,
}

impl RecvFlow {
    pub(crate) fn new(flows: Flows, sink: Arc<Sink>) -> Self {
        Self { sink, flows }
    }

    /// The other end.
    #[must_use]
    pub fn peer(&self) -> &Peer {
        &self.sink.peer
    }

    /// Posts a receive for the next message. `None`: there is no room now, try again later.
    ///
    /// # Errors
    /// The flow's error, or that a receive cannot have that many buffers.
    ///
    /// # Safety
    /// The memory stays writable, and nothing else uses it, until [`RecvFlow::test`] has reported
    /// the end of this receive, or the flow is closed. An error does not end it.
    pub unsafe fn post(&self, buffers: &[Buffer]) -> Result<Option<Slot>, FlowError> {
        let [buffer] = buffers else { return Err(FlowError::Group(buffers.len())) };
        const { assert!(MAX_GROUP == 1) };
        let memory = Span { addr: buffer.ptr, len: buffer.len };
        // SAFETY: the caller promises the memory.
        let posted = unsafe { self.sink.post(memory) }?;
        if posted.had_early {
            let (instance, flow) = (self.sink.peer.instance, self.sink.flow);
            let count = self.sink.posted();
            for worker in &self.flows.shared().workers {
                worker.send(Mail::Posted { instance, flow, posted: count });
            }
        }
        if posted.is_large {
            self.flows.shared().rouse();
        }
        Ok(posted.slot)
    }

    /// The length in bytes of the message of a receive that has ended; `None` if it has not. The
    /// slot is free after the answer.
    ///
    /// # Errors
    /// The flow's error, or that there is no such request.
    pub fn test(&self, slot: Slot) -> Result<Option<usize>, FlowError> {
        let mut state = self.sink.state.lock();
        let is_done = state.slots.get(slot)?.is_done;
        if !is_done {
            state.check()?;
        }
        if !is_done || state.ring.takes_extra_look() {
            let progress = progress(&self.sink, &mut state);
            if !state.slots.get(slot)?.is_done {
                return progress.map(|()| None);
            }
        }
        Ok(state.slots.remove(slot).map(|receive| receive.total))
    }

    /// Closes the flow. Afterwards no byte lands in memory that was posted. Returns at once.
    pub fn close(&self) {
        let shared = self.flows.shared();
        shared.sinks.write().remove(&self.sink.flow);
        self.sink.close();
        let traffic = std::mem::take(&mut self.sink.state.lock().traffic);
        shared.totals.lock().received.add(traffic);
    }
}

#[cfg(test)]
impl RecvFlow {
    /// Whether threads are roused for the next receive.
    pub(crate) fn expects_large(&self) -> bool {
        self.sink.state.lock().was_large
    }

    /// Waits until the own stream's socket has so many bytes.
    pub(crate) fn wait_for_bytes(&self, count: usize) {
        let has_all = || {
            let state = self.sink.state.lock();
            let stream = state.stream.as_ref().expect("an open flow");
            rustix::io::ioctl_fionread(stream).expect("a socket") >= count as u64
        };
        for _ in 0..10_000 {
            if has_all() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        panic!("the bytes do not come");
    }
}

impl Drop for RecvFlow {
    fn drop(&mut self) {
        self.close();
    }
}

/// Takes messages of the ring and, when it has its turn, of the own stream.
fn progress(sink: &Sink, state: &mut SinkState) -> Result<(), FlowError> {
    if local::progress(sink, state)? { progress_stream(sink, state) } else { Ok(()) }
}

/// Takes the bytes that were read ahead, and those of the own stream.
fn progress_stream(sink: &Sink, state: &mut SinkState) -> Result<(), FlowError> {
    loop {
        if !take_ahead(sink, state)? {
            return Ok(());
        }
        // A message that has begun goes into its memory, bytes behind it into the buffer.
        let begun = state.begun.and_then(|at| state.slots.at(at));
        let rest = begun.map_or(Span::EMPTY, |receive| receive.rest());
        let room = state.ahead.room();
        let Some(stream) = &state.stream else { return state.check() };
        // SAFETY: the caller of `post` keeps the memory writable, the buffer is the flow's own.
        match unsafe { socket::recv(stream, &[rest, room]) } {
            Ok(None) => {
                state.is_dry = true;
                return Ok(());
            }
            Ok(Some(0)) => return state.lose("the peer closed the stream"),
            Ok(Some(count)) => {
                state.received += count as u64;
                let placed = count.min(rest.len);
                if let Some(receive) = state.begun.and_then(|at| state.slots.at(at)) {
                    receive.received += placed;
                }
                state.ahead.fill(count - placed);
                state.last_progress = std::time::Instant::now();
                if count < rest.len + room.len {
                    take_ahead(sink, state)?;
                    return Ok(());
                }
            }
            Err(error) => return state.lose(&error.to_string()),
        }
    }
}

/// Gives bytes that were read ahead to the receives. False if the next message has no receive.
fn take_ahead(sink: &Sink, state: &mut SinkState) -> Result<bool, FlowError> {
    loop {
        let index = match state.begun {
            Some(index) => index,
            None => {
                let Some(bytes) = state.ahead.filled().first_chunk() else { return Ok(true) };
                let head = match FlowHead::decode(bytes) {
                    Ok(head) => head,
                    Err(error) => return Err(state.end(sink.protocol(error.to_string()))),
                };
                if head.kind == HeadKind::Ring {
                    state.ahead.take(HEAD_LEN);
                    local::open(sink, state, &head);
                    continue;
                }
                state.ring.end_wait();
                match head.kind {
                    HeadKind::Ping => {
                        state.ahead.take(HEAD_LEN);
                        confirm(state)?;
                        continue;
                    }
                    HeadKind::End => {
                        // The peer has put its messages into the ring before.
                        local::take(sink, state)?;
                        let (peer, outstanding) = (sink.peer.clone(), state.outstanding());
                        if outstanding.requests == 0 {
                            return Ok(false);
                        }
                        return Err(state.end(FlowError::PeerClosed { peer, outstanding }));
                    }
                    _ if head.message >= state.inbox.posted() => return Ok(false),
                    _ => {
                        state.ahead.take(HEAD_LEN);
                        let index = begin(sink, state, &head)?;
                        state.begun = Some(index);
                        index
                    }
                }
            }
        };
        let Some(receive) = state.slots.at(index) else { return Ok(true) };
        let rest = receive.rest();
        let bytes = state.ahead.filled();
        let count = bytes.len().min(rest.len);
        // SAFETY: the caller of `post` keeps the memory writable while the receive has not ended,
        // and it is not the flow's own buffer.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), rest.addr, count) };
        state.ahead.take(count);
        receive.received += count;
        receive.is_done = receive.received == receive.total;
        if !receive.is_done {
            return Ok(true);
        }
        state.traffic.add_small(receive.total);
        state.was_large = false;
        state.begun = None;
    }
}

/// Tells the sender how many bytes have come.
fn confirm(state: &mut SinkState) -> Result<(), FlowError> {
    let note = FlowHead::note(HeadKind::Ack, 0, state.received).encode();
    let Some(stream) = &state.stream else { return Ok(()) };
    // SAFETY: the note lives through the call.
    match unsafe { socket::send(stream, &[Span::of(&note)]) } {
        Ok(Some(count)) if count == note.len() => Ok(()),
        Ok(_) => state.lose("the peer does not read confirmations"),
        Err(error) => state.lose(&error.to_string()),
    }
}

/// Begins a message that comes in one piece: the place of its slot.
fn begin(sink: &Sink, state: &mut SinkState, head: &FlowHead) -> Result<usize, FlowError> {
    if head.kind != HeadKind::Message || !state.inbox.end_whole(head.message) {
        return Err(state.end(sink.protocol(format!("{head:?} is out of turn"))));
    }
    let Some(index) = state.slots.place(|receive| receive.number == head.message) else {
        return Err(state.end(sink.protocol(format!("nobody waits for {head:?}"))));
    };
    if let Some(receive) = state.slots.at(index) {
        let room = receive.memory.len as u64;
        if head.total > room {
            return Err(state.end(sink.too_long(head, room)));
        }
        receive.total = head.total as usize;
    }
    Ok(index)
}
