//! Lanes over shared memory for tests that make both ends, or one.
#![allow(dead_code, reason = "no test file uses all of it")]

use std::{os::unix::net::UnixStream, sync::Arc, thread, time::Duration};

use parking_lot::Mutex;
use uccl_chaos::patiently;
use uccl_device::{MemoryKind, Process};
use uccl_fabric::{
    lane::{
        Completion, Handling, Lane, MessageSink, OpKind, OpName, OpResult, Operation, PostOutcome,
    },
    mem::{RemoteSpan, Span},
    region::RegionTable,
};
use uccl_local as local;
use uccl_local::{
    LocalLane, Setup,
    fdpass::{FdSocket, Message},
};

/// How long a test waits for something before it fails.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Takes any message.
pub(crate) struct Anything;

impl MessageSink for Anything {
    fn message(&self, _: &[u8]) -> Result<Handling, String> {
        Ok(Handling::Ended)
    }

    fn go_on(&self) -> Handling {
        Handling::Ended
    }

    fn signalled(&self) {}
}

/// How an operation ended.
#[derive(Default)]
pub(crate) struct End(Mutex<Option<OpResult>>);

impl End {
    pub(crate) fn result(&self) -> Option<OpResult> {
        self.0.lock().clone()
    }
}

impl Completion for End {
    fn complete(self: Arc<Self>, result: OpResult) {
        assert!(self.0.lock().replace(result).is_none(), "an operation ends once");
    }
}

pub(crate) fn span_of(bytes: &[u8]) -> Span {
    Span { addr: bytes.as_ptr() as usize, len: bytes.len() }
}

pub(crate) fn next(socket: &mut FdSocket) -> Message {
    patiently(|| socket.recv().expect("the other end"))
}

pub(crate) fn setup(regions: &Arc<RegionTable>, process: Option<Process>) -> Setup {
    Setup { regions: Arc::clone(regions), process, checksum: false }
}

/// Makes the end of a lane that invites the other.
pub(crate) fn invite(mut socket: FdSocket, setup: Setup) -> LocalLane {
    let invitation = local::invite(&mut socket, 7, &setup.regions).expect("an invitation");
    let answer = next(&mut socket);
    invitation.accepted(socket, answer, setup).expect("a lane")
}

/// Makes the end that is invited.
pub(crate) fn accept(mut socket: FdSocket, setup: Setup) -> LocalLane {
    let invitation = next(&mut socket);
    local::accept(socket, invitation, setup).expect("a lane")
}

/// Both ends of a lane without direct access to private memory.
pub(crate) fn lanes(ours: &Arc<RegionTable>, theirs: &Arc<RegionTable>) -> (LocalLane, LocalLane) {
    let (one, other) = UnixStream::pair().expect("a pair of sockets");
    let [one, other] = [one, other].map(|end| FdSocket::new(end).expect("a socket"));
    thread::scope(|scope| {
        let accepted = scope.spawn(|| accept(other, setup(theirs, None)));
        (invite(one, setup(ours, None)), accepted.join().expect("a lane"))
    })
}

/// Posts an operation on one piece.
///
/// # Safety
/// The local memory must stay until the operation has ended, or the lane has been killed.
pub(crate) unsafe fn post(
    lane: &LocalLane,
    kind: OpKind,
    local: Span,
    remote: RemoteSpan,
) -> (Arc<End>, Option<OpName>) {
    let end = Arc::new(End::default());
    let done = Arc::clone(&end) as Arc<dyn Completion>;
    let op = Operation {
        kind,
        local: [local].into(),
        memory: MemoryKind::Host,
        remote: [remote].into(),
        done,
    };
    // SAFETY: the caller's promise.
    let name = match unsafe { lane.post(op) } {
        Ok(PostOutcome::Pending(name)) => Some(name),
        Ok(PostOutcome::Done(result)) => {
            Arc::clone(&end).complete(result);
            None
        }
        Err(_) => {
            Arc::clone(&end).complete(Err(uccl_fabric::lane::OpError::LaneDown));
            None
        }
    };
    (end, name)
}

/// Carries out an operation on one piece, with progress on these lanes.
pub(crate) fn carry(
    lanes: &[&LocalLane],
    kind: OpKind,
    local: Span,
    remote: RemoteSpan,
) -> OpResult {
    // SAFETY: the caller keeps the memory during the call.
    let (end, _) = unsafe { post(lanes[0], kind, local, remote) };
    patiently(|| {
        lanes.iter().for_each(|lane| {
            lane.progress(&Anything).expect("a living lane");
        });
        end.result()
    })
}
