//! Expert parallelism.

pub mod error;
pub mod numerics;
pub mod placing;
pub mod protocol;
pub mod routing;

pub use error::{Error, Phase, Result};
