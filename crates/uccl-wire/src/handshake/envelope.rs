//! The messages that the handshake's states exchange.
//!
//! Each is an 8-byte header (`UCCL`, kind u8, version u8, body length u16) and a body. The header
//! and the REFUSE body keep their layout in every version, so that ends of different versions can
//! say so.

use super::{NONCE_LEN, Role, psk::PROOF_LEN, refusal::MAX_REFUSE_LEN};

/// The version of the handshake and of everything that follows it on the stream.
pub const PROTOCOL_VERSION: u8 = 3;
/// First bytes of every message.
pub(super) const MAGIC: [u8; 4] = *b"UCCL";
/// Bytes of a header.
pub(super) const HEADER_LEN: usize = 8;
/// Most bytes of a body.
pub(super) const MAX_BODY_LEN: usize = 2048;
/// Bytes of a PRELUDE's body: nonce, then flags.
pub(super) const PRELUDE_LEN: usize = NONCE_LEN + 4;

const FLAG_HAS_PSK: u32 = 1 << 0;
const FLAG_IS_ACCEPTOR: u32 = 1 << 1;

/// The kind of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Prelude,
    Proof,
    Hello,
    Refuse,
}

impl Kind {
    pub(super) fn of(byte: u8) -> Option<Self> {
        match byte {
            1 => Some(Self::Prelude),
            2 => Some(Self::Proof),
            3 => Some(Self::Hello),
            4 => Some(Self::Refuse),
            _ => None,
        }
    }

    fn byte(self) -> u8 {
        match self {
            Self::Prelude => 1,
            Self::Proof => 2,
            Self::Hello => 3,
            Self::Refuse => 4,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Prelude => "PRELUDE",
            Self::Proof => "PROOF",
            Self::Hello => "HELLO",
            Self::Refuse => "REFUSE",
        }
    }

    /// Whether a body may have `len` bytes.
    pub(super) fn allows(self, len: usize) -> bool {
        match self {
            Self::Prelude => len == PRELUDE_LEN,
            Self::Proof => len == PROOF_LEN,
            Self::Hello => len <= MAX_BODY_LEN,
            Self::Refuse => (2..=MAX_REFUSE_LEN).contains(&len),
        }
    }
}

/// A header's fields behind the magic.
#[derive(Clone, Copy, Debug)]
pub(super) struct Header {
    pub(super) kind: u8,
    pub(super) version: u8,
    pub(super) len: usize,
}

impl Header {
    pub(super) fn decode(bytes: &[u8; HEADER_LEN]) -> Self {
        let [_, _, _, _, kind, version, low, high] = *bytes;
        Self { kind, version, len: u16::from_le_bytes([low, high]).into() }
    }
}

/// A whole message. `body` is at most [`MAX_BODY_LEN`] bytes.
pub(super) fn message(kind: Kind, body: &[u8]) -> Vec<u8> {
    debug_assert!(kind.allows(body.len()), "{} of {} bytes", kind.name(), body.len());
    let mut out = Vec::with_capacity(HEADER_LEN + body.len());
    out.extend(MAGIC);
    out.extend([kind.byte(), PROTOCOL_VERSION]);
    out.extend((body.len() as u16).to_le_bytes());
    out.extend(body);
    out
}

/// A PRELUDE: the first message of each end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Prelude {
    pub(super) nonce: [u8; NONCE_LEN],
    pub(super) has_psk: bool,
    pub(super) role: Role,
}

impl Prelude {
    pub(super) fn encode(&self) -> [u8; PRELUDE_LEN] {
        let mut flags = 0;
        if self.has_psk {
            flags |= FLAG_HAS_PSK;
        }
        if self.role == Role::Acceptor {
            flags |= FLAG_IS_ACCEPTOR;
        }
        let mut out = [0; PRELUDE_LEN];
        out[..NONCE_LEN].copy_from_slice(&self.nonce);
        out[NONCE_LEN..].copy_from_slice(&u32::to_le_bytes(flags));
        out
    }

    /// `None` where the length is wrong. Flags that have no meaning yet are ignored.
    pub(super) fn decode(body: &[u8]) -> Option<Self> {
        let (nonce, flags) = body.split_first_chunk::<NONCE_LEN>()?;
        let flags = u32::from_le_bytes(flags.try_into().ok()?);
        let acceptor = flags & FLAG_IS_ACCEPTOR != 0;
        Some(Self {
            nonce: *nonce,
            has_psk: flags & FLAG_HAS_PSK != 0,
            role: if acceptor { Role::Acceptor } else { Role::Connector },
        })
    }
}
