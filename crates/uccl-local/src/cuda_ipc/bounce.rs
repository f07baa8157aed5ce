//! Copies between a GPU's memory and host memory that no GPU reaches: through locked host memory.

use parking_lot::Mutex;
use uccl_device::cuda::{Direction, GpuError};
use uccl_fabric::{
    gpu::{CHUNK, Chunk, CopyBy, PATIENCE, Staging},
    lane::{OpError, OpResult},
    mem::{Access, LocatedSpan, Span},
};

/// The staging with which one thread copies to or from one GPU.
struct Bouncer {
    device: u32,
    access: Access,
    staging: Staging<()>,
    /// A buffer for lists of memory.
    memory: Vec<LocatedSpan>,
}

/// Unused bouncers. As many exist as threads have ever copied at once.
#[derive(Default)]
pub(crate) struct Bouncers {
    by: CopyBy,
    spare: Mutex<Vec<Bouncer>>,
}

impl Bouncers {
    /// Copies between `local`, a GPU's memory of at most [`CHUNK`] bytes in all, and other memory,
    /// through host memory. `there` copies between that host memory and the other memory.
    ///
    /// # Safety
    /// The local memory must be valid during the call, and nobody else may touch it.
    pub(crate) unsafe fn copy(
        &self,
        device: u32,
        access: Access,
        local: &[Span],
        there: impl FnOnce(Span) -> OpResult,
    ) -> OpResult {
        let len = local.iter().map(|span| span.len).sum();
        if len > CHUNK {
            return Err(OpError::HostOnly("a part is longer than a chunk"));
        }
        let mut bouncer = self.take(device, access);
        let chunk = bouncer.staging.chunk(device)?;
        let host = Span { addr: chunk.addr(), len };
        // SAFETY: the caller's promise.
        let mut by_gpu = |chunk| unsafe { bouncer.move_all(chunk, local) }.map_err(OpError::from);
        let result = match access {
            Access::Read => there(host).and_then(|()| by_gpu(chunk).map(drop)),
            // The chunk is kept until its bytes are there.
            Access::Write => by_gpu(chunk).and_then(|_chunk| there(host)),
        };
        if bouncer.staging.is_idle() {
            self.spare.lock().push(bouncer);
        }
        result
    }

    fn take(&self, device: u32, access: Access) -> Bouncer {
        let mut spare = self.spare.lock();
        let fits = |other: &Bouncer| other.device == device && other.access == access;
        if let Some(at) = spare.iter().position(fits) {
            return spare.swap_remove(at);
        }
        let direction = match access {
            Access::Read => Direction::HostToDevice,
            Access::Write => Direction::DeviceToHost,
        };
        let staging = Staging::new(&self.by, direction);
        Bouncer { device, access, staging, memory: Vec::new() }
    }
}

impl Bouncer {
    /// Copies pieces of GPU memory to or from a chunk, and waits. Returns the chunk.
    ///
    /// # Errors
    /// The GPU's error, or one about a copy that does not end; the chunk is kept for such a copy.
    ///
    /// # Safety
    /// The pieces are memory of this GPU, or of one that it reaches, and together fit the chunk.
    unsafe fn move_all(
        &mut self,
        chunk: Chunk,
        pieces: &[Span],
    ) -> Result<Option<Chunk>, GpuError> {
        let device = Some(self.device);
        self.memory.clear();
        self.memory.extend(pieces.iter().map(|span| LocatedSpan { span: *span, device }));
        // SAFETY: the caller's promise.
        unsafe { self.staging.start((), chunk, &self.memory, []) };
        self.staging.settle(PATIENCE)?;
        self.staging.ended().map_or(Ok(None), |ended| ended.result)
    }
}

#[cfg(test)]
mod tests {
    use uccl_chaos::GpuFaults;
    use uccl_device::cuda::GpuError;

    use super::*;

    fn bouncers(fail_at: Option<u64>) -> Bouncers {
        let by = CopyBy::from(GpuFaults { delay_polls: 5, fail_at, seed: 1 });
        Bouncers { by, spare: Mutex::default() }
    }

    /// Copies two pieces of memory in the place of a GPU's, and calls `there` with the host memory
    /// between.
    fn bounce(
        bouncers: &Bouncers,
        access: Access,
        memory: &mut [u8; 6],
        there: impl FnOnce(&mut [u8]) -> OpResult,
    ) -> OpResult {
        let at = memory.as_mut_ptr() as usize;
        let pieces = [Span { addr: at + 4, len: 2 }, Span { addr: at, len: 4 }];
        let there = |host: Span| {
            // SAFETY: the bouncer's chunk, which no copy uses meanwhile.
            there(unsafe { std::slice::from_raw_parts_mut(host.addr as *mut u8, host.len) })
        };
        // SAFETY: the memory is borrowed for the call.
        unsafe { bouncers.copy(0, access, &pieces, there) }
    }

    #[test]
    fn bytes_bounce_both_ways_in_the_order_of_their_pieces() {
        let bouncers = bouncers(None);
        let mut memory = [1, 2, 3, 4, 5, 6];
        for _ in 0..3 {
            memory = [1, 2, 3, 4, 5, 6];
            let seen = bounce(&bouncers, Access::Write, &mut memory, |host| {
                assert_eq!(host, [5, 6, 1, 2, 3, 4]);
                Ok(())
            });
            assert_eq!(seen, Ok(()));
            let filled = bounce(&bouncers, Access::Read, &mut memory, |host| {
                host.copy_from_slice(&[9, 8, 7, 6, 5, 4]);
                Ok(())
            });
            assert_eq!(filled, Ok(()));
            assert_eq!(std::hint::black_box(&mut memory), &[7, 6, 5, 4, 9, 8]);
        }
        assert_eq!(bouncers.spare.lock().len(), 2, "one for each direction is used again");
        let there = |_: &mut [u8]| Err(OpError::LocalFault);
        assert_eq!(bounce(&bouncers, Access::Read, &mut memory, there), Err(OpError::LocalFault));
        assert_eq!(memory, [7, 6, 5, 4, 9, 8]);
    }

    #[test]
    fn a_failed_copy_tells_the_gpus_reason_and_the_next_one_works() {
        let bouncers = bouncers(Some(0));
        let mut memory = [1; 6];
        let failed = bounce(&bouncers, Access::Write, &mut memory, |_| panic!("no bytes came"));
        assert!(
            matches!(&failed, Err(OpError::Gpu(e)) if matches!(**e, GpuError::Unavailable { .. })),
            "{failed:?}"
        );
        assert_eq!(bounce(&bouncers, Access::Write, &mut memory, |_| Ok(())), Ok(()));
    }
}
