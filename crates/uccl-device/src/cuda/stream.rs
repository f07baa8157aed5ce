//! Streams: queues of work on a GPU, each of which runs in order.

use std::{fmt, ptr, sync::LazyLock};

use super::{
    device::Context,
    driver::Driver,
    error::GpuError,
    raw::{Handle, STREAM_NON_BLOCKING},
};

/// The priority of a stream's work over that of others.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Priority {
    /// The same as other streams'.
    #[default]
    Normal,
    /// Before that of normal streams.
    High,
}

/// Whether the streams of a GPU share fewer hardware queues than usual:
/// `CUDA_DEVICE_MAX_CONNECTIONS` is set below 8, the driver's default. Work that is enqueued behind
/// a wait in the same queue waits too, even if it is on another stream.
pub fn has_few_queues() -> bool {
    static FEW: LazyLock<bool> = LazyLock::new(|| {
        let set = std::env::var("CUDA_DEVICE_MAX_CONNECTIONS");
        set.is_ok_and(|set| set.trim().parse().is_ok_and(|queues: u32| queues < USUAL_QUEUES))
    });
    *FEW
}

const USUAL_QUEUES: u32 = 8;

/// A stream, made here or borrowed.
pub struct Stream {
    context: &'static Context,
    raw: Handle,
    owned: bool,
}

// SAFETY: a stream is a handle that any thread may use; the driver does its own locking.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("context", self.context).field("raw", &self.raw).finish()
    }
}

impl Stream {
    /// Makes a stream that does not wait for the default stream.
    ///
    /// # Errors
    /// [`GpuError::Driver`] if the driver refuses.
    pub fn new(context: &'static Context, priority: Priority) -> Result<Self, GpuError> {
        let _current = context.make_current()?;
        let doing = format_args!("making a stream on GPU {}", context.device().ordinal());
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: both pointers are to live integers.
        let code =
            unsafe { (context.driver().context_priorities)(&raw mut least, &raw mut greatest) };
        context.check(code, doing)?;
        let priority = match priority {
            Priority::Normal => least,
            Priority::High => greatest,
        };
        let mut raw = ptr::null_mut();
        // SAFETY: the pointer is to a live handle.
        let code = unsafe {
            (context.driver().stream_create)(&raw mut raw, STREAM_NON_BLOCKING, priority)
        };
        context.check(code, doing)?;
        Ok(Self { context, raw, owned: true })
    }

    /// Borrows another owner's stream, given by the number that frameworks use
    /// (`torch.cuda.Stream.cuda_stream`). 0 is the default stream, 1 the legacy and 2 the
    /// per-thread default stream.
    ///
    /// # Safety
    /// It must be a stream of this context, and outlive the value returned.
    pub unsafe fn borrow(context: &'static Context, raw: u64) -> Self {
        Self { context, raw: raw as usize as Handle, owned: false }
    }

    /// The context that it belongs to.
    pub fn context(&self) -> &'static Context {
        self.context
    }

    /// Its number, as [`Self::borrow`] takes it.
    pub fn handle(&self) -> u64 {
        self.raw as usize as u64
    }

    pub(crate) fn raw(&self) -> Handle {
        self.raw
    }

    /// Makes work enqueued from now on wait until a word in memory has reached a value. Words may
    /// wrap around: the word has reached the value when it is ahead of it by less than 2^63. The
    /// word has eight bytes, is aligned to eight, and lies in memory that GPUs reach.
    ///
    /// # Errors
    /// [`GpuError::Missing`] if the driver has no such wait, [`GpuError::Driver`] if it refuses.
    pub fn wait_for_word(&self, address: u64, at_least: u64) -> Result<(), GpuError> {
        /// `CU_STREAM_WAIT_VALUE_GEQ`.
        const AT_LEAST: u32 = 0;
        /// `CU_STREAM_WAIT_VALUE_FLUSH`.
        const FLUSH: u32 = 1 << 30;
        let wait = self.context.driver().stream_wait_value_64;
        let wait = Driver::need(wait, "cuStreamWaitValue64")?;
        // Work behind the wait is to see another device's writes before the word.
        let flush = if self.context.device().flushes_in_streams() { FLUSH } else { 0 };
        let _current = self.context.make_current()?;
        // SAFETY: the stream lives; the driver refuses other memory.
        let code = unsafe { wait(self.raw, address, at_least, AT_LEAST | flush) };
        self.context.check(code, format_args!("letting a stream wait for a word"))
    }

    /// Whether all enqueued work has ended.
    ///
    /// # Errors
    /// The error with which the work ended.
    pub fn is_idle(&self) -> Result<bool, GpuError> {
        let _current = self.context.make_current()?;
        // SAFETY: the handle lives.
        let code = unsafe { (self.context.driver().stream_query)(self.raw) };
        self.context.finished(code, format_args!("looking at a stream"))
    }

    /// Waits until all enqueued work has ended.
    ///
    /// # Errors
    /// The error with which the work ended.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        let _current = self.context.make_current()?;
        // SAFETY: the handle lives.
        let code = unsafe { (self.context.driver().stream_synchronize)(self.raw) };
        self.context.check(code, format_args!("waiting for a stream"))
    }
}

impl Drop for Stream {
    /// Enqueued work continues.
    fn drop(&mut self) {
        if self.owned {
            // SAFETY: made by this, and not used after this.
            self.context.quietly(|driver| unsafe { (driver.stream_destroy)(self.raw) });
        }
    }
}
