//! The NIXL backend `UCCL`, as a plugin that stock NIXL wheels load.
//!
//! `cpp/` is NIXL's C++ interface, declared from its binary layout; this crate is everything behind
//! it. `host.rs` looks at the NIXL that loads the plugin before any of its objects is touched.

// NIXL gives the library its name.
#![allow(non_snake_case)]
#![cfg_attr(no_cxx, allow(dead_code))]

mod agent;
mod conn_info;
mod cost;
#[cfg(not(no_cxx))]
mod entry;
mod ffi;
mod host;
mod log;
mod memory;
mod params;
mod regions;
mod remote;
mod status;
mod transfer;
mod ucx;
