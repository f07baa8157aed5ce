//! The receiving end of a flow as its user and the threads see it.

use std::{
    net::TcpStream,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::{Mutex, MutexGuard};
use uccl_wire::flow::FlowHead;

use crate::{
    ahead::Ahead,
    core::{Inbox, Params, Verdict},
    counters::Traffic,
    error::{Backlog, FlowError, Peer},
    local_ring::LocalRing,
    slots::{Slot, Slots},
    socket::Span,
};

/// The receiving end of a flow.
pub(crate) struct Sink {
    pub(crate) flow: u64,
    pub(crate) peer: Peer,
    pub(crate) state: Mutex<SinkState>,
}

pub(crate) struct SinkState {
    /// The flow's own stream.
    pub(crate) stream: Option<TcpStream>,
    pub(crate) slots: Slots<Receive>,
    pub(crate) inbox: Inbox,
    pub(crate) ahead: Ahead,
    /// Bytes that have come over the own stream and those before it.
    pub(crate) received: u64,
    /// The round of the greeting that brought the own stream.
    pub(crate) round: u64,
    /// The own stream had no more when the user looked.
    pub(crate) is_dry: bool,
    /// The message on the own stream that has begun: the place of its slot.
    pub(crate) begun: Option<usize>,
    /// The other way of small messages, from a process of the same host.
    pub(crate) ring: LocalRing,
    pub(crate) failure: Option<FlowError>,
    pub(crate) last_progress: Instant,
    pub(crate) traffic: Traffic,
    /// The last message came in chunks: the next one may, too.
    pub(crate) was_large: bool,
}

/// A receive that has been posted.
pub(crate) struct NewReceive {
    /// None if there was no room.
    pub(crate) slot: Option<Slot>,
    /// The sender has to hear of it, since chunks have come before.
    pub(crate) had_early: bool,
    /// Its message probably comes in chunks.
    pub(crate) is_large: bool,
}

pub(crate) struct Receive {
    pub(crate) number: u64,
    pub(crate) memory: Span,
    /// The message's length, once it is known.
    pub(crate) total: usize,
    /// Bytes that have come over the own stream or by the ring.
    pub(crate) received: usize,
    pub(crate) is_done: bool,
}

/// The place of the next bytes of a chunk.
pub(crate) enum Place {
    /// In a receive: the memory of the whole chunk. [`Sink::end_landing`] follows.
    Land(Span),
    /// Nowhere.
    Drop,
    /// Aside, for [`Sink::keep_early`].
    Aside,
}

// SAFETY: the spans are the caller's memory, which it leaves to the flow until a receive has ended,
// on any thread.
unsafe impl Send for SinkState {}

impl Sink {
    pub(crate) fn new(
        stream: TcpStream,
        peer: Peer,
        (flow, chunk_len): (u64, u64),
        ring: LocalRing,
    ) -> Arc<Self> {
        let state = SinkState {
            stream: Some(stream),
            slots: Slots::new(),
            inbox: Inbox::new(chunk_len, Params::early_len(chunk_len)),
            ahead: Ahead::new(),
            received: 0,
            round: 0,
            is_dry: false,
            begun: None,
            ring,
            failure: None,
            last_progress: Instant::now(),
            traffic: Traffic::default(),
            was_large: false,
        };
        Arc::new(Self { flow, peer, state: Mutex::new(state) })
    }

    /// Posts a receive.
    ///
    /// # Safety
    /// As for [`RecvFlow::post`](crate::RecvFlow::post).
    pub(crate) unsafe fn post(&self, memory: Span) -> Result<NewReceive, FlowError> {
        let mut state = self.state.lock();
        state.check()?;
        if state.slots.is_full() {
            return Ok(NewReceive { slot: None, had_early: false, is_large: false });
        }
        let number = state.inbox.post(memory.len as u64);
        let slot =
            state.slots.insert(Receive { number, memory, total: 0, received: 0, is_done: false });
        let had_early = state.inbox.has_early();
        self.take_early(&mut state);
        Ok(NewReceive { slot, had_early, is_large: state.was_large })
    }

    /// The number of receives that have been posted.
    pub(crate) fn posted(&self) -> u64 {
        self.state.lock().inbox.posted()
    }

    /// The number of bytes that have come over the own stream, and whether the user has looked for
    /// more since this was last called. `None` if the flow has ended.
    pub(crate) fn take_progress(&self) -> Option<(u64, bool)> {
        let mut state = self.state.lock();
        let is_dry = std::mem::take(&mut state.is_dry);
        state.failure.is_none().then_some((state.received, is_dry))
    }

    /// Says where the next bytes of a chunk go.
    pub(crate) fn begin_landing(&self, head: &FlowHead) -> Place {
        self.begin(&mut self.state.lock(), head)
    }

    /// A system call for the bytes of a chunk has ended; with `is_whole` the chunk has.
    pub(crate) fn end_landing(&self, head: &FlowHead, is_whole: bool) {
        self.end(&mut self.state.lock(), head, is_whole);
    }

    /// Keeps a chunk for its receive, or copies it there.
    pub(crate) fn keep_early(&self, head: FlowHead, bytes: Box<[u8]>) {
        let mut state = self.state.lock();
        if state.failure.is_none() {
            state.inbox.keep_early(head, bytes);
            self.take_early(&mut state);
        }
    }

    /// The peer has not shown a sign of life for some time: ends the flow if it waits and nothing
    /// has come over its own stream either.
    pub(crate) fn give_up(&self, silent: Duration, limit: Duration) {
        let mut state = self.state.lock();
        let (silent, outstanding) =
            (silent.min(state.last_progress.elapsed()), state.outstanding());
        if silent > limit && outstanding.requests > 0 {
            let cause = "the process does not answer".into();
            state.end(FlowError::Lost { peer: self.peer.clone(), cause, silent, outstanding });
        }
    }

    /// The peer has closed all its streams: ends the flow if it waits and has no stream either.
    /// Messages in the ring are still for its user to take.
    pub(crate) fn give_up_closed(&self) {
        let mut state = self.state.lock();
        let outstanding = state.outstanding();
        if state.stream.is_none() && outstanding.requests > 0 && !state.ring.has_bytes() {
            state.end(FlowError::PeerClosed { peer: self.peer.clone(), outstanding });
        }
    }

    /// Ends the flow. Afterwards no byte lands.
    pub(crate) fn close(&self) {
        let mut state = self.state.lock();
        state.end(FlowError::Closed);
        // A system call that does not block writes to the memory, and ends by itself.
        while state.inbox.is_landing() {
            MutexGuard::unlocked(&mut state, std::thread::yield_now);
        }
    }

    fn take_early(&self, state: &mut SinkState) {
        while let Some(chunk) = state.inbox.take_early() {
            if let Place::Land(span) = self.begin(state, &chunk.head) {
                // SAFETY: the chunk has as many bytes as its span, which the caller of `post` keeps
                // writable while the receive has not ended.
                unsafe {
                    std::ptr::copy_nonoverlapping(chunk.bytes.as_ptr(), span.addr, span.len);
                };
                self.end(state, &chunk.head, true);
            }
        }
    }

    fn begin(&self, state: &mut SinkState, head: &FlowHead) -> Place {
        if state.failure.is_some() {
            return Place::Drop;
        }
        let failure = match state.inbox.begin_landing(head) {
            Verdict::Land => {
                let receive = state.slots.values().find(|other| other.number == head.message);
                let memory = receive.map_or(Span::EMPTY, |receive| receive.memory);
                let end = (head.offset + head.len) as usize;
                return Place::Land(Span { len: end, ..memory }.after(head.offset as usize));
            }
            Verdict::Repeat => return Place::Drop,
            Verdict::Early => return Place::Aside,
            Verdict::TooLong { room } => self.too_long(head, room),
            Verdict::Wrong(what) => self.protocol(what.into()),
        };
        state.end(failure);
        Place::Drop
    }

    fn end(&self, state: &mut SinkState, head: &FlowHead, is_whole: bool) {
        if state.inbox.end_landing(head, is_whole)
            && let Some(receive) = state.slots.find(|other| other.number == head.message)
        {
            receive.total = head.total as usize;
            receive.is_done = true;
            state.traffic.add_large(receive.total);
            state.was_large = true;
        }
    }

    pub(crate) fn too_long(&self, head: &FlowHead, room: u64) -> FlowError {
        let (message, sent) = (head.message, head.total);
        FlowError::TooLong { peer: self.peer.clone(), message, sent, room }
    }

    pub(crate) fn protocol(&self, what: String) -> FlowError {
        FlowError::Protocol { peer: self.peer.clone(), what }
    }
}

impl Receive {
    /// The memory of the part of the message that has not come yet.
    pub(crate) fn rest(&self) -> Span {
        Span { len: self.total, ..self.memory }.after(self.received)
    }
}

impl SinkState {
    pub(crate) fn check(&self) -> Result<(), FlowError> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    pub(crate) fn outstanding(&self) -> Backlog {
        let open = self.slots.values().filter(|receive| !receive.is_done);
        open.fold(Backlog::default(), |sum, receive| Backlog {
            requests: sum.requests + 1,
            bytes: sum.bytes + (receive.memory.len - receive.received) as u64,
        })
    }

    /// The own stream has ended. The sender brings another one, or its silence ends the flow.
    pub(crate) fn lose(&mut self, cause: &str) -> Result<(), FlowError> {
        tracing::debug!("the own stream of a flow has ended: {cause}");
        self.stream = None;
        self.check()
    }

    pub(crate) fn end(&mut self, failure: FlowError) -> FlowError {
        (self.stream, self.ring) = (None, LocalRing::None);
        self.failure.get_or_insert(failure).clone()
    }
}
