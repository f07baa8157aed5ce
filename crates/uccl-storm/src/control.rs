//! Messages: lines of JSON between the two ends and the driver, which forwards some of them.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::content::Content;

/// Identifies a grant. No two grants of a storm have the same id.
pub(crate) type GrantId = u64;

/// A message, sent as one line.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum ControlMessage {
    /// To the peer: the address and the instance of my current endpoint.
    Up { addr: SocketAddr, instance: u64 },
    /// To the peer: this memory is yours until you return it or I revoke it.
    Grant { worker: usize, id: GrantId, advert: Vec<u8>, content: Content },
    /// To the peer: I no longer use this grant, and this is its content. `None`: a write of mine
    /// may still land.
    Return { worker: usize, id: GrantId, content: Option<Content> },
    /// To the peer: I have taken this grant back.
    Revoked { worker: usize, id: GrantId },
    /// To the peer: an access to your grant was refused.
    Refused { worker: usize, id: GrantId, why: String },
    /// To both ends: finish.
    End,
    /// To both ends: something went wrong elsewhere; send your history.
    Tell,
    /// To the driver: I have ended, and all memory was as it should be.
    Ended { done: u64, failed: u64, refused: u64, kept: u64 },
    /// To the driver: a promise was broken.
    Broken { what: String },
    /// To the driver: an action of mine and its time.
    Told { at_ns: u64, what: String },
}

impl ControlMessage {
    pub(crate) fn line(&self) -> String {
        // These types always serialize.
        serde_json::to_string(self).unwrap_or_default()
    }

    pub(crate) fn parse(line: &str) -> Option<Self> {
        serde_json::from_str(line).ok()
    }

    /// Whether the driver forwards it to the other end.
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
