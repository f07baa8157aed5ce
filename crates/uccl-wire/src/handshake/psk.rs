//! The pre-shared key and the proof that a peer knows it.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use subtle::ConstantTimeEq;

use super::Role;

/// Bytes of a proof.
pub(super) const PROOF_LEN: usize = 32;

/// A secret that both ends of a connection were given.
///
/// Holds the key schedule of HMAC-SHA256, not the secret's bytes. Take at least 16 random bytes: who
/// poses as an acceptor can test guesses at leisure against the proof it is shown.
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

    /// What `role` sends to prove that it knows the secret, in a handshake that began with these two
    /// PRELUDE bodies. The role is part of it, so that a proof sent back to its maker proves nothing.
    pub(super) fn proof(&self, role: Role, connector: &[u8], acceptor: &[u8]) -> [u8; PROOF_LEN] {
        let label: &[u8] = match role {
            Role::Connector => b"uccl connector proof",
            Role::Acceptor => b"uccl acceptor proof\0",
        };
        let mut mac = self.0.clone();
        mac.update(label);
        mac.update(connector);
        mac.update(acceptor);
        mac.finalize().into_bytes().into()
    }

    /// Whether `got` is `want`, in a time that says nothing about where they differ.
    pub(super) fn matches(want: &[u8; PROOF_LEN], got: &[u8]) -> bool {
        want[..].ct_eq(got).into()
    }
}

impl fmt::Debug for Psk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Psk(..)")
    }
}
