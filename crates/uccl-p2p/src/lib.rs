//! The point-to-point engine: endpoints, regions, connections, transfers, notifications.
//!
//! An [`Endpoint`] listens, connects, registers memory and moves it. Every transfer ends: done, or
//! failed with an [`Error`] that says why.

#[cfg(test)]
mod chaos_tests;
pub mod config;
mod devices;
pub mod endpoint;
mod engine;
pub mod error;
pub mod ids;
mod process;
mod types;

pub use bytes::Bytes;
pub use config::{Checksum, Config, Selection, Setting, Transport, take_notices};
pub use endpoint::*;
pub use error::{Error, Result};
pub use ids::{ConnId, MrId, TransferId};
pub use uccl_device as device;
pub use uccl_wire as wire;
