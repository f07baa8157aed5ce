//! Why a handshake did not succeed, and whether it is worth another try.

use std::io;

use crate::error::Error;

/// Why a handshake did not succeed.
pub(super) enum HandshakeFailure {
    /// Nobody listens, or the peer left before it said anything: a peer that is still starting
    /// looks like that.
    Nobody(io::Error),
    /// The address cannot be reached, or does not answer.
    Unreachable(Error),
    /// The peer is there, but the handshake failed; or there is no time left.
    Failed(Error),
}

impl From<Error> for HandshakeFailure {
    fn from(e: Error) -> Self {
        Self::Failed(e)
    }
}

/// Whether a socket's error means that nobody listens, or that the listener has gone.
pub(super) fn is_nobody(e: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(e.kind(), ConnectionRefused | ConnectionReset | ConnectionAborted | BrokenPipe)
}

/// Whether a socket's error means that no way leads to the address.
pub(super) fn is_unreachable(e: &io::Error) -> bool {
    use io::ErrorKind::{AddrNotAvailable, HostUnreachable, NetworkUnreachable, TimedOut};
    matches!(e.kind(), AddrNotAvailable | HostUnreachable | NetworkUnreachable | TimedOut)
}

impl HandshakeFailure {
    pub(super) fn reason(&self) -> String {
        match self {
            Self::Nobody(e) => e.to_string(),
            Self::Unreachable(Error::Connect { reason, .. })
            | Self::Failed(Error::Connect { reason, .. }) => reason.clone(),
            Self::Unreachable(e) | Self::Failed(e) => e.to_string(),
        }
    }
}
