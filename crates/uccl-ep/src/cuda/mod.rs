//! Dispatch and combine between ranks with GPUs: small batches in [`low_latency`] mode, larger ones
//! in [`normal`] mode.
//!
//! The host enqueues kernels on the caller's stream, and the kernels (`kernels/ep`) do all
//! work. They also number and place calls, so that a CUDA graph can repeat them. The calls of a
//! rank have to begin in the same order on its GPU as those of the others on theirs. They follow
//! the protocol of the CPU's calls, with the same words in the windows, and their results have the
//! same bits. The host waits only when it asks for counts.
//!
//! ```text
//!   low_latency   normal      launches of calls: dispatch, combine
//!            \     /
//!             group           a rank's end: its window or the host's, its kernels, its reports
//! ```

mod call;
mod config;
mod group;
mod host_windows;
mod join;
mod kernels;
pub mod low_latency;
mod mailbox;
mod memory;
pub mod normal;
mod occupancy;
mod offer;
mod params;
mod regroup;
mod routing;
mod state;
mod status;
mod watch;
mod window;
mod windows;

pub use self::{
    config::{Config, Reach},
    group::{Group, MaskChange},
    memory::{COMBINE_SCRATCH_LEN, Choices, scratch_len},
    occupancy::{Occupancy, RESERVED},
    params::{MAX_TOKENS, ORIGIN_RANK, kernel_header, layout_assertions},
    windows::PoolHold,
};
pub use crate::shared::rank_set::{MAX_RANKS, RankSet};
