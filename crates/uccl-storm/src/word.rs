//! What the two ends and the driver say to each other: lines of JSON, which the driver passes on.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::content::Content;

/// Names a grant: no two of a storm have the same.
pub(crate) type GrantId = u64;

/// A line.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Word {
    /// To the peer: this is the endpoint to reach me at from now on.
    Up { addr: SocketAddr, instance: u64 },
    /// To the peer: this memory is yours, until you give it back or I take it.
    Grant { hand: usize, id: GrantId, advert: Vec<u8>, content: Content },
    /// To the peer: I use it no more, and this lies there; `None`: a write of mine may still be on its way.
    Return { hand: usize, id: GrantId, content: Option<Content> },
    /// To the peer: I have taken it.
    Revoked { hand: usize, id: GrantId },
    /// To the peer: an access to your grant was refused.
    Refused { hand: usize, id: GrantId, why: String },
    /// To both: come to an end.
    End,
    /// To both: something went wrong elsewhere; say what you did.
    Tell,
    /// To the driver: I have ended, and all memory was as it should be.
    Ended { done: u64, failed: u64, refused: u64, kept: u64 },
    /// To the driver: a promise was broken.
    Broken { what: String },
    /// To the driver: what I did, and when.
    Told { at_ns: u64, what: String },
}

impl Word {
    pub(crate) fn line(&self) -> String {
        // Nothing in it can fail to be written.
        serde_json::to_string(self).unwrap_or_default()
    }

    pub(crate) fn parse(line: &str) -> Option<Self> {
        serde_json::from_str(line).ok()
    }

    /// Whether the driver passes it on to the other end.
    pub(crate) fn is_for_peer(&self) -> bool {
        matches!(
            self,
            Self::Up { .. }
                | Self::Grant { .. }
                | Self::Return { .. }
                | Self::Revoked { .. }
                | Self::Refused { .. }
        )
    }
}
