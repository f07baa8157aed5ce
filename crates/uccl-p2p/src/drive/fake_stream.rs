//! A stream without a peer, for tests: operations end when a test says so.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
};

use parking_lot::Mutex;
use uccl_device::MemoryKind;
use uccl_fabric::{
    clock,
    lane::{
        Caps, Interest, Lane, LaneError, MessageLane, MessageSink, OpName, OpResult, Operation,
        PostOutcome,
    },
    mem::RemoteSpan,
    signal::Word,
};

use super::{
    core::connection::{Connection, Peer},
    links::Links,
    park::Parker,
};
use crate::{ConnId, Endpoint};

/// The instance of the peer that there is not.
pub(crate) const INSTANCE: u32 = 1;

/// A stream without a peer.
pub(crate) struct FakeStream {
    bell: Parker,
    /// The operations that have not ended, in the order in which they were posted.
    pub(crate) ops: Mutex<VecDeque<Operation>>,
    pub(crate) posts: AtomicU32,
    /// The look that ends the oldest operation, counted down, and how that ends.
    looks_left: AtomicU32,
    result: OpResult,
}

impl FakeStream {
    /// Adds a connection over one such stream to an endpoint. No worker looks at it. The look of
    /// this number ends the first operation with this result; zero: no look does.
    pub(crate) fn connect(endpoint: &Endpoint, look: u32, result: OpResult) -> (Arc<Self>, ConnId) {
        let bell = Parker::new().expect("a descriptor");
        let (ops, posts, looks_left) = (Mutex::default(), 0.into(), look.into());
        let lane = Arc::new(Self { bell, ops, posts, looks_left, result });
        let peer = Peer {
            name: "a peer".into(),
            addr: endpoint.addr(),
            gpu_index: 0,
            instance: INSTANCE.into(),
            same_host: false,
            takes_signals: false,
            publishes: false,
        };
        let links = Links { streams: vec![Arc::clone(&lane) as _], host: None, rails: None };
        let core = endpoint.core();
        let make = |id| Arc::new(Connection::new(id, Arc::clone(core), peer, links));
        let conn = core.add_conn(make).expect("a connection").id;
        (lane, conn)
    }

    /// Ends the oldest operation. False if there is none.
    pub(crate) fn end_oldest(&self, result: OpResult) -> bool {
        let oldest = self.ops.lock().pop_front();
        let is_there = oldest.is_some();
        if let Some(op) = oldest {
            op.done.complete(result);
        }
        is_there
    }
}

impl Lane for FakeStream {
    fn caps(&self) -> Caps {
        Caps {
            link: "fake",
            ordered: true,
            delivery_complete: true,
            remote_atomics: false,
            messages: true,
            checksum: true,
            by_device: false,
            max_pieces: 64,
            max_gpu_pieces: 64,
            max_message: 1 << 16,
        }
    }

    unsafe fn post(&self, op: Operation) -> Result<PostOutcome, LaneError> {
        let name = self.posts.fetch_add(1, SeqCst);
        self.ops.lock().push_back(op);
        Ok(PostOutcome::Pending(OpName(name.into())))
    }

    fn progress(&self, _: &dyn MessageSink) -> Result<bool, LaneError> {
        let left = self.looks_left.load(SeqCst);
        self.looks_left.store(left.saturating_sub(1), SeqCst);
        Ok(left == 1 && self.end_oldest(self.result.clone()))
    }

    fn cancel(&self, _: OpName) {}

    fn load(&self) -> u64 {
        self.ops.lock().len() as u64
    }

    fn has_work(&self) -> bool {
        false
    }

    fn touched_by_peer(&self, _: u32) -> bool {
        false
    }

    /// A caller that waits looks again and does not sleep.
    fn arm(&self) -> bool {
        false
    }

    fn interest(&self) -> Interest<'_> {
        Interest { fd: self.bell.fd(), write: false, end: None }
    }

    fn kill(&self) {}
}

impl MessageLane for FakeStream {
    fn send(&self, _: &[&[u8]]) -> Result<(), LaneError> {
        Ok(())
    }

    fn carries_signal(&self, _: MemoryKind, _: &[RemoteSpan]) -> bool {
        false
    }

    unsafe fn post_signalled(&self, _: Operation, _: Word) -> Result<PostOutcome, LaneError> {
        Err(LaneError::Killed)
    }

    fn queued_bytes(&self) -> usize {
        0
    }

    fn last_heard_ms(&self) -> u64 {
        clock::coarse_ms()
    }

    fn ping(&self) -> Result<(), LaneError> {
        Ok(())
    }

    fn bye(&self) {}
}
