//! Errors of one-sided calls.

use uccl_nccl_abi::NcclResult;
use uccl_p2p::Error;

/// Why a one-sided call fails.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum RmaError {
    /// The engine's reason.
    #[error("one-sided {action}: {error}")]
    Engine { action: &'static str, error: Error },
    /// The engine's reason, in which a rank is involved.
    #[error("one-sided {action} with rank {rank}: {error}")]
    Peer { action: &'static str, rank: usize, error: Error },
    /// Ranks that have not joined their group in time.
    #[error("ranks {ranks:?} have not joined the group of {of} within {seconds} s")]
    Missing { ranks: Vec<usize>, of: usize, seconds: u64 },
    /// A handle that another kind of listener made.
    #[error("the handle of rank {rank} cannot be read: {reason}")]
    Handle { rank: usize, reason: String },
    /// The tables are not asked for.
    #[error("the one-sided tables are off, unless UCCL_NCCL_RMA=1")]
    Off,
    /// The group has failed before.
    #[error("the group has failed: {0}")]
    Failed(String),
}

impl RmaError {
    pub(crate) fn of_engine(action: &'static str) -> impl FnOnce(Error) -> Self {
        move |error| Self::Engine { action, error }
    }

    pub(crate) fn of_peer(action: &'static str, rank: usize) -> impl FnOnce(Error) -> Self {
        move |error| Self::Peer { action, rank, error }
    }

    pub(crate) fn result(&self) -> NcclResult {
        match self {
            Self::Engine { error, .. } | Self::Peer { error, .. } => of_engine(error),
            Self::Missing { .. } | Self::Failed(_) => NcclResult::REMOTE_ERROR,
            Self::Handle { .. } => NcclResult::INTERNAL_ERROR,
            Self::Off => NcclResult::INVALID_USAGE,
        }
    }
}

fn of_engine(error: &Error) -> NcclResult {
    match error {
        Error::Os { .. } | Error::Panicked(_) | Error::Gpu { .. } | Error::StillTouched { .. } => {
            NcclResult::SYSTEM_ERROR
        }
        Error::OutsideRegion { .. }
        | Error::OutsideAdvert { .. }
        | Error::UnknownRegion(_)
        | Error::Invalid(_)
        | Error::Closed
        | Error::Forked { .. } => NcclResult::INTERNAL_ERROR,
        Error::Config { .. } => NcclResult::INVALID_USAGE,
        _ => NcclResult::REMOTE_ERROR,
    }
}
