//! An opened device.

use std::{
    ffi::CStr,
    mem::MaybeUninit,
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use uccl_fabric::rail::RailError;

use super::ffi::{
    Verbs,
    abi::{self, DeviceAttr, PortAttr, event},
    check, errno,
};

/// The devices that libibverbs lists right now.
pub(super) struct DeviceList {
    verbs: &'static Verbs,
    raw: NonNull<*mut abi::Device>,
    len: usize,
}

impl DeviceList {
    /// Asks libibverbs for the devices.
    ///
    /// # Errors
    /// [`RailError::Unavailable`] if the kernel's support is missing or this process may not use
    /// it.
    pub(super) fn get(verbs: &'static Verbs) -> Result<Self, RailError> {
        let mut len = 0;
        // SAFETY: the pointer is to a live integer.
        let raw = unsafe { (verbs.get_device_list)(&raw mut len) };
        let raw = NonNull::new(raw).ok_or_else(|| no_list(errno()))?;
        Ok(Self { verbs, raw, len: usize::try_from(len).unwrap_or(0) })
    }

    /// Each device with its name.
    pub(super) fn iter(&self) -> impl Iterator<Item = DeviceEntry<'_>> {
        (0..self.len).filter_map(|index| {
            // SAFETY: the list has as many entries as the library said.
            let raw = NonNull::new(unsafe { *self.raw.as_ptr().add(index) })?;
            Some(DeviceEntry { raw, list: self })
        })
    }
}

fn no_list(errno: i32) -> RailError {
    match errno {
        libc::ENOSYS | libc::ENOENT => RailError::Unavailable(
            "the kernel offers no RDMA to programs: modprobe ib_uverbs, and the driver of the \
             device (mlx5_ib, rdma_rxe, ...)"
                .to_owned(),
        ),
        libc::EPERM | libc::EACCES => RailError::Unavailable(
            "this process may not list RDMA devices: it needs access to /dev/infiniband".to_owned(),
        ),
        errno => RailError::os("listing RDMA devices (ibv_get_device_list)", errno),
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: the list is the library's, and freed once; opened devices outlive it.
        unsafe { (self.verbs.free_device_list)(self.raw.as_ptr()) };
    }
}

/// A device that is not opened.
pub(super) struct DeviceEntry<'a> {
    raw: NonNull<abi::Device>,
    list: &'a DeviceList,
}

impl DeviceEntry<'_> {
    /// Its name: `mlx5_0`, `rxe0`.
    pub(super) fn name(&self) -> String {
        // SAFETY: the device lives as long as the list, and its name ends with 0.
        let name = unsafe { CStr::from_ptr((&raw const (*self.raw.as_ptr()).name).cast()) };
        name.to_string_lossy().into_owned()
    }

    /// `enum ibv_transport_type`.
    pub(super) fn transport(&self) -> i32 {
        // SAFETY: the device lives as long as the list.
        unsafe { (*self.raw.as_ptr()).transport_type }
    }

    /// Opens it.
    ///
    /// # Errors
    /// [`RailError::Unavailable`] if this process may not open it, or its file is missing. The
    /// message names the remedy.
    pub(super) fn open(&self) -> Result<Arc<Context>, RailError> {
        let (verbs, name) = (self.list.verbs, self.name());
        // SAFETY: the device is in a list that lives.
        let raw = unsafe { (verbs.open_device)(self.raw.as_ptr()) };
        let Some(raw) = NonNull::new(raw) else {
            return Err(match errno() {
                libc::EPERM | libc::EACCES => RailError::Unavailable(format!(
                    "this process may not open {name}: it needs to read and write /dev/infiniband/uverbs*"
                )),
                libc::ENOENT | libc::ENODEV | libc::ENXIO => RailError::Unavailable(format!(
                    "{name} has no file in /dev/infiniband: in a container, pass the folder along"
                )),
                errno => RailError::os(format!("opening {name} (ibv_open_device)"), errno),
            });
        };
        let (is_gone, vectors) = (AtomicBool::new(false), AtomicUsize::new(fastrand::usize(..)));
        let context = Context { raw, verbs, name, is_gone, vectors };
        context.never_block()?;
        Ok(Arc::new(context))
    }
}

/// An opened device.
pub(super) struct Context {
    raw: NonNull<abi::Context>,
    verbs: &'static Verbs,
    name: String,
    is_gone: AtomicBool,
    /// Counts the completion queues. It begins anywhere, so that processes do not all begin at the
    /// same vector.
    vectors: AtomicUsize,
}

// SAFETY: verbs may be called from any thread; the library does its own locking.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub(super) fn verbs(&self) -> &'static Verbs {
        self.verbs
    }

    pub(super) fn raw(&self) -> *mut abi::Context {
        self.raw.as_ptr()
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// The completion vector of the next completion queue. They take turns, so that not one
    /// processor takes the interrupts of all queues.
    pub(super) fn next_vector(&self) -> i32 {
        // SAFETY: the context lives, and the library does not change this number.
        let count = unsafe { (*self.raw.as_ptr()).num_comp_vectors };
        nth_vector(self.vectors.fetch_add(1, Ordering::Relaxed), count)
    }

    /// Makes reads of asynchronous events return at once.
    fn never_block(&self) -> Result<(), RailError> {
        // SAFETY: the context lives, and its descriptor is open as long as it does.
        let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw((*self.raw.as_ptr()).async_fd) };
        set_nonblocking(fd).map_err(|errno| RailError::os("fcntl on the device's events", errno))
    }

    /// The device's attributes.
    pub(super) fn query_device(&self) -> Result<DeviceAttr, RailError> {
        self.ask_device().map_err(|errno| self.error("ibv_query_device", errno))
    }

    fn ask_device(&self) -> Result<DeviceAttr, i32> {
        let mut attr = MaybeUninit::<DeviceAttr>::zeroed();
        // SAFETY: the context lives, and the struct has the library's layout.
        let returned = unsafe { (self.verbs.query_device)(self.raw(), attr.as_mut_ptr()) };
        check(returned)?;
        // SAFETY: all its fields are numbers, and were zero before the library filled them.
        Ok(unsafe { attr.assume_init() })
    }

    /// The state of a port, from 1.
    pub(super) fn query_port(&self, port: u8) -> Result<PortAttr, RailError> {
        let mut attr = MaybeUninit::<PortAttr>::zeroed();
        // SAFETY: the context lives, and the struct has the library's layout or is longer.
        let returned = unsafe { (self.verbs.query_port)(self.raw(), port, attr.as_mut_ptr()) };
        check(returned).map_err(|errno| self.error("ibv_query_port", errno))?;
        // SAFETY: all its fields are numbers, and were zero before the library filled them.
        Ok(unsafe { attr.assume_init() })
    }

    /// Takes the asynchronous events that have come, without blocking.
    pub(super) fn take_events(&self) {
        let mut taken = abi::AsyncEvent { element: std::ptr::null_mut(), event_type: 0 };
        // SAFETY: the context lives, the struct has the library's layout, and the descriptor does
        // not block.
        while unsafe { (self.verbs.get_async_event)(self.raw(), &raw mut taken) } == 0 {
            match taken.event_type {
                event::DEVICE_FATAL => {
                    tracing::error!(device = self.name, "the device reports a fatal error");
                    self.is_gone.store(true, Ordering::Relaxed);
                }
                event::PORT_ERR => tracing::warn!(device = self.name, "a port went down"),
                event::PORT_ACTIVE => tracing::info!(device = self.name, "a port came up"),
                other => tracing::debug!(device = self.name, event = other, "event"),
            }
            // SAFETY: taken above and acknowledged once, so that the object of the event can be
            // destroyed.
            unsafe { (self.verbs.ack_async_event)(&raw mut taken) };
        }
    }

    /// Whether the device has failed or was removed.
    pub(super) fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Relaxed)
    }

    /// An error if the device is gone.
    pub(super) fn check_gone(&self) -> Result<(), RailError> {
        if self.is_gone() { Err(self.gone("it reported a fatal error")) } else { Ok(()) }
    }

    fn gone(&self, why: &str) -> RailError {
        RailError::Gone(format!("{}: {why}", self.name))
    }

    /// The error of a failed call on this device. A removed device fails every call with EIO or
    /// ENODEV, but a working one may fail so too, when it cannot be joined with a peer. So the
    /// device is asked something that a working one can always answer.
    pub(super) fn error(&self, call: &str, errno: i32) -> RailError {
        if matches!(errno, libc::EIO | libc::ENODEV) && self.ask_device().is_err() {
            self.is_gone.store(true, Ordering::Relaxed);
            return self.gone("it was removed, or does not answer");
        }
        RailError::os(format_args!("{}: {call}", self.name), errno)
    }
}

/// There is always a vector 0.
fn nth_vector(nth: usize, count: i32) -> i32 {
    let count = usize::try_from(count).unwrap_or(0).max(1);
    i32::try_from(nth % count).unwrap_or(0)
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: every object made on it holds it, so none is left; closed once.
        let returned = unsafe { (self.verbs.close_device)(self.raw()) };
        complain("ibv_close_device", returned);
    }
}

/// Makes reads of a descriptor return at once.
pub(super) fn set_nonblocking(fd: std::os::fd::BorrowedFd<'_>) -> Result<(), i32> {
    fcntl_getfl(fd)
        .and_then(|flags| fcntl_setfl(fd, flags | OFlags::NONBLOCK))
        .map_err(rustix::io::Errno::raw_os_error)
}

/// Logs that an object could not be destroyed. Nothing else can be done about it.
pub(super) fn complain(call: &str, returned: i32) {
    if let Err(errno) = check(returned) {
        let error = std::io::Error::from_raw_os_error(errno);
        tracing::error!(%error, "{call} failed: something is left until the process ends");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completion_queues_take_turns_with_the_vectors() {
        let of = |count| (7..13).map(|nth| nth_vector(nth, count)).collect::<Vec<_>>();
        assert_eq!(of(4), [3, 0, 1, 2, 3, 0]);
        for none in [1, 0, -1] {
            assert_eq!(of(none), [0; 6]);
        }
        assert!(nth_vector(usize::MAX, i32::MAX) >= 0);
    }
}
