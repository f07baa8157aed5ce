//! Between a GPU's memory and host memory that no GPU reaches: through locked host memory.

use parking_lot::Mutex;
use uccl_device::cuda::{Context, Direction, GpuError, Gpus, PinnedBuffer, Priority, Stream};

use super::jobs::gpu;
use crate::{
    lane::{OpError, OpResult},
    mem::{Access, Span},
};

/// Bytes of a buffer: no chunk is longer.
pub(crate) const BOUNCE: usize = 512 << 10;

/// A buffer and a stream to fill and empty it.
struct Bouncer {
    context: &'static Context,
    stream: Stream,
    buffer: PinnedBuffer,
}

/// Bouncers that nobody uses right now; as many are made as threads copy at once.
#[derive(Default)]
pub(crate) struct Bouncers(Mutex<Vec<Bouncer>>);

impl Bouncers {
    /// Copies between `local`, a GPU's memory of at most [`BOUNCE`] bytes in all, and what `there` reads from
    /// or writes to: it is given the host's part of the way.
    ///
    /// # Safety
    /// The local memory must be there during the call, and nobody else may touch it.
    pub(crate) unsafe fn copy(
        &self,
        device: u32,
        access: Access,
        local: &[Span],
        there: impl FnOnce(Span) -> OpResult,
    ) -> OpResult {
        let bouncer = self.take(device).map_err(gpu)?;
        let len = local.iter().map(|span| span.len).sum();
        if len > bouncer.buffer.len_bytes() {
            return Err(OpError::HostOnly("a chunk does not fit the buffer"));
        }
        let host = Span { addr: bouncer.buffer.as_ptr() as usize, len };
        let by_gpu = |direction| {
            // SAFETY: the caller's promise; the buffer is ours until it is given back.
            unsafe { bouncer.move_all(local, direction) }.map_err(gpu)
        };
        let result = match access {
            Access::Read => there(host).and_then(|()| by_gpu(Direction::HostToDevice)),
            Access::Write => by_gpu(Direction::DeviceToHost).and_then(|()| there(host)),
        };
        self.0.lock().push(bouncer);
        result
    }

    fn take(&self, device: u32) -> Result<Bouncer, GpuError> {
        let context = Gpus::get().device(device)?.context()?;
        let mut spare = self.0.lock();
        let at = spare.iter().position(|other| other.context.device().ordinal() == device);
        if let Some(at) = at {
            return Ok(spare.swap_remove(at));
        }
        drop(spare);
        let stream = Stream::new(context, Priority::High)?;
        let buffer = PinnedBuffer::new(context, BOUNCE)?;
        Ok(Bouncer { context, stream, buffer })
    }
}

impl Bouncer {
    /// Copies pieces of GPU memory to or from the buffer, one behind the other, and waits.
    ///
    /// # Safety
    /// The pieces are memory of this GPU, or of one that it reaches, and together fit the buffer.
    unsafe fn move_all(&self, pieces: &[Span], direction: Direction) -> Result<(), GpuError> {
        let mut at = self.buffer.as_ptr() as u64;
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
        // Also after an error: what was enqueued uses the buffer.
        let ended = self.stream.synchronize();
        enqueued.and(ended)
    }
}
