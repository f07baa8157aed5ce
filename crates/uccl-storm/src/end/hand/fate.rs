//! What comes of what a hand tries.

use uccl_p2p::Error;

use super::Hand;
use crate::history;

/// What came of something.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fate {
    Done,
    /// Called off, and fenced.
    Fenced,
    Refused,
    /// Its connection is gone.
    Lost,
    /// And the peer may still touch our memory.
    Stuck,
}

impl Hand {
    /// What an error says of memory; some must not be.
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
