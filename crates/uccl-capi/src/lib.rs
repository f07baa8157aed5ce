//! `libuccl_p2p.so`: the engine for C and C++.
//!
//! [`api`] is the C API, from which `include/uccl.h` is made. [`engine`] has the names and the
//! binary interface of UCCL's engine library, which `include/uccl_engine.h` declares. Both only
//! translate: `uccl-p2p` carries out the calls, and `uccl-wire` defines the bytes.
//!
//! No call panics into its caller, and nothing that a caller holds is an address: a handle that has
//! outlived its object is refused.

#[cfg(not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
compile_error!("the layouts in engine/cxx.rs are those of Linux on x86-64 and aarch64");

pub mod api;
mod args;
pub mod engine;
mod failure;
mod handles;
