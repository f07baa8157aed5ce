//! libibverbs's interface: layouts, and the functions found in it at run time.

pub(super) mod abi;
mod library;

use std::io;

pub(super) use library::Verbs;

/// What the last call of this thread failed with; `EIO` where it did not say.
pub(super) fn errno() -> i32 {
    match io::Error::last_os_error().raw_os_error() {
        Some(errno) if errno != 0 => errno,
        _ => libc::EIO,
    }
}

/// What a call says that returns 0, or an error's number, or -1 and leaves it in `errno`.
pub(super) fn check(returned: i32) -> Result<(), i32> {
    match returned {
        0 => Ok(()),
        -1 => Err(errno()),
        number => Err(number.wrapping_abs()),
    }
}
