//! Chunks of locked host memory, taken for as long as bytes pass through them and used again by the next
//! who needs one: locking memory costs more than copying it.

use std::sync::OnceLock;

use parking_lot::Mutex;
use uccl_device::cuda::{GpuError, Gpus, PinnedBuffer};

/// Bytes of a chunk. Long enough that what it costs to start a copy is small beside it, and short enough
/// that a few of them stay in the CPU's cache.
pub(crate) const CHUNK: usize = 512 << 10;

/// A chunk near a GPU. Every GPU of the process reaches it.
pub(crate) struct Chunk {
    device: u32,
    memory: Option<Memory>,
}

enum Memory {
    Locked(PinnedBuffer),
    /// For copies that no GPU makes.
    Plain(Box<[u8]>),
}

/// Chunks that nobody uses right now, by the GPU that they are near. As many exist as were ever in use at once,
/// and each user limits his own.
fn spare() -> &'static Mutex<Vec<(u32, PinnedBuffer)>> {
    static SPARE: OnceLock<Mutex<Vec<(u32, PinnedBuffer)>>> = OnceLock::new();
    SPARE.get_or_init(Mutex::default)
}

impl Chunk {
    /// A chunk near a GPU.
    ///
    /// # Errors
    /// When there is no such GPU, or no more memory can be locked.
    pub(crate) fn near(device: u32) -> Result<Self, GpuError> {
        let mut spare = spare().lock();
        if let Some(at) = spare.iter().position(|(other, _)| *other == device) {
            let (_, buffer) = spare.swap_remove(at);
            return Ok(Self { device, memory: Some(Memory::Locked(buffer)) });
        }
        drop(spare);
        let context = Gpus::get().device(device)?.context()?;
        let buffer = PinnedBuffer::near(context, CHUNK)?;
        Ok(Self { device, memory: Some(Memory::Locked(buffer)) })
    }

    /// A chunk that no GPU reaches.
    pub(crate) fn plain() -> Self {
        let bytes = vec![0; CHUNK].into_boxed_slice();
        Self { device: 0, memory: Some(Memory::Plain(bytes)) }
    }

    /// Where it begins, for the CPU and for GPUs.
    pub(crate) fn addr(&self) -> usize {
        match &self.memory {
            Some(Memory::Locked(buffer)) => buffer.as_ptr() as usize,
            Some(Memory::Plain(bytes)) => bytes.as_ptr() as usize,
            None => 0,
        }
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        if let Some(Memory::Locked(buffer)) = self.memory.take() {
            spare().lock().push((self.device, buffer));
        }
    }
}
