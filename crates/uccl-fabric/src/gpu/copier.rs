//! Copies between chunks of locked host memory and the memory of GPUs.

use std::{fmt, sync::Arc};

use smallvec::SmallVec;
use uccl_device::cuda::{Direction, GpuError, Gpus, Priority, gather::Piece};

use super::{Chunk, Engine, Mark, Route};
use crate::{
    guarded::{self, Unmapped},
    mem::{Located, Span},
};

/// A substitute for GPUs, which copies host memory in the place of device memory.
pub trait StandIn: Send {
    /// Starts a copy and returns its identifier.
    ///
    /// # Safety
    /// The memory must stay valid, and nobody else may use it, until the copy has ended.
    unsafe fn start(&mut self, pieces: &[Piece]) -> u64;

    /// The result of a copy; `None` while it runs.
    fn ended(&mut self, name: u64) -> Option<Result<(), GpuError>>;
}

/// The copier between a GPU's memory and the host memory that stages its bytes.
#[derive(Clone, Default)]
pub enum CopyBy {
    /// The GPUs.
    #[default]
    Gpus,
    /// A substitute; the function makes one for each half of a lane.
    StandIn(Arc<dyn Fn() -> Box<dyn StandIn> + Send + Sync>),
}

impl fmt::Debug for CopyBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gpus => "Gpus",
            Self::StandIn(_) => "StandIn",
        })
    }
}

/// Starts copies, and reports their ends.
pub(super) struct Copier {
    by: By,
    pieces: Vec<Piece>,
}

enum By {
    Gpus(Vec<Engine>),
    StandIn(Box<dyn StandIn>),
}

/// A copy that was started, with the chunk that it fills or empties.
pub(super) struct Copying {
    chunk: Chunk,
    moving: Moving,
    /// The error that kept the copy, or a part of it, from starting.
    failed: Option<GpuError>,
    /// The slots of our regions that it accesses for the peer.
    slots: SmallVec<[u32; 4]>,
}

enum Moving {
    /// On these GPUs, each with the mark of its end.
    Gpus(SmallVec<[(u32, Mark); 1]>),
    StandIn(u64),
}

impl Copier {
    /// A copier that has made no copy yet.
    pub(super) fn new(by: &CopyBy) -> Self {
        let by = match by {
            CopyBy::Gpus => By::Gpus(Vec::new()),
            CopyBy::StandIn(make) => By::StandIn(make()),
        };
        Self { by, pieces: Vec::new() }
    }

    /// A chunk near a GPU, which is given by its ordinal.
    ///
    /// # Errors
    /// When there is no such GPU, or no more memory can be locked.
    pub(super) fn chunk(&self, device: u32) -> Result<Chunk, GpuError> {
        match &self.by {
            By::Gpus(_) => Chunk::near(device),
            By::StandIn(_) => Ok(Chunk::plain()),
        }
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
        memory: &[Located],
        slots: impl IntoIterator<Item = u32>,
        direction: Direction,
    ) -> Copying {
        // SAFETY: the caller's promise; the chunk is kept until the copy has ended.
        let (moving, started) = unsafe { self.start_moving(&chunk, memory, direction) };
        let mut slots: SmallVec<[u32; 4]> = slots.into_iter().collect();
        slots.dedup();
        Copying { chunk, moving, failed: started.err(), slots }
    }

    /// # Safety
    /// As for [`Self::start`], and for the chunk.
    unsafe fn start_moving(
        &mut self,
        chunk: &Chunk,
        memory: &[Located],
        direction: Direction,
    ) -> (Moving, Result<(), GpuError>) {
        self.list(chunk, memory, direction, |device| device.is_none());
        for piece in &self.pieces {
            let (from, to) = (piece.source as *const u8, piece.destination as *mut u8);
            // SAFETY: the caller's promise; a chunk is nobody else's memory.
            if let Err(Unmapped) = unsafe { guarded::copy(from, to, piece.len_bytes as usize) } {
                let doing = "copying host memory".to_owned();
                let reason = "it could not be touched although it is registered".to_owned();
                return (Moving::Gpus(SmallVec::new()), Err(GpuError::System { doing, reason }));
            }
        }
        if let By::StandIn(_) = self.by {
            self.list(chunk, memory, direction, |device| device.is_some());
        }
        if let By::StandIn(copies) = &mut self.by {
            // SAFETY: the caller's promise.
            return (Moving::StandIn(unsafe { copies.start(&self.pieces) }), Ok(()));
        }
        let mut devices: SmallVec<[u32; 1]> = memory.iter().filter_map(|at| at.device).collect();
        devices.sort_unstable();
        devices.dedup();
        let mut marks = SmallVec::new();
        let mut started = Ok(());
        for device in devices {
            self.list(chunk, memory, direction, |other| other == Some(device));
            // SAFETY: the caller's promise.
            let (mark, result) = unsafe { self.start_on(device, direction) };
            marks.extend(mark.map(|mark| (device, mark)));
            started = result;
            if started.is_err() {
                break;
            }
        }
        (Moving::Gpus(marks), started)
    }

    /// Makes a GPU copy the listed pieces. After an error, the mark shows the end of the copies
    /// that were enqueued before it; without a mark, no copy runs.
    ///
    /// # Safety
    /// As for [`Self::start`].
    unsafe fn start_on(
        &mut self,
        device: u32,
        direction: Direction,
    ) -> (Option<Mark>, Result<(), GpuError>) {
        let Self { by: By::Gpus(engines), pieces } = self else {
            return (None, Err(GpuError::NoSuchDevice { ordinal: device, count: 0 }));
        };
        let engine = match engine_of(engines, device) {
            Ok(engine) => engine,
            Err(e) => return (None, Err(e)),
        };
        let route = Route {
            direction,
            by_kernel: true,
            is_push: false,
            engines_are_busy: false,
            word: None,
            blocks: 0,
        };
        // SAFETY: the caller's promise.
        match unsafe { engine.copy(pieces, route) } {
            Ok(mark) => (Some(mark), Ok(())),
            Err(e) => {
                let begun = engine.fence();
                if begun.is_err() {
                    engine.settle();
                }
                (begun.ok(), Err(e))
            }
        }
    }

    /// Lists the pieces on devices that `on` accepts; the device of host memory is `None`.
    fn list(
        &mut self,
        chunk: &Chunk,
        memory: &[Located],
        direction: Direction,
        on: impl Fn(Option<u32>) -> bool,
    ) {
        self.pieces.clear();
        let mut host = chunk.addr() as u64;
        for Located { span: Span { addr, len }, device } in memory {
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
    pub(super) fn ended(&mut self, copying: &Copying) -> Option<Result<(), GpuError>> {
        let ended = match (&copying.moving, &mut self.by) {
            (Moving::Gpus(marks), _) => all_ended(marks.iter().map(|(_, mark)| mark.is_done())),
            (Moving::StandIn(name), By::StandIn(copies)) => copies.ended(*name),
            (Moving::StandIn(_), By::Gpus(_)) => Some(Ok(())),
        }?;
        Some(copying.failed.clone().map_or(ended, Err))
    }

    /// Whether a copy may be accessing our region in this slot.
    pub(super) fn may_touch(&mut self, copying: &Copying, slot: u32) -> bool {
        copying.slots.contains(&slot) && self.ended(copying).is_none()
    }

    /// Gives back the chunk of a copy that has ended.
    pub(super) fn release(&mut self, copying: Copying) -> Chunk {
        if let (Moving::Gpus(marks), By::Gpus(engines)) = (copying.moving, &mut self.by) {
            for (device, mark) in marks {
                if let Some(engine) = engines.iter_mut().find(|engine| engine.device() == device) {
                    engine.reuse(mark);
                }
            }
        }
        copying.chunk
    }
}

/// The result of a copy over several GPUs, once all of them have ended: a GPU that still copies
/// uses the chunk and the regions, even if another GPU has failed. Returns the first error.
fn all_ended(ends: impl Iterator<Item = Result<bool, GpuError>>) -> Option<Result<(), GpuError>> {
    let mut told = Ok(());
    for end in ends {
        match end {
            Ok(true) => {}
            Ok(false) => return None,
            Err(e) => told = told.and(Err(e)),
        }
    }
    Some(told)
}

fn engine_of(engines: &mut Vec<Engine>, device: u32) -> Result<&mut Engine, GpuError> {
    let at = match engines.iter().position(|engine| engine.device() == device) {
        Some(at) => at,
        None => {
            let context = Gpus::get().device(device)?.context()?;
            engines.push(Engine::new(context, Priority::High)?);
            engines.len() - 1
        }
    };
    Ok(&mut engines[at])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_over_several_gpus_ends_with_the_last_and_tells_the_first_error() {
        let failed = |ordinal| Err(GpuError::NoSuchDevice { ordinal, count: 0 });
        let ended = |ends: &[Result<bool, GpuError>]| all_ended(ends.iter().cloned());
        assert_eq!(ended(&[Ok(true), Ok(false)]), None);
        assert_eq!(ended(&[failed(1), Ok(false)]), None, "the other GPU still copies");
        assert_eq!(ended(&[failed(1), Ok(true), failed(2)]), Some(Err(failed(1).unwrap_err())));
        assert_eq!(ended(&[Ok(true), Ok(true)]), Some(Ok(())));
    }
}
