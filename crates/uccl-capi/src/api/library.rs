//! The text of a thread's last error, and the version of the library.

use std::ffi::{CStr, c_char};

use crate::failure;

/// The reason of this thread's last failure, and the remedy; an empty text if no call has failed. A
/// call that succeeds leaves it. The next failure on this thread overwrites it.
#[unsafe(no_mangle)]
pub extern "C" fn uccl_last_error() -> *const c_char {
    failure::last()
}

/// The version of the library, such as "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn uccl_version() -> *const c_char {
    const VERSION: &CStr =
        match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => c"",
        };
    VERSION.as_ptr()
}
