//! Outcomes of a hand's operations.

use uccl_p2p::Error;

use super::Hand;
use crate::history;

/// The outcome of an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fate {
    Done,
    /// The operation ended early and is fenced: its memory is free.
    Fenced,
    Refused,
    /// The connection or the endpoint is gone.
    Lost,
    /// The peer may still touch this process's memory.
    Stuck,
}

impl Hand {
    /// The outcome that an error stands for. Reports an error that no action of the storm can
    /// cause.
    pub(super) fn judge(&self, e: &Error) -> Fate {
        match e {
            Error::Cancelled { .. }
            | Error::DeadlineExceeded { .. }
            | Error::Interrupted
            | Error::Full { .. }
            | Error::Truncated { .. } => Fate::Fenced,
            Error::Invalid(why) if why.contains(" met a receive of ") => Fate::Fenced,
            Error::RemoteAccess { .. } | Error::ForeignAdvert { .. } => Fate::Refused,
            Error::ConnectionLost { .. } | Error::Closed | Error::UnknownConnection(_) => {
                Fate::Lost
            }
            Error::UnknownRegion(_) if self.is_going() => Fate::Lost,
            Error::StillTouched { .. } => Fate::Stuck,
            e => history::broken(format!("nothing that was done brings about: {e}")),
        }
    }
}
