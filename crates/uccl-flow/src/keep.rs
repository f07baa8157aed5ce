//! The way to the thread that keeps flows' own streams alive.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use parking_lot::Mutex;

use crate::{
    bell::Waker,
    bundle::Bundle,
    outlet::{FlowName, SendState},
};

/// A sending flow.
pub(crate) struct KeptFlow {
    pub(crate) state: Arc<Mutex<SendState>>,
    pub(crate) bundle: Arc<Bundle>,
    pub(crate) name: FlowName,
}

/// The way to the thread.
pub(crate) struct KeeperPort {
    pub(crate) waker: Waker,
    arrivals: Mutex<Vec<KeptFlow>>,
    is_stopped: AtomicBool,
}

impl KeeperPort {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            waker: Waker::new()?,
            arrivals: Mutex::default(),
            is_stopped: AtomicBool::new(false),
        })
    }

    /// The thread keeps a flow until it is closed and the peer has its messages.
    pub(crate) fn add(&self, flow: KeptFlow) {
        self.arrivals.lock().push(flow);
        self.waker.wake();
    }

    /// The thread looks at its flows now.
    pub(crate) fn look(&self) {
        self.waker.wake();
    }

    /// The thread ends soon. All flows are closed.
    pub(crate) fn stop(&self) {
        self.is_stopped.store(true, Ordering::Release);
        self.waker.wake();
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::Acquire)
    }

    /// Flows that have come.
    pub(crate) fn take(&self) -> Vec<KeptFlow> {
        std::mem::take(&mut self.arrivals.lock())
    }
}
