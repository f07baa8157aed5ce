//! The library's objects: each starts with a `fid` and has to be closed.

use std::{
    ffi::{c_int, c_void},
    fmt, ptr,
    ptr::NonNull,
};

use super::raw;

/// How often closing is tried again while something still uses the object.
const CLOSE_ATTEMPTS: usize = 100;

/// A kind of object.
///
/// # Safety
/// The type is laid out as C's, and starts with a [`raw::Fid`].
pub(super) unsafe trait Kind {}

// SAFETY: laid out as in the library's headers, and starts with a fid.
unsafe impl Kind for raw::Fabric {}
// SAFETY: as above.
unsafe impl Kind for raw::Domain {}
// SAFETY: as above.
unsafe impl Kind for raw::Mr {}
// SAFETY: as above.
unsafe impl Kind for raw::Av {}
// SAFETY: as above.
unsafe impl Kind for raw::Cq {}
// SAFETY: as above.
unsafe impl Kind for raw::Ep {}

/// An open object that we own. It is closed when dropped.
pub(super) struct Object<T: Kind> {
    object: NonNull<T>,
    fate: ObjectState,
}

#[derive(Clone, Copy)]
enum ObjectState {
    Open,
    Closed,
    /// It stays open until the process ends.
    Kept,
    /// The provider failed to close it, with this error, and its state is unknown.
    Lost(i32),
}

// SAFETY: the library's objects are not tied to a thread. Callers must see that calls on one object
// do not overlap where the provider does not allow it.
unsafe impl<T: Kind> Send for Object<T> {}
// SAFETY: as above.
unsafe impl<T: Kind> Sync for Object<T> {}

impl<T: Kind> fmt::Debug for Object<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:p}", self.object)
    }
}

impl<T: Kind> Object<T> {
    /// Takes the object that a call makes.
    ///
    /// # Errors
    /// The error code that the call returned.
    ///
    /// # Safety
    /// `make` must set the pointer to an open object when it returns 0.
    pub(super) unsafe fn made(make: impl FnOnce(*mut *mut T) -> c_int) -> Result<Self, i32> {
        let mut made = ptr::null_mut();
        match (make(&raw mut made), NonNull::new(made)) {
            (0, Some(object)) => Ok(Self { object, fate: ObjectState::Open }),
            (0, None) => Err(-libc::ENOMEM),
            (code, _) => Err(code),
        }
    }

    /// The same object, for another thread. It is not closed when that is dropped.
    ///
    /// # Safety
    /// The object must stay open as long as the returned alias exists.
    pub(super) unsafe fn alias(&self) -> Self {
        Self { object: self.object, fate: ObjectState::Kept }
    }

    pub(super) fn as_ptr(&self) -> *mut T {
        self.object.as_ptr()
    }

    /// The object, to read its tables.
    pub(super) fn get(&self) -> &T {
        // SAFETY: it stays open while `self` exists, and the library does not move it.
        unsafe { self.object.as_ref() }
    }

    pub(super) fn fid(&self) -> *mut raw::Fid {
        self.object.as_ptr().cast()
    }

    fn ops(&self) -> Option<&raw::Ops> {
        // SAFETY: an open object starts with a fid; its table is the provider's for as long.
        unsafe { (*self.fid()).ops.as_ref() }
    }

    /// Binds another object to it.
    ///
    /// # Errors
    /// The error code that the call returned.
    pub(super) fn bind<U: Kind>(&self, other: &Object<U>, flags: u64) -> Result<(), i32> {
        let bind = self.ops().and_then(|ops| ops.bind).ok_or(-libc::ENOSYS)?;
        // SAFETY: both are open.
        checked(unsafe { bind(self.fid(), other.fid(), flags) })
    }

    /// Gives it a command.
    ///
    /// # Errors
    /// The error code that the call returned.
    ///
    /// # Safety
    /// The argument must be of the type that the command takes.
    pub(super) unsafe fn control(&self, command: c_int, argument: *mut c_void) -> Result<(), i32> {
        let control = self.ops().and_then(|ops| ops.control).ok_or(-libc::ENOSYS)?;
        // SAFETY: the object is open; the argument is the caller's promise.
        checked(unsafe { control(self.fid(), command, argument) })
    }

    /// Enables it.
    ///
    /// # Errors
    /// The error code that the call returned.
    pub(super) fn enable(&self) -> Result<(), i32> {
        // SAFETY: this command takes nothing.
        unsafe { self.control(raw::FI_ENABLE, ptr::null_mut()) }
    }

    /// Closes it; it must not be used after that. If something still uses it, closing is tried
    /// again, a bounded number of times.
    ///
    /// # Errors
    /// The error code that the call returned. If it is `-EBUSY`, closing may be tried again later;
    /// after any other error the object is lost.
    pub(super) fn close(&mut self) -> Result<(), i32> {
        match self.fate {
            ObjectState::Open => {}
            ObjectState::Closed | ObjectState::Kept => return Ok(()),
            ObjectState::Lost(code) => return Err(code),
        }
        let close = self.ops().and_then(|ops| ops.close).ok_or(-libc::ENOSYS)?;
        for _ in 0..CLOSE_ATTEMPTS {
            // SAFETY: it is open, and we, its only owner, do not call this again once it is closed
            // or lost.
            let code = unsafe { close(self.fid()) };
            if code != -libc::EBUSY && code != -libc::EAGAIN {
                let closed = checked(code);
                self.fate = closed.map_or_else(ObjectState::Lost, |()| ObjectState::Closed);
                return closed;
            }
            std::thread::yield_now();
        }
        Err(-libc::EBUSY)
    }

    /// Leaves it open until the process ends.
    pub(super) fn keep(&mut self) {
        self.fate = ObjectState::Kept;
    }
}

impl<T: Kind> Drop for Object<T> {
    fn drop(&mut self) {
        if let ObjectState::Open = self.fate
            && let Err(code) = self.close()
        {
            tracing::warn!(code, object = std::any::type_name::<T>(), "libfabric did not close it");
        }
    }
}

/// Turns a negative return code into an error.
pub(super) fn checked(code: c_int) -> Result<(), i32> {
    if code < 0 { Err(code) } else { Ok(()) }
}
