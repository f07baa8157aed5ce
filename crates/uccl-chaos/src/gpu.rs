//! Copies of a simulated GPU: they happen late, and fail on demand.

use std::{collections::VecDeque, ptr, sync::Arc};

use uccl_device::cuda::{GpuError, gather::Piece};
use uccl_fabric::gpu::{CopyBy, StandIn};

/// Faults of copies between host memory and a simulated GPU's. The default copies at the first
/// poll.
#[derive(Clone, Default, Debug)]
pub struct GpuFaults {
    /// A copy happens after a random number of polls, at most this.
    pub delay_polls: u32,
    /// This copy, counted from 0, fails; later ones do not.
    pub fail_at: Option<u64>,
    /// Seed of the random choices.
    pub seed: u64,
}

impl From<GpuFaults> for CopyBy {
    fn from(faults: GpuFaults) -> Self {
        Self::StandIn(Arc::new(move || Box::new(FakeCopies::new(&faults))))
    }
}

/// A stream of copies that happen one after the other.
struct FakeCopies {
    faults: GpuFaults,
    rng: fastrand::Rng,
    waiting: VecDeque<(u32, Vec<Piece>)>,
    started: u64,
    failed: Option<u64>,
}

impl FakeCopies {
    fn new(faults: &GpuFaults) -> Self {
        let rng = fastrand::Rng::with_seed(faults.seed);
        let (faults, waiting) = (faults.clone(), VecDeque::new());
        Self { faults, rng, waiting, started: 0, failed: None }
    }

    fn copy_first(&mut self) {
        let name = self.started - self.waiting.len() as u64;
        let Some((_, pieces)) = self.waiting.pop_front() else { return };
        if self.faults.fail_at == Some(name) {
            self.failed = Some(name);
            return;
        }
        for piece in pieces {
            let (from, to) = (piece.source as *const u8, piece.destination as *mut u8);
            // SAFETY: the caller of `start` promised that the memory lives until the copy has
            // ended.
            unsafe { ptr::copy_nonoverlapping(from, to, piece.len_bytes as usize) };
        }
    }
}

impl StandIn for FakeCopies {
    /// Queues a copy and returns its name for [`Self::ended`].
    unsafe fn start(&mut self, pieces: &[Piece]) -> u64 {
        let delay = self.rng.u32(..=self.faults.delay_polls);
        self.waiting.push_back((delay, pieces.to_vec()));
        self.started += 1;
        self.started - 1
    }

    /// The result of a copy, if it has ended.
    fn ended(&mut self, name: u64) -> Option<Result<(), GpuError>> {
        while let Some((delay, _)) = self.waiting.front_mut() {
            if *delay > 0 {
                *delay -= 1;
                break;
            }
            self.copy_first();
        }
        let has_ended = name < self.started - self.waiting.len() as u64;
        let reason = || GpuError::Unavailable { reason: "chaos".to_owned() };
        has_ended.then(|| if self.failed == Some(name) { Err(reason()) } else { Ok(()) })
    }
}
