//! Copies of a simulated GPU: they happen late, and fail on demand.

use std::{collections::VecDeque, ptr};

use uccl_device::{
    MemoryKind,
    cuda::{Direction, GpuError, gather::Piece},
};
use uccl_fabric::gpu::{Chunk, CopyBackend, CopyBy, CopyQueue, Slab};

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
        Self::of(faults)
    }
}

/// Host memory takes the place of a GPU's.
impl CopyBackend for GpuFaults {
    fn queue(&self) -> Box<dyn CopyQueue> {
        Box::new(FakeCopies::new(self))
    }

    fn slab(&self, _device: u32, chunks: usize) -> Result<Slab, GpuError> {
        Ok(Slab::plain(chunks))
    }

    fn copier_of(&self, _kind: MemoryKind) -> Option<u32> {
        Some(0)
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

impl CopyQueue for FakeCopies {
    fn chunk(&self, _device: u32) -> Result<Chunk, GpuError> {
        Ok(Chunk::plain())
    }

    unsafe fn start(
        &mut self,
        _device: u32,
        pieces: &[Piece],
        _direction: Direction,
    ) -> (Option<usize>, Result<(), GpuError>) {
        let delay = self.rng.u32(..=self.faults.delay_polls);
        self.waiting.push_back((delay, pieces.to_vec()));
        self.started += 1;
        (Some(self.started as usize - 1), Ok(()))
    }

    fn ended(&mut self, name: usize) -> Option<Result<(), GpuError>> {
        while let Some((delay, _)) = self.waiting.front_mut() {
            if *delay > 0 {
                *delay -= 1;
                break;
            }
            self.copy_first();
        }
        let name = name as u64;
        let has_ended = name < self.started - self.waiting.len() as u64;
        let reason = || GpuError::Unavailable { reason: "chaos".to_owned() };
        has_ended.then(|| if self.failed == Some(name) { Err(reason()) } else { Ok(()) })
    }

    fn release(&mut self, _name: usize) {}
}
