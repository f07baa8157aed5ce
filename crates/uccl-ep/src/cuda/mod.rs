//! Dispatch and combine between ranks that have GPUs, on one host: of few tokens here, and in [`normal`] mode.
//!
//! The host enqueues kernels on the caller's stream, and all is done by these (`kernels/ep*.cuh`): they also number and place calls, so
//! that a CUDA graph can repeat them. Calls of a rank have to begin in the same order on its GPU as on those of the others. They follow the protocol of the CPU's calls, with the
//! same words in the windows, and make the same bits. The host waits for nothing, but where it asks how much arrives.

mod combine;
mod dispatch;
mod group;
mod hosted;
mod kernels;
mod memory;
pub mod normal;
mod params;
mod routing;
mod status;
mod told;
mod watch;
mod window;

pub use self::{
    combine::Combine,
    dispatch::{Dispatch, Handle},
    group::{Config, Group, RESERVED, Reach},
    memory::{
        COMBINE_SCRATCH_LEN, Choices, Combined, Outputs, Results, ScalesOut, Table, Tokens,
        records_len, scratch_len,
    },
    params::{MAX_RANKS, MAX_TOKENS, layout_assertions},
};
