//! Dispatch and combine of few tokens between ranks that have GPUs, on one host.
//!
//! The host computes what the protocol needs for a call (its number, its place, the calls to wait for) and enqueues kernels on
//! the caller's stream; all else is done by the kernels (`kernels/ep*.cuh`). They follow the protocol of the CPU's calls, with the
//! same words in the windows, and make the same bits. The host waits for nothing.

mod combine;
mod dispatch;
mod group;
mod kernels;
mod memory;
mod params;
mod status;
mod window;

pub use self::{
    combine::Combine,
    dispatch::{Dispatch, Handle},
    group::{Config, Group},
    memory::{Choices, Combined, Outputs, Results, ScalesOut, Table, Tokens, scratch_len},
    params::{MAX_RANKS, MAX_TOKENS, layout_assertions},
};
