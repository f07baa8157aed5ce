//! The entry points that NIXL looks for in a plugin.

use std::{
    ffi::{c_char, c_void},
    panic::catch_unwind,
    ptr,
};

use crate::{host, log};

unsafe extern "C" {
    /// cpp/plugin.cpp. Takes a string that lives for ever.
    fn uccl_nixl_plugin(version: *const c_char) -> *mut c_void;
}

const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");

/// Gives NIXL the plugin, unless NIXL is laid out in another way than the plugin.
#[unsafe(no_mangle)]
extern "C" fn nixl_plugin_init() -> *mut c_void {
    log::init();
    match catch_unwind(host::check) {
        // SAFETY: ends in a zero, and is a constant.
        Ok(Ok(())) => unsafe { uccl_nixl_plugin(VERSION.as_ptr().cast()) },
        Ok(Err(mismatch)) => {
            tracing::error!("{mismatch}");
            ptr::null_mut()
        }
        Err(_) => ptr::null_mut(),
    }
}

/// Nothing is left to do: NIXL destroys each backend before.
#[unsafe(no_mangle)]
extern "C" fn nixl_plugin_fini() {}
