//! Dispatch and combine between ranks with GPUs: small batches in low latency mode here, and
//! [`normal`] mode.
//!
//! The host enqueues kernels on the caller's stream, and the kernels (`kernels/ep*.cuh`) do all
//! work. They also number and place calls, so that a CUDA graph can repeat them. The calls of a
//! rank have to begin in the same order on its GPU as those of the others on theirs. They follow
//! the protocol of the CPU's calls, with the same words in the windows, and their results have the
//! same bits. The host waits only when it asks for counts.

mod group;
mod hosted;
mod kernels;
mod low_latency;
mod memory;
pub mod normal;
mod params;
mod routing;
mod status;
mod told;
mod watch;
mod window;

pub use self::{
    group::{Config, Group, RESERVED, Reach},
    low_latency::{Combine, Dispatch, Handle},
    memory::{
        COMBINE_SCRATCH_LEN, Choices, Combined, Outputs, Results, ScalesOut, Table, Tokens,
        records_len, scratch_len,
    },
    params::{MAX_RANKS, MAX_TOKENS, layout_assertions},
};
