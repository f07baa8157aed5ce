//! NIXL's status for each error, and the message beside it.

use uccl_p2p::Error as Engine;

/// NIXL's `nixl_status_t`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(i32)]
pub(crate) enum Status {
    InProgress = 1,
    Success = 0,
    InvalidParam = -2,
    Backend = -3,
    NotFound = -4,
    NotAllowed = -6,
    RepostActive = -7,
    RemoteDisconnect = -10,
    Canceled = -11,
}

/// Why a call of NIXL's failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Engine(#[from] Engine),
    #[error("agent {0:?} is unknown here: load its metadata first")]
    UnknownAgent(String),
    #[error("{0}")]
    Invalid(String),
    #[error("the transfer is still under way: it can be posted again when it has ended")]
    StillActive,
    #[error("internal error: {0}")]
    Internal(&'static str),
}

pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub(crate) fn status(&self) -> Status {
        match self {
            Self::Engine(e) => of_engine(e),
            Self::UnknownAgent(_) => Status::NotFound,
            Self::Invalid(_) => Status::InvalidParam,
            Self::StillActive => Status::RepostActive,
            Self::Internal(_) => Status::Backend,
        }
    }
}

/// An advert of an endpoint that has since been replaced counts as a disconnect: its maker is gone.
fn of_engine(e: &Engine) -> Status {
    match e {
        Engine::ConnectionLost { .. }
        | Engine::Connect { .. }
        | Engine::ForeignAdvert { .. }
        | Engine::UnknownConnection(_) => Status::RemoteDisconnect,
        Engine::Cancelled { .. } => Status::Canceled,
        Engine::Invalid(_)
        | Engine::OutsideRegion { .. }
        | Engine::OutsideAdvert { .. }
        | Engine::Config { .. } => Status::InvalidParam,
        Engine::UnknownRegion(_) => Status::NotFound,
        Engine::RemoteAccess { .. } => Status::NotAllowed,
        _ => Status::Backend,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_peer_that_is_gone_is_told_from_other_faults() {
        let lost = Engine::ConnectionLost { peer: "peer".into(), reason: "it died".into() };
        assert_eq!(Error::from(lost).status(), Status::RemoteDisconnect);
        let late = Engine::DeadlineExceeded { after: Duration::from_secs(1), peer: None };
        assert_eq!(Error::from(late).status(), Status::Backend);
        assert_eq!(Error::UnknownAgent("a".into()).status(), Status::NotFound);
    }
}
