//! NCCL's network and tuner plugin over `uccl-flow`: NCCL loads `libnccl-net-uccl.so` and takes the
//! newest table that it knows.
//!
//! ```text
//!   tables.rs    the tables                                  settings.rs   variables
//!   entry/       functions that NCCL calls                   tuner.rs      the tuner's functions
//!   process.rs   contexts, and the flows that they share     choice.rs     protocols and channels
//!   comm.rs      communicators and requests                  devices.rs    devices and their properties
//!   pending.rs   connects that are not done                  log.rs        NCCL's log
//!   fault.rs     errors as NCCL's results
//! ```
//!
//! No function blocks, and no panic leaves one. A function that NCCL may call with a null pointer
//! takes it.

mod choice;
mod comm;
mod devices;
mod entry;
mod fault;
mod log;
mod pending;
mod process;
mod settings;
pub mod tables;
mod tuner;
