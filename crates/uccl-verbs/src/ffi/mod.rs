//! The interfaces of libibverbs: layouts, and the functions found in it at run time.

pub(super) mod abi;
mod library;

use std::io;

pub(super) use library::Verbs;

/// The errno of this thread's last failed call; `EIO` if it set none.
pub(super) fn errno() -> i32 {
    match io::Error::last_os_error().raw_os_error() {
        Some(errno) if errno != 0 => errno,
        _ => libc::EIO,
    }
}

/// The result of a call that returns 0, an errno (of either sign), or -1 with the errno in `errno`.
pub(super) fn check(returned: i32) -> Result<(), i32> {
    match returned {
        0 => Ok(()),
        -1 => Err(errno()),
        number => Err(number.wrapping_abs()),
    }
}
