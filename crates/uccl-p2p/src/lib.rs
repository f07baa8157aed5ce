#![doc = include_str!("../README.md")]

#[cfg(test)]
mod chaos_tests;
pub mod config;
mod descriptors;
mod devices;
mod drive;
pub mod endpoint;
pub mod error;
mod host_address;
pub mod ids;
mod process;
mod types;

pub use bytes::Bytes;
pub use config::{Checksum, Config, Selection, Setting, Transport, take_notices};
pub use devices::path_elsewhere;
pub use endpoint::*;
pub use error::{Error, Result};
pub use ids::{ConnId, MrId, TransferId};
pub use uccl_device as device;
pub use uccl_wire as wire;
