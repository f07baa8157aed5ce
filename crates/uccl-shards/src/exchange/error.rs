//! Why a call failed.

use std::time::Duration;

use crate::plan::PlanError;

/// The result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call failed. After a failed fetch no byte of it lands any more, and the target's memory
/// may hold bytes of several versions.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no plan for these ranks.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The engine refused or failed.
    #[error(transparent)]
    Engine(#[from] uccl_p2p::Error),
    /// Bytes that are no manifest.
    #[error("not a manifest of weights: {0}")]
    Manifest(String),
    /// A call at the wrong time, or with a value that cannot be.
    #[error("{0}")]
    Invalid(String),
    /// The fetch was aborted. It has been fenced: no byte of it lands any more.
    #[error("the fetch was aborted")]
    Aborted,
    /// The deadline passed first. The fetch has been fenced: no byte of it lands any more.
    #[error("{waited:?} passed: {reason}")]
    Timeout {
        /// The time that it had.
        waited: Duration,
        /// What it waited for.
        reason: String,
    },
}
