//! Outcomes of a worker's operations.

use uccl_p2p::Error;

use super::Worker;
use crate::history;

/// The outcome of an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Completion {
    Done,
    /// The operation ended early and is fenced: its memory is free.
    Fenced,
    Refused,
    /// The connection or the endpoint is gone.
    Lost,
    /// The peer may still touch this process's memory.
    Stuck,
}

impl Worker {
    /// The outcome that an error stands for. Reports an error that no action of the storm can
    /// cause.
    pub(super) fn judge(&self, e: &Error) -> Completion {
        match e {
            Error::Cancelled { .. }
            | Error::DeadlineExceeded { .. }
            | Error::Interrupted
            | Error::Full { .. }
            | Error::Truncated { .. } => Completion::Fenced,
            Error::Invalid(why) if why.contains(" met a receive of ") => Completion::Fenced,
            Error::RemoteAccess { .. } | Error::ForeignAdvert { .. } => Completion::Refused,
            Error::ConnectionLost { .. } | Error::Closed | Error::UnknownConnection(_) => {
                Completion::Lost
            }
            Error::UnknownRegion(_) if self.is_going() => Completion::Lost,
            Error::StillTouched { .. } => Completion::Stuck,
            e => history::broken(format!("nothing that was done brings about: {e}")),
        }
    }
}
