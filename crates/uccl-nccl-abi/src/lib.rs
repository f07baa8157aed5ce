//! The binary interface of NCCL's plugins: network tables v8 to v12, tuner tables v4 and v5,
//! one-sided tables v13 to v16; and NCCL's plan for a device's speed ([`plan`]).
//!
//! A plugin exports each table as a data symbol (`ncclNetPlugin_v11`), which is the table itself
//! and not a pointer to it. Sizes and offsets are those of NCCL 2.19 to 2.32 on 64-bit Linux; the
//! compiler checks them here ([`properties`], [`net`], [`tuner`], [`rma`]).

pub mod net;
pub mod plan;
pub mod properties;
pub mod rma;
pub mod tuner;
mod types;

pub use types::{
    CommConfig, DeviceHandle, HANDLE_BYTES, Logger, MAX_REQUESTS, NcclResult, NetAttributes,
    NetCommAttributes, OPTIONAL_RECV_COMPLETION, Profiler, flags, level, memory,
};
