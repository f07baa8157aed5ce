//! The calls of ranks that have no GPU.

mod barrier;
pub(crate) mod blocks;
pub mod combine;
pub mod dispatch;
pub(crate) mod group;
pub(crate) mod leaving;
mod scratch;
mod waits;
pub(crate) mod window;
