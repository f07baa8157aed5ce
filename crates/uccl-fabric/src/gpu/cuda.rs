//! Copies by CUDA's GPUs, for staging.

use uccl_device::{
    MemoryKind,
    cuda::{Direction, GpuError, Gpus, Priority, gather::Piece},
};

use super::{
    Chunk, Engine, Mark, Route, Slab,
    copier::{CopyBackend, CopyBy, CopyQueue},
};

/// The GPUs that CUDA's driver shows.
struct CudaBackend;

impl Default for CopyBy {
    fn default() -> Self {
        Self::of(CudaBackend)
    }
}

impl CopyBackend for CudaBackend {
    fn queue(&self) -> Box<dyn CopyQueue> {
        Box::new(CudaQueue::default())
    }

    fn slab(&self, device: u32, chunks: usize) -> Result<Slab, GpuError> {
        Slab::near(device, chunks)
    }

    fn copier_of(&self, kind: MemoryKind) -> Option<u32> {
        kind.device_only()
    }
}

/// The engines of the GPUs that have copied so far, and the copies under way.
#[derive(Default)]
struct CudaQueue {
    engines: Vec<Engine>,
    /// The mark of each copy's end, with the index of its engine. A copy's name is its index.
    copies: Vec<Option<(usize, Mark)>>,
}

impl CudaQueue {
    fn engine_of(&mut self, device: u32) -> Result<usize, GpuError> {
        if let Some(at) = self.engines.iter().position(|engine| engine.device() == device) {
            return Ok(at);
        }
        let context = Gpus::get().device(device)?.context()?;
        self.engines.push(Engine::new(context, Priority::High)?);
        Ok(self.engines.len() - 1)
    }

    fn add(&mut self, engine: usize, mark: Mark) -> usize {
        let free = self.copies.iter().position(Option::is_none);
        let name = free.unwrap_or_else(|| {
            self.copies.push(None);
            self.copies.len() - 1
        });
        self.copies[name] = Some((engine, mark));
        name
    }
}

impl CopyQueue for CudaQueue {
    fn chunk(&self, device: u32) -> Result<Chunk, GpuError> {
        Chunk::near(device)
    }

    unsafe fn start(
        &mut self,
        device: u32,
        pieces: &[Piece],
        direction: Direction,
    ) -> (Option<usize>, Result<(), GpuError>) {
        let at = match self.engine_of(device) {
            Ok(at) => at,
            Err(e) => return (None, Err(e)),
        };
        let engine = &mut self.engines[at];
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
            Ok(mark) => (Some(self.add(at, mark)), Ok(())),
            Err(e) => {
                let begun = engine.fence();
                if begun.is_err() {
                    engine.settle();
                }
                (begun.ok().map(|mark| self.add(at, mark)), Err(e))
            }
        }
    }

    fn ended(&mut self, copy: usize) -> Option<Result<(), GpuError>> {
        let Some((_, mark)) = self.copies.get(copy)?.as_ref() else { return Some(Ok(())) };
        match mark.is_done() {
            Ok(true) => Some(Ok(())),
            Ok(false) => None,
            Err(e) => Some(Err(e)),
        }
    }

    fn release(&mut self, copy: usize) {
        if let Some((engine, mark)) = self.copies.get_mut(copy).and_then(Option::take) {
            self.engines[engine].reuse(mark);
        }
    }
}
