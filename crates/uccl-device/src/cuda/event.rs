//! Events: points in a stream that one can wait for.

use std::{fmt, ptr};

use super::{
    device::Context,
    error::GpuError,
    raw::{EVENT_DISABLE_TIMING, Handle},
    stream::Stream,
};

/// A point in a stream. Before it is recorded, it counts as having happened.
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
    /// Makes an event that measures no time, which makes it cheap.
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

    /// Records the event: it becomes the point after everything enqueued on the stream, which must
    /// be of the same GPU.
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
    /// The error with which the work before it ended.
    pub fn is_done(&self) -> Result<bool, GpuError> {
        let _current = self.context.make_current()?;
        // SAFETY: the handle lives.
        let code = unsafe { (self.context.driver().event_query)(self.raw) };
        self.context.finished(code, format_args!("looking at an event"))
    }

    /// Waits until it has happened.
    ///
    /// # Errors
    /// The error with which the work before it ended.
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

impl Stream {
    /// Makes work enqueued from now on wait until the event has happened, on whichever GPU. The CPU
    /// does not wait.
    ///
    /// # Errors
    /// [`GpuError::Driver`] if the driver refuses.
    pub fn wait(&self, event: &Event) -> Result<(), GpuError> {
        let _current = self.context().make_current()?;
        // SAFETY: both handles live; there are no flags.
        let code = unsafe { (self.context().driver().stream_wait_event)(self.raw(), event.raw, 0) };
        self.context().check(code, format_args!("letting a stream wait for an event"))
    }
}
