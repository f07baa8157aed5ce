//! A lane with raw bytes for a peer.

use uccl_chaos::{ChaosEnd, Faults, GpuFaults, pair};
use uccl_fabric::lane::LaneError;
use uccl_fabric::mem::Span;
use uccl_fabric::pipe::{PipeRx, PipeTx};

use super::Side;

/// A lane, and the raw end of its peer.
pub(crate) struct Stage {
    pub(crate) side: Side,
    pub(crate) peer: ChaosEnd,
}

pub(crate) fn stage(capacity_bytes: usize) -> Stage {
    stage_with_gpu(capacity_bytes, GpuFaults::default())
}

/// With copies to and from GPUs that have these faults.
pub(crate) fn stage_with_gpu(capacity_bytes: usize, gpu: GpuFaults) -> Stage {
    let faults = Faults { capacity_bytes, ..Faults::default() };
    let (a, peer) = pair(0, faults).expect("a pair");
    Stage { side: Side::new(a, false, gpu), peer }
}

impl Stage {
    /// Sends bytes of the peer, as far as there is room.
    pub(crate) fn say(&mut self, bytes: &[u8]) -> usize {
        let span = Span { addr: bytes.as_ptr() as usize, len: bytes.len() };
        // SAFETY: a slice that is borrowed meanwhile.
        unsafe { self.peer.1.send(&[span]) }.unwrap_or(0)
    }

    /// Reads the bytes that the lane has sent.
    pub(crate) fn hear(&mut self) -> Vec<u8> {
        let mut all = Vec::new();
        let mut some = vec![0u8; 64 << 10];
        let span = Span { addr: some.as_mut_ptr() as usize, len: some.len() };
        // SAFETY: a vector that is borrowed meanwhile.
        while let Ok(Some(got @ 1..)) = unsafe { self.peer.2.recv(&[span]) } {
            all.extend_from_slice(&some[..got]);
        }
        all
    }

    pub(crate) fn assert_violation(&self) {
        let error = self.side.progress().expect_err("a violation");
        assert!(matches!(error, LaneError::Protocol(_)), "{error}");
    }
}
