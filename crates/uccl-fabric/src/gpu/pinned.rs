//! Chunks of locked host memory that stage bytes. A chunk is given back after use and used again:
//! locking memory costs more than copying it.

use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use uccl_device::cuda::{GpuError, Gpus, PinnedBuffer};

use crate::mem::Span;

/// Bytes of a chunk. Long enough that the cost of starting a copy is small, and short enough that a
/// few chunks stay in the CPU's cache.
pub const CHUNK: usize = 512 << 10;

/// A chunk of host memory near a GPU. Every GPU of the process reaches it, unless it is
/// [plain](Self::plain).
pub struct Chunk {
    device: u32,
    memory: Option<Memory>,
}

enum Memory {
    Locked(PinnedBuffer),
    /// For copies that no GPU makes.
    Plain(Box<[u8]>),
    /// One chunk of a slab, by its index.
    Part(Arc<Slab>, usize),
}

/// Contiguous chunks, for an owner that registers them all at once. The owner keeps track of which
/// are in use.
pub struct Slab {
    memory: Memory,
    chunks: usize,
}

impl Slab {
    /// Chunks near a GPU.
    ///
    /// # Errors
    /// When there is no such GPU, or no more memory can be locked.
    pub fn near(device: u32, chunks: usize) -> Result<Self, GpuError> {
        let context = Gpus::get().device(device)?.context()?;
        let memory = Memory::Locked(PinnedBuffer::near(context, chunks * CHUNK)?);
        Ok(Self { memory, chunks })
    }

    /// Chunks that no GPU reaches.
    pub fn plain(chunks: usize) -> Self {
        Self { memory: Memory::Plain(vec![0; chunks * CHUNK].into_boxed_slice()), chunks }
    }

    /// The memory of all its chunks.
    pub fn span(&self) -> Span {
        Span { addr: self.memory.addr(), len: self.chunks * CHUNK }
    }

    /// The chunk at an index. An index beyond the end gives the last chunk.
    pub fn chunk(self: &Arc<Self>, at: usize) -> Chunk {
        let part = Memory::Part(Arc::clone(self), at.min(self.chunks.saturating_sub(1)));
        Chunk { device: 0, memory: Some(part) }
    }
}

impl Memory {
    fn addr(&self) -> usize {
        match self {
            Self::Locked(buffer) => buffer.as_ptr() as usize,
            Self::Plain(bytes) => bytes.as_ptr() as usize,
            Self::Part(slab, at) => slab.memory.addr() + at * CHUNK,
        }
    }
}

/// Unused chunks, by the GPU that they are near. Chunks are not freed, so as many exist as were
/// ever in use at once; each user limits its own.
fn spare() -> &'static Mutex<Vec<(u32, PinnedBuffer)>> {
    static SPARE: OnceLock<Mutex<Vec<(u32, PinnedBuffer)>>> = OnceLock::new();
    SPARE.get_or_init(Mutex::default)
}

impl Chunk {
    /// A chunk near a GPU.
    ///
    /// # Errors
    /// When there is no such GPU, or no more memory can be locked.
    pub fn near(device: u32) -> Result<Self, GpuError> {
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
    pub fn plain() -> Self {
        let bytes = vec![0; CHUNK].into_boxed_slice();
        Self { device: 0, memory: Some(Memory::Plain(bytes)) }
    }

    /// Its start address, for the CPU and for GPUs.
    pub fn addr(&self) -> usize {
        self.memory.as_ref().map_or(0, Memory::addr)
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        if let Some(Memory::Locked(buffer)) = self.memory.take() {
            spare().lock().push((self.device, buffer));
        }
    }
}
