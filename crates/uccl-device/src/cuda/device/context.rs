//! A GPU's primary context.

use std::{
    any::Any,
    collections::HashSet,
    fmt,
    marker::PhantomData,
    ptr,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use super::Device;
use crate::cuda::{
    driver::Driver,
    error::GpuError,
    raw::{CAPTURE_MODE_RELAXED, Code, Handle, NOT_READY, PEER_ACCESS_ALREADY_ENABLED, SUCCESS},
};

/// Loads the copy kernels. Their launcher knows them, and is above this module.
pub(crate) type LoadKernels = fn(&'static Context) -> LoadedKernels;

/// The copy kernels of a context, of a type that their launcher knows.
pub(crate) type LoadedKernels = Result<Arc<dyn Any + Send + Sync>, GpuError>;

/// A GPU's primary context, in which all work of a process on that GPU happens.
///
/// It is retained once and never released, so that nothing made in it can outlive it.
pub struct Context {
    driver: &'static Driver,
    device: &'static Device,
    raw: Handle,
    peers: Mutex<HashSet<u32>>,
    poisoned: AtomicBool,
    kernels: OnceLock<LoadedKernels>,
}

// SAFETY: a context is a handle that any thread may use; the driver does its own locking.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("device", &self.device.ordinal()).finish_non_exhaustive()
    }
}

impl Context {
    pub(crate) fn retain(
        driver: &'static Driver,
        device: &'static Device,
    ) -> Result<Self, GpuError> {
        let mut raw = ptr::null_mut();
        // SAFETY: the pointer is to a live handle; the device is one that the driver named.
        let code = unsafe { (driver.primary_context_retain)(&raw mut raw, device.id()) };
        driver.check(code, format_args!("taking GPU {}'s context", device.ordinal()))?;
        let (peers, poisoned) = (Mutex::default(), AtomicBool::new(false));
        Ok(Self { driver, device, raw, peers, poisoned, kernels: OnceLock::new() })
    }

    /// The GPU that it belongs to.
    pub fn device(&self) -> &'static Device {
        self.device
    }

    pub(crate) fn driver(&self) -> &'static Driver {
        self.driver
    }

    pub(crate) fn raw(&self) -> Handle {
        self.raw
    }

    /// Loads the copy kernels, if they have not been loaded yet.
    ///
    /// # Errors
    /// [`GpuError::Driver`] if the driver does not take them, the same each time.
    pub(crate) fn kernels_by(&'static self, load: LoadKernels) -> LoadedKernels {
        self.kernels.get_or_init(|| load(self)).clone()
    }

    /// Whether the copy kernels can be used.
    pub fn has_kernels(&'static self) -> bool {
        self.kernels.get().is_some_and(Result::is_ok)
    }

    /// Makes it this thread's current context until the guard is dropped; then the thread gets its
    /// previous context back. Costs three short calls into the driver if it is the thread's context
    /// already.
    ///
    /// While the guard lives, the thread's capture mode is relaxed. Otherwise, if another thread is
    /// recording a graph, calls of this thread such as allocating or querying an event would spoil
    /// the recording.
    ///
    /// # Errors
    /// [`GpuError::Driver`] if the driver refuses, which it does while the process exits.
    pub fn make_current(&self) -> Result<Current<'_>, GpuError> {
        let mut current = ptr::null_mut();
        // SAFETY: the pointer is to a live handle.
        let code = unsafe { (self.driver.context_get_current)(&raw mut current) };
        let pushed = code != SUCCESS || current != self.raw;
        if pushed {
            // SAFETY: the context is retained for as long as the process runs.
            let code = unsafe { (self.driver.context_push)(self.raw) };
            let ordinal = self.device.ordinal();
            self.check(code, format_args!("making GPU {ordinal}'s context current"))?;
        }
        let mut mode = CAPTURE_MODE_RELAXED;
        // SAFETY: the pointer is to a live integer with a mode, which the call replaces by the
        // previous mode.
        let relaxed = unsafe { (self.driver.exchange_capture_mode)(&raw mut mode) } == SUCCESS;
        let mode = relaxed.then_some(mode);
        Ok(Current { context: self, pushed, mode, thread: PhantomData })
    }

    /// Lets this GPU reach the other's memory. Only the first call does work; later calls only take
    /// a lock.
    ///
    /// # Errors
    /// [`GpuError::NoPeerAccess`] if no link allows it, [`GpuError::Driver`] if the driver refuses,
    /// which it does for more than eight peers of one GPU on machines without NVSwitch.
    pub fn enable_peer(&self, other: &Self) -> Result<(), GpuError> {
        let (from, to) = (self.device.ordinal(), other.device.ordinal());
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        if from == to || peers.contains(&to) {
            return Ok(());
        }
        if !self.device.can_access(other.device)? {
            return Err(GpuError::NoPeerAccess { from, to });
        }
        let _current = self.make_current()?;
        // SAFETY: the other context is retained, and there are no flags.
        let code = unsafe { (self.driver.context_enable_peer_access)(other.raw, 0) };
        if code != PEER_ACCESS_ALREADY_ENABLED {
            self.check(code, format_args!("letting GPU {from} reach GPU {to}"))?;
        }
        peers.insert(to);
        Ok(())
    }

    /// Waits until all work in the context has ended, of all code in this process. That includes
    /// streams that wait for the host, even if only the caller can let them continue.
    ///
    /// # Errors
    /// The error with which that work ended.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        let _current = self.make_current()?;
        // SAFETY: there is a current context.
        let code = unsafe { (self.driver.context_synchronize)() };
        self.check(code, format_args!("waiting for GPU {}", self.device.ordinal()))
    }

    /// Whether a call has found the context to be lost.
    pub fn is_poisoned(&self) -> bool {
        self.poisoned.load(Ordering::Relaxed)
    }

    /// Asks the driver whether it still works, without waiting for anything.
    ///
    /// # Errors
    /// [`GpuError::Poisoned`] if it is lost.
    pub fn probe(&self) -> Result<(), GpuError> {
        let _current = self.make_current()?;
        // SAFETY: null is the default stream of the current context.
        let code = unsafe { (self.driver.stream_query)(ptr::null_mut()) };
        self.finished(code, format_args!("looking at GPU {}", self.device.ordinal())).map(|_| ())
    }

    /// Free and total bytes of the GPU's memory.
    ///
    /// # Errors
    /// [`GpuError::Driver`] if the driver does not answer.
    pub fn memory_info(&self) -> Result<(usize, usize), GpuError> {
        let _current = self.make_current()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both pointers are to live integers.
        let code = unsafe { (self.driver.memory_info)(&raw mut free, &raw mut total) };
        self.check(code, format_args!("asking for GPU {}'s memory", self.device.ordinal()))?;
        Ok((free, total))
    }

    /// Turns a code other than success into an error, and records if the context is lost.
    pub(crate) fn check(&self, code: Code, doing: fmt::Arguments<'_>) -> Result<(), GpuError> {
        let result = self.driver.check(code, doing);
        if matches!(result, Err(GpuError::Poisoned { .. })) {
            self.poisoned.store(true, Ordering::Relaxed);
        }
        result
    }

    /// For queries: whether the work has ended.
    pub(crate) fn finished(&self, code: Code, doing: fmt::Arguments<'_>) -> Result<bool, GpuError> {
        match code {
            SUCCESS => Ok(true),
            NOT_READY => Ok(false),
            _ => self.check(code, doing).map(|()| true),
        }
    }

    /// Runs a call and ignores its failure: a drop has no caller to report it to.
    pub(crate) fn quietly(&self, run: impl FnOnce(&Driver) -> Code) {
        if let Ok(_current) = self.make_current() {
            let _ = self.check(run(self.driver), format_args!("giving something back"));
        }
    }
}

/// A guard: while it lives, its context is this thread's current one.
#[must_use = "the context is current only while this lives"]
pub struct Current<'a> {
    context: &'a Context,
    pushed: bool,
    /// The thread's previous capture mode.
    mode: Option<i32>,
    /// Keeps the guard on its thread, as each thread has a current context of its own.
    thread: PhantomData<*const ()>,
}

impl fmt::Debug for Current<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Current").field("context", self.context).finish_non_exhaustive()
    }
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        if let Some(mut mode) = self.mode {
            // SAFETY: the pointer is to a live integer with a mode that the driver gave. A failure
            // leaves nothing to do.
            let _ = unsafe { (self.context.driver.exchange_capture_mode)(&raw mut mode) };
        }
        if self.pushed {
            let mut popped = ptr::null_mut();
            // SAFETY: pairs with the push that made this guard, on the same thread.
            // A failure leaves nothing to do: the process is ending.
            let _ = unsafe { (self.context.driver.context_pop)(&raw mut popped) };
        }
    }
}
