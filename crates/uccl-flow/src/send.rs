//! The sending end of a flow.

use std::{
    net::TcpStream,
    sync::{Arc, atomic::Ordering},
};

use parking_lot::Mutex;
use uccl_wire::flow::{FlowHead, HeadKind};

use crate::{
    bundle::{Bundle, Outbox},
    error::{FlowError, Peer},
    flows::Flows,
    keep::KeptFlow,
    outlet::{FlowName, Message, SendState},
    ring::RingSender,
    settings::Settings,
    slots::Slot,
    socket::Span,
};

/// The sending end of a flow. Any thread may use it, one at a time without waiting for another.
/// Dropping it closes it.
pub struct SendFlow {
    state: Arc<Mutex<SendState>>,
    bundle: Arc<Bundle>,
    outbox: Arc<Outbox>,
    flow: u64,
    flows: Flows,
}

impl SendFlow {
    pub(crate) fn new(
        flows: Flows,
        stream: TcpStream,
        bundle: Arc<Bundle>,
        name: FlowName,
        ring: Option<RingSender>,
    ) -> Self {
        let flow = name.flow;
        let state = SendState::new(stream, flows.settings().small_max, ring);
        bundle.add(flow);
        let state = Arc::new(Mutex::new(state));
        let kept = KeptFlow { state: Arc::clone(&state), bundle: Arc::clone(&bundle), name };
        flows.shared().keeping.add(kept);
        Self { state, bundle, outbox: Arc::default(), flow, flows }
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
            state.flush(self.peer())?;
            return Ok(None);
        }
        let total = len as u64;
        let (flow, message) = (self.flow, state.next);
        let kind = HeadKind::Message;
        let head = FlowHead { kind, tag, flow, message, total, offset: 0, len: total };
        let payload = Span { addr: ptr.cast_mut(), len };
        let is_local = len <= Settings::LOCAL_MAX && state.has_ring();
        let is_large = !is_local && len > self.flows.settings().small_max;
        let message = Message { head: head.encode(), payload, sent: 0, is_local, is_large };
        let Some(slot) = state.slots.insert(message) else { return Ok(None) };
        state.next += 1;
        if is_large {
            state.traffic.add_large(len);
            self.outbox.ended.fetch_and(!(1 << slot.index()), Ordering::Relaxed);
            self.bundle.push(&head, payload, slot.index(), &self.outbox)?;
        } else {
            state.traffic.add_small(len);
            state.queue.push(slot.index());
            state.flush(self.peer())?;
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
            state.flush(self.peer())?;
        }
        if !self.has_ended(&state, slot)? {
            return Ok(None);
        }
        Ok(state.slots.remove(slot).map(|message| message.payload.len))
    }

    fn has_ended(&self, state: &SendState, slot: Slot) -> Result<bool, FlowError> {
        let message = state.slots.get(slot)?;
        let ended = || self.outbox.ended.load(Ordering::Acquire) & (1 << slot.index()) != 0;
        Ok(if message.is_large { ended() } else { message.is_sent() })
    }

    /// Closes the flow. Messages that have ended reach the peer, also over another stream when this
    /// one dies; others are cut, and their memory is no longer used. Returns at once.
    pub fn close(&self) {
        let mut state = self.state.lock();
        let before = state.failure.replace(FlowError::Closed);
        if matches!(before, Some(FlowError::Closed)) {
            return;
        }
        if before.is_none() || state.own.is_up() {
            state.finish();
        }
        self.flows.shared().totals.lock().sent.add(state.traffic);
        drop(state);
        self.flows.shared().leave(&self.bundle, self.flow, &self.outbox);
        self.flows.shared().keeping.look();
    }
}

impl Drop for SendFlow {
    fn drop(&mut self) {
        self.close();
    }
}
