//! The pre-shared key and the proof that a peer knows it.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use subtle::ConstantTimeEq;

use super::Role;
use crate::record::{Opener, Sealer, StreamKey};

/// Bytes of a proof.
pub(crate) const PROOF_LEN: usize = 32;

/// A secret that both ends of a connection were given.
///
/// Holds the key schedule of HMAC-SHA256, not the secret's bytes. Take at least 16 random bytes: an
/// attacker that poses as an acceptor can test guesses at leisure against the proof it is shown.
#[derive(Clone)]
pub struct Psk(Hmac<Sha256>);

/// An empty secret proves nothing; leave the key out to go without.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a pre-shared key must not be empty")]
pub struct EmptyPsk;

impl Psk {
    /// Takes a secret of any length but zero.
    ///
    /// # Errors
    /// The secret is empty.
    pub fn new(secret: &[u8]) -> Result<Self, EmptyPsk> {
        if secret.is_empty() {
            return Err(EmptyPsk);
        }
        // HMAC takes keys of every length, so the empty one is the only refusal.
        Hmac::new_from_slice(secret).map(Self).map_err(|_| EmptyPsk)
    }

    /// The proof of `role` that it knows the secret, in a handshake that began with these two
    /// PRELUDE bodies. The role is part of it, so that a proof sent back to its maker proves
    /// nothing.
    pub(super) fn proof(&self, role: Role, connector: &[u8], acceptor: &[u8]) -> [u8; PROOF_LEN] {
        let label = match role {
            Role::Connector => b"uccl connector proof",
            Role::Acceptor => b"uccl acceptor proof\0",
        };
        self.mac(label, connector, acceptor)
    }

    /// The key of the stream with a handshake that began with these two PRELUDE bodies. Both ends
    /// have put random bytes into them, so no two streams have the same.
    pub(super) fn session(&self, connector: &[u8], acceptor: &[u8]) -> Session {
        Session(StreamKey::new(&self.mac(b"uccl connection key\0", connector, acceptor)))
    }

    /// Labels are of one length, so none of them begins another.
    fn mac(&self, label: &Label, connector: &[u8], acceptor: &[u8]) -> [u8; PROOF_LEN] {
        self.code(label, &[connector, acceptor])
    }

    /// The code of these parts, one behind the other, for another purpose than a handshake.
    pub(crate) fn code(&self, label: &Label, parts: &[&[u8]]) -> [u8; PROOF_LEN] {
        let mut mac = self.0.clone();
        mac.update(label);
        parts.iter().for_each(|part| mac.update(part));
        mac.finalize().into_bytes().into()
    }

    /// Whether `got` is `want`, in a time that does not depend on where they differ.
    pub(crate) fn matches(want: &[u8; PROOF_LEN], got: &[u8]) -> bool {
        want[..].ct_eq(got).into()
    }
}

/// The purpose of a code.
type Label = [u8; 20];

/// The key that only the two ends of one stream have.
#[derive(Clone)]
pub(super) struct Session(StreamKey);

/// The keys that protect a stream behind its handshake.
pub struct SessionKeys {
    /// Seals the bytes that this end sends.
    pub sealer: Sealer,
    /// Opens the records that the peer sends.
    pub opener: Opener,
    /// A number that only the two ends know.
    pub secret: u128,
}

impl Session {
    /// The code behind `role`'s hello. It is over the connector's hello, and behind the acceptor's
    /// hello over that one too.
    pub(super) fn hello_tag(
        &self,
        role: Role,
        connector: &[u8],
        acceptor: &[u8],
    ) -> [u8; PROOF_LEN] {
        let label = match role {
            Role::Connector => b"uccl connector hello",
            Role::Acceptor => b"uccl acceptor hello\0",
        };
        let len = (connector.len() as u64).to_le_bytes();
        self.0.code([&label[..], &len, connector, acceptor])
    }

    /// The keys for the bytes that follow the handshake.
    pub(super) fn keys(&self, role: Role) -> SessionKeys {
        let stream = |label: &Label| self.0.code([&label[..]]);
        let connectors = stream(b"uccl connector bytes");
        let acceptors = stream(b"uccl acceptor bytes\0");
        let (ours, theirs) = match role {
            Role::Connector => (connectors, acceptors),
            Role::Acceptor => (acceptors, connectors),
        };
        let secret: &Label = b"uccl lane in a host\0";
        let secret = self.0.code([&secret[..]]).first_chunk().copied().unwrap_or_default();
        let secret = u128::from_le_bytes(secret);
        SessionKeys { sealer: Sealer::new(&ours), opener: Opener::new(&theirs), secret }
    }
}

/// Without the keys, which belong in no log.
impl fmt::Debug for SessionKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SessionKeys(..)")
    }
}

impl fmt::Debug for Psk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Psk(..)")
    }
}
