//! Communicators, and their requests.

use std::{
    cell::Cell,
    ffi::{c_int, c_void},
    ptr::null,
    sync::Arc,
};

use uccl_flow::{Buffer, FlowError, Listener, MAX_OUTSTANDING, RecvFlow, SendFlow, Slot};

use crate::{fault::Fault, log, process::Core};

/// A listen communicator.
pub(crate) struct ListenComm {
    pub(crate) listener: Listener,
    pub(crate) core: Arc<Core>,
}

/// A communicator that sends or receives. NCCL uses it from one thread at a time.
pub(crate) struct Comm {
    flow: Flow,
    /// A request for each slot of the flow, so that none is allocated.
    requests: [Request; MAX_OUTSTANDING],
    /// The flow's error has been logged. It is the same from the first one on.
    is_failed: Cell<bool>,
    /// The device's texts and the flows live as long.
    _core: Arc<Core>,
}

/// One of the two ends of a flow.
// Each is in the box of its communicator already.
#[allow(clippy::large_enum_variant)]
enum Flow {
    Send(SendFlow),
    Recv(RecvFlow),
}

/// A request, as NCCL holds it.
pub(crate) struct Request {
    comm: Cell<*const Comm>,
    slot: Cell<Option<Slot>>,
}

impl Comm {
    pub(crate) fn of_send(flow: SendFlow, core: Arc<Core>) -> Box<Self> {
        Self::new(Flow::Send(flow), core)
    }

    pub(crate) fn of_recv(flow: RecvFlow, core: Arc<Core>) -> Box<Self> {
        Self::new(Flow::Recv(flow), core)
    }

    fn new(flow: Flow, core: Arc<Core>) -> Box<Self> {
        let none = || Request { comm: Cell::new(null()), slot: Cell::new(None) };
        let requests = std::array::from_fn(|_| none());
        let comm = Box::new(Self { flow, requests, is_failed: Cell::new(false), _core: core });
        let at: *const Self = &*comm;
        comm.requests.iter().for_each(|request| request.comm.set(at));
        comm
    }

    /// Posts a send; null for "again later".
    ///
    /// # Safety
    ///
    /// The memory is readable and stays as it is until the request has ended or this is closed.
    pub(crate) unsafe fn isend(
        &self,
        data: *const u8,
        bytes: usize,
        tag: c_int,
    ) -> Result<*const Request, Fault> {
        let Flow::Send(flow) = &self.flow else {
            return Err(Fault::Misuse("isend", "this communicator receives"));
        };
        // SAFETY: the caller's.
        self.posted(unsafe { flow.post(data, bytes, tag as u32) })
    }

    /// Posts receives of a group, which has one buffer; null for "again later".
    ///
    /// # Safety
    ///
    /// The memory is writable and nobody else's until the request has ended or this is closed.
    pub(crate) unsafe fn irecv(&self, buffers: &[Buffer]) -> Result<*const Request, Fault> {
        let Flow::Recv(flow) = &self.flow else {
            return Err(Fault::Misuse("irecv", "this communicator sends"));
        };
        // SAFETY: the caller's.
        self.posted(unsafe { flow.post(buffers) })
    }

    fn posted(&self, posted: Result<Option<Slot>, FlowError>) -> Result<*const Request, Fault> {
        match self.watched(posted)? {
            None => Ok(null()),
            Some(slot) => {
                let request = &self.requests[slot.index()];
                request.slot.set(Some(slot));
                Ok(request)
            }
        }
    }

    /// Logs the flow's first error.
    fn watched<T>(&self, result: Result<T, FlowError>) -> Result<T, Fault> {
        result.map_err(|error| {
            if !self.is_failed.replace(true) {
                let call = match self.flow {
                    Flow::Send(_) => "send",
                    Flow::Recv(_) => "receive",
                };
                let (text, peer) = (error.to_string(), self.peer().to_string());
                // Most errors name the peer themselves.
                let with = if text.contains(&peer) { String::new() } else { format!(" ({peer})") };
                log::warn(&format!("{call}: {text}{with}"));
            }
            error.into()
        })
    }

    fn peer(&self) -> &uccl_flow::Peer {
        match &self.flow {
            Flow::Send(flow) => flow.peer(),
            Flow::Recv(flow) => flow.peer(),
        }
    }
}

impl Request {
    /// The bytes of a message that has ended; none before.
    ///
    /// # Safety
    ///
    /// The communicator is not closed.
    pub(crate) unsafe fn test(&self) -> Result<Option<usize>, Fault> {
        // SAFETY: it points to the communicator that this is a part of (`Comm::new`).
        let Some(comm) = (unsafe { self.comm.get().as_ref() }) else {
            return Err(Fault::Misuse("test", "the request is nobody's"));
        };
        let Some(slot) = self.slot.get() else {
            return Err(Fault::Misuse("test", "the request has ended"));
        };
        let tested = match &comm.flow {
            Flow::Send(flow) => flow.test(slot),
            Flow::Recv(flow) => flow.test(slot),
        };
        let done = comm.watched(tested)?;
        if done.is_some() {
            self.slot.set(None);
        }
        Ok(done)
    }
}

/// The registration of all memory: flows need none, and NCCL wants a pointer.
pub(crate) fn registration() -> *mut c_void {
    static MARK: u8 = 0;
    (&raw const MARK).cast_mut().cast()
}
