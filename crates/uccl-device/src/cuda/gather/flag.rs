//! Flags in host memory, by which a launch reports its end.

use std::sync::{
    Arc,
    atomic::{AtomicU32, AtomicU64, Ordering},
};

use crate::cuda::{device::Context, error::GpuError, memory::PinnedBuffer};

/// The context is probed once in this many looks at a flag: only the context shows that a kernel
/// died.
const LOOKS: u32 = 1024;

/// The end of a launch, which any thread may look for. A look costs no call of the driver.
#[derive(Debug)]
pub struct Flag {
    context: &'static Context,
    /// The launcher's memory. One of its words is the flag.
    memory: Arc<PinnedBuffer>,
    offset: usize,
    /// Launches that share the flag write ever higher numbers, one after the other.
    ticket: u64,
    looks: AtomicU32,
}

impl Flag {
    /// The flag at an offset of the launcher's memory, which is a multiple of 8 inside it.
    pub(super) fn new(
        context: &'static Context,
        memory: &Arc<PinnedBuffer>,
        offset: usize,
        ticket: u64,
    ) -> Self {
        let looks = AtomicU32::new(0);
        Self { context, memory: Arc::clone(memory), offset, ticket, looks }
    }

    pub(super) fn address(&self) -> u64 {
        self.memory.address() + self.offset as u64
    }

    /// Whether the launch has ended. A thread that reads true sees the launch's writes.
    ///
    /// # Errors
    /// The launch's error, if the kernel died; the first looks may not find it.
    pub fn is_done(&self) -> Result<bool, GpuError> {
        let word = self.address() as usize as *mut u64;
        // SAFETY: aligned, initialised, and in memory that this keeps. The GPU writes to it whole.
        if unsafe { AtomicU64::from_ptr(word) }.load(Ordering::Acquire) >= self.ticket {
            return Ok(true);
        }
        if self.looks.fetch_add(1, Ordering::Relaxed) % LOOKS == LOOKS - 1 {
            self.context.probe()?;
        }
        Ok(false)
    }
}
