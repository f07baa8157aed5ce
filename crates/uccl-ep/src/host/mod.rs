//! The calls of ranks that have no GPU.

mod barrier;
pub(crate) mod blocks;
pub mod combine;
pub mod dispatch;
pub(crate) mod dropped_blocks;
pub(crate) mod group;
mod scratch;
mod wait_times;
pub(crate) mod window;
