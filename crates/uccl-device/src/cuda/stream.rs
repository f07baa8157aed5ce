//! Streams: work on a GPU that happens in order.

use std::{fmt, ptr};

use super::{
    context::Context,
    error::GpuError,
    event::Event,
    raw::{Handle, STREAM_NON_BLOCKING},
};

/// Which stream's work goes first when both have some.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Priority {
    /// Like everyone else's.
    #[default]
    Normal,
    /// Before everyone else's.
    High,
}

/// A stream, made here or someone else's.
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
    /// Makes one that does not wait for the default stream.
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

    /// Someone else's, as the number that frameworks give (`torch.cuda.Stream.cuda_stream`). 0 is the
    /// default stream, 1 and 2 are the legacy and the per-thread default stream.
    ///
    /// # Safety
    /// It is a stream of this context, and outlives what is made here.
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

    /// Lets what is enqueued from now on wait until the event has happened, on whichever GPU, without
    /// holding up the CPU.
    ///
    /// # Errors
    /// [`GpuError::Driver`] if the driver refuses.
    pub fn wait(&self, event: &Event) -> Result<(), GpuError> {
        let _current = self.context.make_current()?;
        // SAFETY: both handles live; there are no flags.
        let code = unsafe { (self.context.driver().stream_wait_event)(self.raw, event.raw(), 0) };
        self.context.check(code, format_args!("letting a stream wait for an event"))
    }

    /// Whether everything that was enqueued has ended.
    ///
    /// # Errors
    /// Whatever it ended with.
    pub fn is_idle(&self) -> Result<bool, GpuError> {
        let _current = self.context.make_current()?;
        // SAFETY: the handle lives.
        let code = unsafe { (self.context.driver().stream_query)(self.raw) };
        self.context.finished(code, format_args!("looking at a stream"))
    }

    /// Waits until everything that was enqueued has ended.
    ///
    /// # Errors
    /// Whatever it ended with.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        let _current = self.context.make_current()?;
        // SAFETY: the handle lives.
        let code = unsafe { (self.context.driver().stream_synchronize)(self.raw) };
        self.context.check(code, format_args!("waiting for a stream"))
    }
}

impl Drop for Stream {
    /// What is enqueued goes on.
    fn drop(&mut self) {
        if self.owned {
            // SAFETY: made by this, and not used after this.
            self.context.quietly(|driver| unsafe { (driver.stream_destroy)(self.raw) });
        }
    }
}
