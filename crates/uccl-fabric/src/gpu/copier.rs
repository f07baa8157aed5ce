//! Copies between chunks of locked host memory and the memory of GPUs.

use smallvec::SmallVec;
use uccl_device::cuda::{Direction, Event, GpuError, Gpus, Priority, gather::Piece};

use super::{Chunk, Engine, Route};
use crate::{
    chaos::{FakeCopies, GpuFaults},
    mem::{Located, Span},
};

/// Who copies between a GPU's memory and the host memory that its bytes pass through.
#[derive(Clone, Default, Debug)]
pub enum CopyBy {
    /// The GPUs.
    #[default]
    Gpus,
    /// The CPU, as late as told; what is called device memory is the host's.
    Chaos(GpuFaults),
}

/// What one half of a lane copies with. Copies of one direction end in the order in which they were started.
pub(crate) struct Copier {
    by: By,
    pieces: Vec<Piece>,
}

enum By {
    Gpus(Vec<Engine>),
    Chaos(FakeCopies),
}

/// A copy that was started, and the chunk that it fills or empties.
pub(crate) struct Copying {
    chunk: Chunk,
    moving: Moving,
    /// Regions of ours that it touches for the peer.
    slots: SmallVec<[u32; 4]>,
}

enum Moving {
    /// On these GPUs, each with the event of its end.
    Gpus(SmallVec<[(u32, Event); 1]>),
    Chaos(u64),
}

impl Copier {
    pub(crate) fn new(by: &CopyBy) -> Self {
        let by = match by {
            CopyBy::Gpus => By::Gpus(Vec::new()),
            CopyBy::Chaos(faults) => By::Chaos(FakeCopies::new(faults)),
        };
        Self { by, pieces: Vec::new() }
    }

    /// A chunk near a GPU.
    ///
    /// # Errors
    /// When there is no such GPU, or no more memory can be locked.
    pub(crate) fn chunk(&self, device: u32) -> Result<Chunk, GpuError> {
        match &self.by {
            By::Gpus(_) => Chunk::near(device),
            By::Chaos(_) => Ok(Chunk::plain()),
        }
    }

    /// Starts to copy between a chunk's first bytes and pieces of memory, one behind the other; what is the
    /// host's among these is copied at once. After an error nothing moves any more.
    ///
    /// # Safety
    /// The pieces together fit the chunk. They must be there, and nobody else may use them, until the copy has
    /// ended: the regions of `slots` while it [may touch](Self::may_touch) them.
    pub(crate) unsafe fn start(
        &mut self,
        chunk: Chunk,
        memory: &[Located],
        slots: impl IntoIterator<Item = u32>,
        direction: Direction,
    ) -> Result<Copying, GpuError> {
        // SAFETY: the caller's promise; the chunk is kept until the copy has ended.
        let moving = unsafe { self.start_moving(&chunk, memory, direction)? };
        let mut slots: SmallVec<[u32; 4]> = slots.into_iter().collect();
        slots.dedup();
        Ok(Copying { chunk, moving, slots })
    }

    /// # Safety
    /// As for [`Self::start`], and for the chunk.
    unsafe fn start_moving(
        &mut self,
        chunk: &Chunk,
        memory: &[Located],
        direction: Direction,
    ) -> Result<Moving, GpuError> {
        self.list(chunk, memory, direction, |device| device.is_none());
        for piece in &self.pieces {
            // SAFETY: the caller's promise; a chunk is nobody else's memory.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    piece.source as *const u8,
                    piece.destination as *mut u8,
                    piece.len_bytes as usize,
                );
            }
        }
        if let By::Chaos(_) = self.by {
            self.list(chunk, memory, direction, |device| device.is_some());
        }
        if let By::Chaos(copies) = &mut self.by {
            return Ok(Moving::Chaos(copies.start(&self.pieces)));
        }
        let mut devices: SmallVec<[u32; 1]> = memory.iter().filter_map(|at| at.device).collect();
        devices.sort_unstable();
        devices.dedup();
        let mut events = SmallVec::new();
        for device in devices {
            self.list(chunk, memory, direction, |other| other == Some(device));
            // SAFETY: the caller's promise.
            match unsafe { self.start_on(device, direction) } {
                Ok(event) => events.push((device, event)),
                Err(e) => {
                    self.settle();
                    return Err(e);
                }
            }
        }
        Ok(Moving::Gpus(events))
    }

    /// Has a GPU copy what is listed.
    ///
    /// # Safety
    /// As for [`Self::start`].
    unsafe fn start_on(&mut self, device: u32, direction: Direction) -> Result<Event, GpuError> {
        let Self { by: By::Gpus(engines), pieces } = self else {
            return Err(GpuError::NoSuchDevice { ordinal: device, count: 0 });
        };
        let route = Route { direction, by_kernel: true, is_push: false, engines_are_busy: false };
        // SAFETY: the caller's promise.
        unsafe { engine_of(engines, device)?.copy(pieces, route) }
    }

    /// Lists the pieces on some devices, or the host's.
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

    /// How a copy ended, if it has.
    pub(crate) fn ended(&mut self, copying: &Copying) -> Option<Result<(), GpuError>> {
        match (&copying.moving, &mut self.by) {
            (Moving::Gpus(events), _) => all_ended(events.iter().map(|(_, event)| event.is_done())),
            (Moving::Chaos(name), By::Chaos(copies)) => copies.ended(*name),
            (Moving::Chaos(_), By::Gpus(_)) => Some(Ok(())),
        }
    }

    /// Whether a copy may be touching this region of ours.
    pub(crate) fn may_touch(&mut self, copying: &Copying, slot: u32) -> bool {
        copying.slots.contains(&slot) && self.ended(copying).is_none()
    }

    /// Gives back the chunk of a copy that has ended.
    pub(crate) fn release(&mut self, copying: Copying) -> Chunk {
        if let (Moving::Gpus(events), By::Gpus(engines)) = (copying.moving, &mut self.by) {
            for (device, event) in events {
                if let Some(engine) = engines.iter_mut().find(|engine| engine.device() == device) {
                    engine.reuse(event);
                }
            }
        }
        copying.chunk
    }

    /// Waits until nothing that was started moves any more.
    pub(crate) fn settle(&mut self) {
        match &mut self.by {
            By::Gpus(engines) => engines.iter().for_each(Engine::settle),
            By::Chaos(copies) => copies.settle(),
        }
    }
}

/// How copies of several GPUs ended, once all have: while one of them copies, it is at the chunk and at the regions,
/// whatever has become of the others. The first error is told.
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
