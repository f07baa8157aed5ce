//! Copies between chunks of locked host memory and the memory of GPUs.

use std::sync::Arc;

use smallvec::SmallVec;
use uccl_device::{
    MemoryKind,
    cuda::{Direction, GpuError, gather::Piece},
};

use super::{Chunk, Slab};
use crate::{
    guarded::{self, UnmappedMemory},
    mem::{LocatedSpan, Span},
};

/// The copies that GPUs make for one half of a lane.
pub trait CopyQueue: Send {
    /// A chunk near a GPU, which is given by its ordinal.
    ///
    /// # Errors
    /// When there is no such GPU, or no more memory can be locked.
    fn chunk(&self, device: u32) -> Result<Chunk, GpuError>;

    /// Starts to copy pieces by a GPU. Returns the copy's name. With an error, the name stands for
    /// the pieces that were started before it; without a name, no copy runs.
    ///
    /// # Safety
    /// The memory must stay valid, and nobody else may use it, until the copy has ended.
    unsafe fn start(
        &mut self,
        device: u32,
        pieces: &[Piece],
        direction: Direction,
    ) -> (Option<usize>, Result<(), GpuError>);

    /// The result of a copy; `None` while it runs.
    fn ended(&mut self, copy: usize) -> Option<Result<(), GpuError>>;

    /// Forgets a copy that has ended. A later one may get its name.
    fn release(&mut self, copy: usize);
}

/// GPUs of one kind, as staging uses them.
pub trait CopyBackend: Send + Sync {
    /// A queue without copies, for one half of a lane.
    fn queue(&self) -> Box<dyn CopyQueue>;

    /// Contiguous chunks near a GPU, which is given by its ordinal.
    ///
    /// # Errors
    /// When there is no such GPU, or no more memory can be locked.
    fn slab(&self, device: u32, chunks: usize) -> Result<Slab, GpuError>;

    /// The ordinal of the GPU that copies memory of this kind to chunks; `None` if the CPU reaches
    /// it.
    fn copier_of(&self, kind: MemoryKind) -> Option<u32>;
}

/// The copier between a GPU's memory and the host memory that stages its bytes. The default is the
/// GPUs that CUDA's driver shows.
#[derive(Clone)]
pub struct CopyBy(Arc<dyn CopyBackend>);

impl CopyBy {
    /// Copies by these GPUs.
    pub fn of(backend: impl CopyBackend + 'static) -> Self {
        Self(Arc::new(backend))
    }

    /// As [`CopyBackend::slab`].
    ///
    /// # Errors
    /// As for [`CopyBackend::slab`].
    pub fn slab(&self, device: u32, chunks: usize) -> Result<Slab, GpuError> {
        self.0.slab(device, chunks)
    }

    /// As [`CopyBackend::copier_of`].
    pub fn copier_of(&self, kind: MemoryKind) -> Option<u32> {
        self.0.copier_of(kind)
    }
}

impl std::fmt::Debug for CopyBy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("CopyBy(..)")
    }
}

/// Starts copies, and reports their ends.
pub(super) struct Copier {
    queue: Box<dyn CopyQueue>,
    pieces: Vec<Piece>,
}

/// A copy that was started, with the chunk that it fills or empties.
pub(super) struct StagedCopy {
    chunk: Chunk,
    /// The parts of the copy, one on each GPU.
    parts: SmallVec<[usize; 1]>,
    /// The error that kept the copy, or a part of it, from starting.
    failed: Option<GpuError>,
    /// The slots of our regions that it accesses for the peer.
    slots: SmallVec<[u32; 4]>,
}

impl Copier {
    /// A copier that has made no copy yet.
    pub(super) fn new(by: &CopyBy) -> Self {
        Self { queue: by.0.queue(), pieces: Vec::new() }
    }

    /// A chunk near a GPU, which is given by its ordinal.
    ///
    /// # Errors
    /// When there is no such GPU, or no more memory can be locked.
    pub(super) fn chunk(&self, device: u32) -> Result<Chunk, GpuError> {
        self.queue.chunk(device)
    }

    /// Starts to copy between the first bytes of a chunk and pieces of memory, in their order. Host
    /// memory among the pieces is copied at once. A copy that cannot be started ends with the
    /// reason, once its started part has ended.
    ///
    /// # Safety
    /// The pieces together must fit the chunk. They must stay valid, and nobody else may use them,
    /// until the copy has ended; those in the regions of `slots`, while it [may
    /// touch](Self::may_touch) them. Host memory may have been unmapped.
    pub(super) unsafe fn start(
        &mut self,
        chunk: Chunk,
        memory: &[LocatedSpan],
        slots: impl IntoIterator<Item = u32>,
        direction: Direction,
    ) -> StagedCopy {
        // SAFETY: the caller's promise; the chunk is kept until the copy has ended.
        let (parts, started) = unsafe { self.start_parts(&chunk, memory, direction) };
        let mut slots: SmallVec<[u32; 4]> = slots.into_iter().collect();
        slots.dedup();
        StagedCopy { chunk, parts, failed: started.err(), slots }
    }

    /// # Safety
    /// As for [`Self::start`], and for the chunk.
    unsafe fn start_parts(
        &mut self,
        chunk: &Chunk,
        memory: &[LocatedSpan],
        direction: Direction,
    ) -> (SmallVec<[usize; 1]>, Result<(), GpuError>) {
        self.list(chunk, memory, direction, |device| device.is_none());
        for piece in &self.pieces {
            let (from, to) = (piece.source as *const u8, piece.destination as *mut u8);
            // SAFETY: the caller's promise; a chunk is nobody else's memory.
            let copied = unsafe { guarded::copy(from, to, piece.len_bytes as usize) };
            if let Err(UnmappedMemory) = copied {
                let doing = "copying host memory".to_owned();
                let reason = "it could not be touched although it is registered".to_owned();
                return (SmallVec::new(), Err(GpuError::System { doing, reason }));
            }
        }
        let mut devices: SmallVec<[u32; 1]> = memory.iter().filter_map(|at| at.device).collect();
        devices.sort_unstable();
        devices.dedup();
        let mut parts = SmallVec::new();
        let mut started = Ok(());
        for device in devices {
            self.list(chunk, memory, direction, |other| other == Some(device));
            // SAFETY: the caller's promise.
            let (part, result) = unsafe { self.queue.start(device, &self.pieces, direction) };
            parts.extend(part);
            started = result;
            if started.is_err() {
                break;
            }
        }
        (parts, started)
    }

    /// Lists the pieces on devices that `on` accepts; the device of host memory is `None`.
    fn list(
        &mut self,
        chunk: &Chunk,
        memory: &[LocatedSpan],
        direction: Direction,
        on: impl Fn(Option<u32>) -> bool,
    ) {
        self.pieces.clear();
        let mut host = chunk.addr() as u64;
        for LocatedSpan { span: Span { addr, len }, device } in memory {
            let (there, len_bytes) = (*addr as u64, *len as u64);
            if on(*device) {
                self.pieces.push(match direction {
                    Direction::DeviceToHost => {
                        Piece { destination: host, source: there, len_bytes }
                    }
                    _ => Piece { destination: there, source: host, len_bytes },
                });
            }
            host += len_bytes;
        }
    }

    /// The result of a copy; `None` while it runs.
    pub(super) fn ended(&mut self, copying: &StagedCopy) -> Option<Result<(), GpuError>> {
        let ended = all_ended(copying.parts.iter().map(|part| self.queue.ended(*part)))?;
        Some(copying.failed.clone().map_or(ended, Err))
    }

    /// Whether a copy may be accessing our region in this slot.
    pub(super) fn may_touch(&mut self, copying: &StagedCopy, slot: u32) -> bool {
        copying.slots.contains(&slot) && self.ended(copying).is_none()
    }

    /// Gives back the chunk of a copy that has ended.
    pub(super) fn release(&mut self, copying: StagedCopy) -> Chunk {
        copying.parts.iter().for_each(|part| self.queue.release(*part));
        copying.chunk
    }
}

/// The result of a copy over several GPUs, once all of them have ended: a GPU that still copies
/// uses the chunk and the regions, even if another GPU has failed. Returns the first error.
fn all_ended(
    ends: impl Iterator<Item = Option<Result<(), GpuError>>>,
) -> Option<Result<(), GpuError>> {
    let mut first = Ok(());
    for end in ends {
        match end? {
            Ok(()) => {}
            Err(e) => first = first.and(Err(e)),
        }
    }
    Some(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_over_several_gpus_ends_with_the_last_and_tells_the_first_error() {
        let failed = |ordinal| Some(Err(GpuError::NoSuchDevice { ordinal, count: 0 }));
        let done = Some(Ok(()));
        let ended = |ends: &[Option<Result<(), GpuError>>]| all_ended(ends.iter().cloned());
        assert_eq!(ended(&[done.clone(), None]), None);
        assert_eq!(ended(&[failed(1), None]), None, "the other GPU still copies");
        assert_eq!(ended(&[failed(1), done.clone(), failed(2)]), failed(1));
        assert_eq!(ended(&[done.clone(), done.clone()]), done);
    }
}
