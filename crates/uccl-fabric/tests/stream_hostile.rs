//! A peer that keeps to no rules: raw bytes into the pipe of a lane.

mod support;

use fastrand::Rng;
use uccl_fabric::chaos::{ChaosEnd, Faults, pair};
use uccl_fabric::lane::{Lane, LaneError, OpError, OpKind};
use uccl_fabric::mem::{RemoteSpan, Span};
use uccl_fabric::pipe::{PipeRx, PipeTx};
use uccl_wire::frame::{Header, Kind, Status};

use support::{Done, Patch, Side};

/// A lane, and the raw end of its peer.
struct Stage {
    side: Side,
    peer: ChaosEnd,
}

fn stage(capacity_bytes: usize) -> Stage {
    let faults = Faults { capacity_bytes, ..Faults::default() };
    let (a, peer) = pair(0, faults).expect("a pair");
    Stage { side: Side::new(a, false), peer }
}

impl Stage {
    /// What the peer says, as far as there is room.
    fn say(&mut self, bytes: &[u8]) -> usize {
        let span = Span { addr: bytes.as_ptr() as usize, len: bytes.len() };
        // SAFETY: a slice that is borrowed meanwhile.
        unsafe { self.peer.1.send(&[span]) }.unwrap_or(0)
    }

    /// Reads what the lane has sent.
    fn hear(&mut self) -> Vec<u8> {
        let mut all = Vec::new();
        let mut some = vec![0u8; 64 << 10];
        let span = Span { addr: some.as_mut_ptr() as usize, len: some.len() };
        // SAFETY: a vector that is borrowed meanwhile.
        while let Ok(Some(got @ 1..)) = unsafe { self.peer.2.recv(&[span]) } {
            all.extend_from_slice(&some[..got]);
        }
        all
    }

    fn assert_violation(&self) {
        let error = self.side.progress().expect_err("a violation");
        assert!(matches!(error, LaneError::Protocol(_)), "{error}");
    }
}

/// Somewhere in the peer that does not exist.
fn elsewhere(len: u64) -> RemoteSpan {
    RemoteSpan { addr: 4096, len, key: 1, slot: 0 }
}

#[test]
fn an_ack_does_not_end_what_is_still_being_sent() {
    let mut rng = Rng::with_seed(1);
    for answer in [Status::Ok, Status::Cut, Status::Denied] {
        let mut stage = stage(1000);
        let source = Patch::new(&mut rng, &[100_000]);
        let done = Done::watching(source.whole());
        let remote = [elsewhere(100_000)].into_iter().collect();
        let name = stage.side.post(OpKind::Write, source.spans(), remote, &done).expect("alive");
        stage.say(&Header::bare(Kind::Ack, name.0, answer as u64).encode());
        stage.assert_violation();
        assert_eq!(done.result(), None, "its memory is still in use");
        stage.side.lane.kill();
        assert_eq!(done.result(), Some(Err(OpError::LaneDown)));
    }
}

#[test]
fn a_read_without_data_ends_with_the_lane() {
    let mut rng = Rng::with_seed(2);
    let mut stage = stage(100_000);
    let dest = Patch::new(&mut rng, &[100]);
    let done = Done::watching(dest.whole());
    let remote = [elsewhere(100)].into_iter().collect();
    let name = stage.side.post(OpKind::Read, dest.spans(), remote, &done).expect("alive");
    stage.say(&Header::bare(Kind::Ack, name.0, 0).encode());
    stage.assert_violation();
    stage.side.lane.kill();
    assert_eq!(done.result(), Some(Err(OpError::LaneDown)));
}
