//! Events: points in a stream that one can wait for.

use std::{fmt, ptr};

use super::{
    context::Context,
    error::GpuError,
    raw::{EVENT_DISABLE_TIMING, Handle},
    stream::Stream,
};

/// A point in a stream. Until it is recorded it counts as having happened.
pub struct Event {
    context: &'static Context,
    raw: Handle,
}

// SAFETY: an event is a handle that any thread may use; the driver does its own locking.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Event").field("context", self.context).finish_non_exhaustive()
    }
}

impl Event {
    /// Makes one that measures no time, which makes it cheap.
    ///
    /// # Errors
    /// [`GpuError::Driver`] if the driver refuses.
    pub fn new(context: &'static Context) -> Result<Self, GpuError> {
        let _current = context.make_current()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the pointer is to a live handle.
        let code = unsafe { (context.driver().event_create)(&raw mut raw, EVENT_DISABLE_TIMING) };
        context.check(code, format_args!("making an event"))?;
        Ok(Self { context, raw })
    }

    pub(crate) fn raw(&self) -> Handle {
        self.raw
    }

    /// Makes it the point after everything that was enqueued on the stream, which is of the same GPU.
    ///
    /// # Errors
    /// [`GpuError::Driver`] if the driver refuses.
    pub fn record(&self, stream: &Stream) -> Result<(), GpuError> {
        let _current = self.context.make_current()?;
        // SAFETY: both handles live.
        let code = unsafe { (self.context.driver().event_record)(self.raw, stream.raw()) };
        self.context.check(code, format_args!("recording an event"))
    }

    /// Whether it has happened.
    ///
    /// # Errors
    /// Whatever the work before it ended with.
    pub fn is_done(&self) -> Result<bool, GpuError> {
        let _current = self.context.make_current()?;
        // SAFETY: the handle lives.
        let code = unsafe { (self.context.driver().event_query)(self.raw) };
        self.context.finished(code, format_args!("looking at an event"))
    }

    /// Waits until it has happened.
    ///
    /// # Errors
    /// Whatever the work before it ended with.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        let _current = self.context.make_current()?;
        // SAFETY: the handle lives.
        let code = unsafe { (self.context.driver().event_synchronize)(self.raw) };
        self.context.check(code, format_args!("waiting for an event"))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by this, and not used after this.
        self.context.quietly(|driver| unsafe { (driver.event_destroy)(self.raw) });
    }
}
