//! The interfaces of libibverbs and librdmacm: layouts, and the functions found in them at run time.

pub(super) mod abi;
pub(super) mod cm_abi;
mod cm_library;
mod library;

use std::io;

pub(super) use cm_library::Cm;
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
