//! The task of a group of ranks, and their measurements.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::shape::Shape;

/// Ranks that make the same calls.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Ranks {
    pub(crate) shape: Shape,
    pub(crate) rounds: u32,
}

/// A rank's times of one kind of call.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct CallTimes {
    /// The name of the call.
    pub(crate) name: String,
    /// Bytes of the rows that experts read or write.
    pub(crate) bytes: u64,
    /// The part of these that belongs to other ranks.
    pub(crate) foreign: u64,
    /// Bytes of rows that cross to other nodes.
    pub(crate) across: u64,
    /// How long each round's call took.
    pub(crate) calls: Vec<Duration>,
    /// How long each round's copy of as many bytes took.
    pub(crate) copies: Vec<Duration>,
}
