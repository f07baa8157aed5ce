//! The receiving end of a flow.

use std::{net::TcpStream, time::Instant};

use parking_lot::Mutex;
use uccl_wire::flow::{FlowHead, HEAD_LEN, HeadKind};

use crate::{
    MAX_GROUP,
    error::{FlowError, Outstanding, Peer},
    flows::Flows,
    slots::{Order, Slot, Slots},
    socket::{self, Span},
};

/// Bytes that are read ahead of the receives.
const AHEAD_LEN: usize = 64 << 10;

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
    state: Mutex<State>,
    peer: Peer,
    _flows: Flows,
}

struct State {
    stream: Option<TcpStream>,
    slots: Slots<Receive>,
    /// Receives that have not ended.
    queue: Order,
    ahead: Ahead,
    /// The number of the next message.
    next: u64,
    failure: Option<FlowError>,
    last_progress: Instant,
}

/// Bytes that were read ahead.
struct Ahead {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

struct Receive {
    memory: Span,
    /// The message's length, once it has begun.
    total: Option<usize>,
    received: usize,
}

// SAFETY: the spans are the caller's memory, which it leaves to the flow until a receive has ended, on
// whatever thread.
unsafe impl Send for State {}

impl Receive {
    fn is_done(&self) -> bool {
        self.total == Some(self.received)
    }

    /// The memory of the part of the message that has not come.
    fn rest(&self) -> Span {
        let total = self.total.unwrap_or(0);
        Span { len: total, ..self.memory }.after(self.received)
    }
}

impl RecvFlow {
    pub(crate) fn new(flows: Flows, stream: TcpStream, peer: Peer, _flow: u64) -> Self {
        let bytes = vec![0; AHEAD_LEN].into_boxed_slice();
        let state = State {
            stream: Some(stream),
            slots: Slots::new(),
            queue: Order::new(),
            ahead: Ahead { bytes, start: 0, end: 0 },
            next: 0,
            failure: None,
            last_progress: Instant::now(),
        };
        Self { state: Mutex::new(state), peer, _flows: flows }
    }

    /// The other end.
    #[must_use]
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// Posts a receive for the next message. `None`: there is no room now, try again later.
    ///
    /// # Errors
    /// The flow's error, or that a receive cannot have that many buffers.
    ///
    /// # Safety
    /// The memory stays writable, and nothing else uses it, until [`RecvFlow::test`] has reported the
    /// end of this receive or an error, or the flow is closed.
    pub unsafe fn post(&self, buffers: &[Buffer]) -> Result<Option<Slot>, FlowError> {
        let [buffer] = buffers else { return Err(FlowError::Group(buffers.len())) };
        const { assert!(MAX_GROUP == 1) };
        let mut state = self.state.lock();
        state.check()?;
        let memory = Span { addr: buffer.ptr, len: buffer.len };
        let Some(slot) = state.slots.insert(Receive { memory, total: None, received: 0 }) else {
            return Ok(None);
        };
        state.queue.push(slot.index());
        Ok(Some(slot))
    }

    /// The length in bytes of the message of a receive that has ended; `None` if it has not. The slot
    /// is free after the answer.
    ///
    /// # Errors
    /// The flow's error, or that there is no such request.
    pub fn test(&self, slot: Slot) -> Result<Option<usize>, FlowError> {
        let mut state = self.state.lock();
        if !state.slots.get(slot)?.is_done() {
            state.check()?;
            self.progress(&mut state)?;
        }
        if !state.slots.get(slot)?.is_done() {
            return Ok(None);
        }
        Ok(state.slots.remove(slot).map(|receive| receive.received))
    }

    /// Closes the flow. Afterwards no byte lands in memory that was posted. Returns at once.
    pub fn close(&self) {
        let mut state = self.state.lock();
        state.failure.get_or_insert(FlowError::Closed);
        state.stream = None;
    }

    /// Takes what has been read ahead and what the socket has.
    fn progress(&self, state: &mut State) -> Result<(), FlowError> {
        loop {
            self.take_ahead(state)?;
            if state.queue.is_empty() {
                return Ok(());
            }
            let Some(stream) = &state.stream else { return state.check() };
            // A message that has begun goes into its memory, bytes behind it into the buffer.
            let begun = state.queue.front().and_then(|index| state.slots.at(index));
            let rest = begun.map_or(Span::EMPTY, |receive| receive.rest());
            let room = state.ahead.room();
            // SAFETY: the caller of `post` keeps the memory writable, the buffer is the flow's own.
            match unsafe { socket::recv(stream, &[rest, room]) } {
                Ok(None) => return Ok(()),
                Ok(Some(0)) => return Err(self.fail_closed(state)),
                Ok(Some(count)) => {
                    let placed = count.min(rest.len);
                    if let Some(receive) = state.queue.front().and_then(|at| state.slots.at(at)) {
                        receive.received += placed;
                    }
                    state.ahead.end += count - placed;
                    state.last_progress = Instant::now();
                    let is_all = rest.len + room.len > count;
                    if is_all {
                        return self.take_ahead(state);
                    }
                }
                Err(error) => return Err(self.fail(state, error.to_string())),
            }
        }
    }

    /// Gives bytes that were read ahead to the receives.
    fn take_ahead(&self, state: &mut State) -> Result<(), FlowError> {
        while let Some(index) = state.queue.front() {
            let Some(receive) = state.slots.at(index) else {
                state.queue.pop();
                continue;
            };
            if receive.total.is_none() {
                let Some(bytes) = state.ahead.filled().first_chunk() else { return Ok(()) };
                let head = match FlowHead::decode(bytes) {
                    Ok(head) => head,
                    Err(error) => return Err(self.fail_protocol(state, error.to_string())),
                };
                state.ahead.start += HEAD_LEN;
                if head.kind != HeadKind::Message || head.message != state.next {
                    return Err(self.fail_protocol(state, format!("{head:?} is out of turn")));
                }
                let room = receive.memory.len as u64;
                if head.total > room {
                    return Err(self.fail_long(state, &head, room));
                }
                state.next += 1;
                receive.total = Some(head.total as usize);
            }
            let rest = receive.rest();
            let bytes = state.ahead.filled();
            let count = bytes.len().min(rest.len);
            // SAFETY: the caller of `post` keeps the memory writable for as long as the receive has
            // not ended, and it is not the flow's own buffer.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), rest.addr, count) };
            receive.received += count;
            state.ahead.start += count;
            if !receive.is_done() {
                return Ok(());
            }
            state.queue.pop();
        }
        Ok(())
    }

    fn fail_closed(&self, state: &mut State) -> FlowError {
        let (peer, outstanding) = (self.peer.clone(), state.outstanding());
        state.end(FlowError::PeerClosed { peer, outstanding })
    }

    fn fail(&self, state: &mut State, cause: String) -> FlowError {
        let (peer, outstanding) = (self.peer.clone(), state.outstanding());
        let silent = state.last_progress.elapsed();
        state.end(FlowError::Lost { peer, cause, silent, outstanding })
    }

    fn fail_protocol(&self, state: &mut State, what: String) -> FlowError {
        state.end(FlowError::Protocol { peer: self.peer.clone(), what })
    }

    fn fail_long(&self, state: &mut State, head: &FlowHead, room: u64) -> FlowError {
        let (message, sent) = (head.message, head.total);
        state.end(FlowError::TooLong { peer: self.peer.clone(), message, sent, room })
    }
}

impl Ahead {
    fn filled(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    /// Room behind the filled bytes, which begin at the front afterwards.
    fn room(&mut self) -> Span {
        if self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        Span::of_mut(&mut self.bytes[self.end..])
    }
}

impl State {
    fn check(&self) -> Result<(), FlowError> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    fn outstanding(&self) -> Outstanding {
        let open = self.slots.values().filter(|receive| !receive.is_done());
        open.fold(Outstanding::default(), |sum, receive| Outstanding {
            requests: sum.requests + 1,
            bytes: sum.bytes + (receive.memory.len - receive.received) as u64,
        })
    }

    fn end(&mut self, failure: FlowError) -> FlowError {
        self.stream = None;
        self.failure.get_or_insert(failure).clone()
    }
}

impl Drop for RecvFlow {
    fn drop(&mut self) {
        self.close();
    }
}
