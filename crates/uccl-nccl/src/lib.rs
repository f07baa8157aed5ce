//! NCCL's network and tuner plugin over `uccl-flow`, and its one-sided one over `uccl-p2p`: NCCL
//! loads `libnccl-net-uccl.so` and takes the newest table of each kind that it knows.
//!
//! ```text
//!   tables.rs    the tables                                  settings.rs   variables
//!   entry/       functions that NCCL calls                   tuner.rs      the tuner's functions
//!   process.rs   contexts, and the flows that they share     choice.rs     protocols and channels
//!   comm.rs      communicators and requests                  devices.rs    devices and their properties
//!   pending.rs   connects that are not done                  log.rs        NCCL's log
//!   fault.rs     errors as NCCL's results
//!   rma.rs       the one-sided tables, over `uccl-p2p`
//! ```
//!
//! No function blocks but the one-sided `connect`, which all ranks call together and which has a
//! deadline. No panic leaves one. A function that NCCL may call with a null pointer
//! takes it.

#[cfg(test)]
#[path = "../../uccl-flow/tests/allocations/mod.rs"]
mod allocations;
mod choice;
mod comm;
mod devices;
mod entry;
mod fault;
mod log;
mod pending;
mod process;
pub mod rma;
mod rma_error;
mod settings;
pub mod tables;
mod tuner;
