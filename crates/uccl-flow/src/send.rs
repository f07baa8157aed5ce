//! The sending end of a flow.

use std::{
    io,
    net::TcpStream,
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use parking_lot::Mutex;
use uccl_wire::flow::{FlowHead, HEAD_LEN, HeadKind};

use crate::{
    bundle::{Bundle, Outbox},
    counters::Traffic,
    error::{Backlog, FlowError, Peer},
    flows::Flows,
    slots::{Order, Slot, Slots},
    socket::{self, Span},
};

/// The sending end of a flow. Any thread may use it, one at a time without waiting for another.
/// Dropping it closes it.
pub struct SendFlow {
    state: Mutex<State>,
    bundle: Arc<Bundle>,
    outbox: Arc<Outbox>,
    flow: u64,
    flows: Flows,
}

struct State {
    stream: Option<TcpStream>,
    slots: Slots<Message>,
    /// Messages of which bytes are left to be sent.
    queue: Order,
    /// The number of the next message.
    next: u64,
    failure: Option<FlowError>,
    last_progress: Instant,
    traffic: Traffic,
}

struct Message {
    head: [u8; HEAD_LEN],
    payload: Span,
    /// Bytes of head and payload that have been sent over the own stream.
    sent: usize,
    /// The streams of the bundle carry it.
    is_large: bool,
}

// SAFETY: the spans are the caller's memory, which it leaves to the flow until a message has ended,
// on any thread.
unsafe impl Send for State {}

impl Message {
    fn is_sent(&self) -> bool {
        self.sent == HEAD_LEN + self.payload.len
    }
}

impl SendFlow {
    pub(crate) fn new(flows: Flows, stream: TcpStream, bundle: Arc<Bundle>, flow: u64) -> Self {
        let state = State {
            stream: Some(stream),
            slots: Slots::new(),
            queue: Order::new(),
            next: 0,
            failure: None,
            last_progress: Instant::now(),
            traffic: Traffic::default(),
        };
        bundle.add(flow);
        Self { state: Mutex::new(state), bundle, outbox: Arc::default(), flow, flows }
    }

    /// The other end.
    #[must_use]
    pub fn peer(&self) -> &Peer {
        &self.bundle.target.peer
    }

    /// Sends a message of `len` bytes, which may be 0. `None`: there is no room now, try again
    /// later.
    ///
    /// # Errors
    /// The flow's error.
    ///
    /// # Safety
    /// The memory stays readable, and its content as it is, until [`SendFlow::test`] has reported
    /// the end of this message, or the flow is closed. An error does not end it.
    pub unsafe fn post(
        &self,
        ptr: *const u8,
        len: usize,
        tag: u32,
    ) -> Result<Option<Slot>, FlowError> {
        let mut state = self.state.lock();
        state.check()?;
        if state.slots.is_full() {
            self.flush(&mut state)?;
            return Ok(None);
        }
        let total = len as u64;
        let (flow, message) = (self.flow, state.next);
        let kind = HeadKind::Message;
        let head = FlowHead { kind, tag, flow, message, total, offset: 0, len: total };
        let payload = Span { addr: ptr.cast_mut(), len };
        let is_large = len > self.flows.settings().small_max;
        let message = Message { head: head.encode(), payload, sent: 0, is_large };
        let Some(slot) = state.slots.insert(message) else { return Ok(None) };
        state.next += 1;
        if is_large {
            state.traffic.add_large(len);
            self.outbox.ended.fetch_and(!(1 << slot.index()), Ordering::Relaxed);
            self.bundle.push(&head, payload, slot.index(), &self.outbox)?;
        } else {
            state.traffic.add_small(len);
            state.queue.push(slot.index());
            self.flush(&mut state)?;
        }
        Ok(Some(slot))
    }

    /// The length in bytes of a message that has ended; `None` if it has not. The slot is free
    /// after the answer.
    ///
    /// # Errors
    /// The flow's error, or that there is no such request.
    pub fn test(&self, slot: Slot) -> Result<Option<usize>, FlowError> {
        let mut state = self.state.lock();
        if !self.has_ended(&state, slot)? {
            state.check()?;
            if let Some(failure) = self.outbox.failure.lock().clone() {
                return Err(state.failure.get_or_insert(failure).clone());
            }
            self.flush(&mut state)?;
        }
        if !self.has_ended(&state, slot)? {
            return Ok(None);
        }
        Ok(state.slots.remove(slot).map(|message| message.payload.len))
    }

    fn has_ended(&self, state: &State, slot: Slot) -> Result<bool, FlowError> {
        let message = state.slots.get(slot)?;
        let ended = || self.outbox.ended.load(Ordering::Acquire) & (1 << slot.index()) != 0;
        Ok(if message.is_large { ended() } else { message.is_sent() })
    }

    /// Closes the flow. Messages that have ended reach the peer; others are cut, and their memory
    /// is no longer used. Returns at once.
    pub fn close(&self) {
        let mut state = self.state.lock();
        state.stream = None;
        if state
            .failure
            .replace(FlowError::Closed)
            .is_none_or(|old| !matches!(old, FlowError::Closed))
        {
            self.flows.shared().totals.lock().sent.add(state.traffic);
            self.flows.shared().leave(&self.bundle, self.flow, &self.outbox);
        }
    }

    /// Sends as much as the socket takes.
    fn flush(&self, state: &mut State) -> Result<(), FlowError> {
        while let Some(index) = state.queue.front() {
            let Some(stream) = &state.stream else { return state.check() };
            let Some(message) = state.slots.at(index) else {
                state.queue.pop();
                continue;
            };
            let head = Span::of(&message.head).after(message.sent);
            let payload = message.payload.after(message.sent.saturating_sub(HEAD_LEN));
            // SAFETY: the head lives in the slot; the caller of `post` keeps the payload readable.
            match unsafe { socket::send(stream, &[head, payload]) } {
                Ok(None) => return Ok(()),
                Ok(Some(count)) => {
                    message.sent += count;
                    state.last_progress = Instant::now();
                    if !message.is_sent() {
                        continue;
                    }
                    state.queue.pop();
                }
                Err(error) => return Err(self.fail(state, &error)),
            }
        }
        Ok(())
    }

    fn fail(&self, state: &mut State, error: &io::Error) -> FlowError {
        let unsent = state.slots.values().filter(|message| !message.is_sent());
        let outstanding = unsent.fold(Backlog::default(), |sum, message| Backlog {
            requests: sum.requests + 1,
            bytes: sum.bytes + (HEAD_LEN + message.payload.len - message.sent) as u64,
        });
        let failure = FlowError::Lost {
            peer: self.peer().clone(),
            cause: error.to_string(),
            silent: state.last_progress.elapsed(),
            outstanding,
        };
        state.stream = None;
        state.failure.get_or_insert(failure).clone()
    }
}

impl State {
    fn check(&self) -> Result<(), FlowError> {
        self.failure.clone().map_or(Ok(()), Err)
    }
}

impl Drop for SendFlow {
    fn drop(&mut self) {
        self.close();
    }
}
