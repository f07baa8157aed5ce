//! Copies between a GPU's memory and host memory that no GPU reaches: through locked host memory.

use parking_lot::Mutex;
use uccl_device::cuda::{Direction, GpuError, Gpus, Priority, Stream};
use uccl_fabric::{
    gpu::{CHUNK, Chunk},
    lane::{OpError, OpResult},
    mem::{Access, Span},
};

/// A chunk and a stream to fill and empty it.
struct Bouncer {
    stream: Stream,
    chunk: Chunk,
}

/// Unused bouncers. As many are made as threads copy at once.
#[derive(Default)]
pub(crate) struct Bouncers(Mutex<Vec<Bouncer>>);

impl Bouncers {
    /// Copies between `local`, a GPU's memory of at most [`CHUNK`] bytes in all, and other memory, through host
    /// memory. `there` copies between that host memory and the other memory.
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
        let bouncer = self.take(device).map_err(OpError::from)?;
        let len = local.iter().map(|span| span.len).sum();
        if len > CHUNK {
            return Err(OpError::HostOnly("a part is longer than a chunk"));
        }
        let host = Span { addr: bouncer.chunk.addr(), len };
        let by_gpu = |direction| {
            // SAFETY: the caller's promise; the chunk is ours until it is given back.
            unsafe { bouncer.move_all(local, direction) }.map_err(OpError::from)
        };
        let result = match access {
            Access::Read => there(host).and_then(|()| by_gpu(Direction::HostToDevice)),
            Access::Write => by_gpu(Direction::DeviceToHost).and_then(|()| there(host)),
        };
        self.0.lock().push(bouncer);
        result
    }

    fn take(&self, device: u32) -> Result<Bouncer, GpuError> {
        let mut spare = self.0.lock();
        let at = spare.iter().position(|other| other.device() == device);
        if let Some(at) = at {
            return Ok(spare.swap_remove(at));
        }
        drop(spare);
        let context = Gpus::get().device(device)?.context()?;
        Ok(Bouncer { stream: Stream::new(context, Priority::High)?, chunk: Chunk::near(device)? })
    }
}

impl Bouncer {
    fn device(&self) -> u32 {
        self.stream.context().device().ordinal()
    }

    /// Copies pieces of GPU memory to or from the chunk, one behind the other, and waits.
    ///
    /// # Safety
    /// The pieces are memory of this GPU, or of one that it reaches, and together fit the chunk.
    unsafe fn move_all(&self, pieces: &[Span], direction: Direction) -> Result<(), GpuError> {
        let mut at = self.chunk.addr() as u64;
        let mut enqueued = Ok(());
        for piece in pieces.iter().filter(|piece| piece.len > 0) {
            let (to, from) = match direction {
                Direction::DeviceToHost => (at, piece.addr as u64),
                _ => (piece.addr as u64, at),
            };
            // SAFETY: the caller's promise.
            enqueued = unsafe { self.stream.copy(to, from, piece.len, direction) };
            if enqueued.is_err() {
                break;
            }
            at += piece.len as u64;
        }
        // Also after an error: copies that were enqueued use the chunk.
        let ended = self.stream.synchronize();
        enqueued.and(ended)
    }
}
