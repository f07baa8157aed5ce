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

/// Chunks that were locked, by the GPU that they are near. They are not freed, so as many exist as
/// were ever in use at once, or were [prepared](prepare_chunks); each user limits its own.
#[derive(Default)]
struct Pool {
    spare: Vec<(u32, PinnedBuffer)>,
    /// All, those in use too.
    locked: Vec<(u32, usize)>,
}

impl Pool {
    fn locked(&mut self, device: u32) -> &mut usize {
        let at = self.locked.iter().position(|(other, _)| *other == device);
        let at = at.unwrap_or_else(|| {
            self.locked.push((device, 0));
            self.locked.len() - 1
        });
        &mut self.locked[at].1
    }
}

fn pool() -> &'static Mutex<Pool> {
    static POOL: OnceLock<Mutex<Pool>> = OnceLock::new();
    POOL.get_or_init(Mutex::default)
}

/// Locks chunks near a GPU until there are so many, those in use included. Staging that needs no
/// more of them then locks no memory: the driver does so only when the GPU has nothing to do.
///
/// # Errors
/// When there is no such GPU, or no more memory can be locked.
pub fn prepare_chunks(device: u32, count: usize) -> Result<(), GpuError> {
    while *pool().lock().locked(device) < count {
        drop(Chunk::locked(device)?);
    }
    Ok(())
}

impl Chunk {
    /// A chunk near a GPU.
    ///
    /// # Errors
    /// When there is no such GPU, or no more memory can be locked.
    pub fn near(device: u32) -> Result<Self, GpuError> {
        let mut pool = pool().lock();
        if let Some(at) = pool.spare.iter().position(|(other, _)| *other == device) {
            let (_, buffer) = pool.spare.swap_remove(at);
            return Ok(Self { device, memory: Some(Memory::Locked(buffer)) });
        }
        drop(pool);
        Self::locked(device)
    }

    /// One more chunk near a GPU.
    fn locked(device: u32) -> Result<Self, GpuError> {
        let context = Gpus::get().device(device)?.context()?;
        let buffer = PinnedBuffer::near(context, CHUNK)?;
        *pool().lock().locked(device) += 1;
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
            pool().lock().spare.push((self.device, buffer));
        }
    }
}
