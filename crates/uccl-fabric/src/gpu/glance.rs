//! Reads words in GPU memory while no thread waits for them.

use std::time::Instant;

use uccl_device::cuda::GpuError;

use super::word::WordCopier;

/// Fetches words of a GPU's memory, one after the other, by copies on a stream of its own.
#[derive(Debug)]
pub struct WordReader {
    device: u32,
    copier: WordCopier,
    /// When the look that is under way began.
    began: Option<Instant>,
}

impl WordReader {
    /// Locks a word of host memory. Make it before any stream is held up until a word that it reads
    /// changes.
    ///
    /// # Errors
    /// The driver's error.
    pub fn new(device: u32) -> Result<Self, GpuError> {
        Ok(Self { device, copier: WordCopier::new(device)?, began: None })
    }

    /// The ordinal of the GPU.
    #[must_use]
    pub fn device(&self) -> u32 {
        self.device
    }

    /// Whether a look is under way.
    #[must_use]
    pub fn is_under_way(&self) -> bool {
        self.began.is_some()
    }

    /// Starts to fetch a word, if no look is under way.
    ///
    /// # Errors
    /// The driver's error.
    ///
    /// # Safety
    /// The aligned eight bytes must be this GPU's memory, and stay so while the look [is under
    /// way](Self::is_under_way).
    pub unsafe fn begin(&mut self, address: usize) -> Result<(), GpuError> {
        if self.is_under_way() {
            return Ok(());
        }
        // SAFETY: the caller's promise; no look is under way.
        unsafe { self.copier.fetch(address as u64)? };
        self.began = Some(Instant::now());
        Ok(())
    }

    /// The value of the word and the time at which the look began, once the look has ended. Each
    /// look is reported once.
    ///
    /// # Errors
    /// The error with which the copy ended: no look is under way then.
    pub fn seen(&mut self) -> Result<Option<(u64, Instant)>, GpuError> {
        let Some(began) = self.began else { return Ok(None) };
        let is_done = self.copier.is_done();
        if is_done != Ok(false) {
            self.began = None;
        }
        if !is_done? {
            return Ok(None);
        }
        Ok(Some((self.copier.value(), began)))
    }
}
