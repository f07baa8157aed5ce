//! Refusals: one end's reason not to join the other.

use std::fmt;

/// Most bytes of a REFUSE body: the code and the text.
pub(super) const MAX_REFUSE_LEN: usize = 2 + MAX_TEXT_LEN;
/// Most bytes of a refusal's text; longer ones are cut.
const MAX_TEXT_LEN: usize = 512;

/// Why an end refuses the other: a code for programs and a text for people.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{text} ({code})")]
pub struct Refusal {
    /// For programs.
    pub code: RefuseCode,
    /// For people.
    pub text: String,
}

/// A refusal's reason, for programs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[non_exhaustive]
pub enum RefuseCode {
    /// The bytes are not this protocol's.
    Foreign,
    /// The two ends speak different versions.
    Version,
    /// The peer broke the protocol.
    Protocol,
    /// This end wants a pre-shared key, the peer has none.
    PskRequired,
    /// The peer has a pre-shared key, this end has none.
    PskUnexpected,
    /// The peer's key is another one.
    PskMismatch,
    /// No connection has the token that the peer quoted.
    UnknownToken,
    /// The two ends have no common way to move data.
    Incompatible,
    /// Too many connections or lanes.
    Busy,
    /// The endpoint is closing.
    Closing,
    /// No holder of the key has sent these bytes.
    Forged,
    /// The connector means another endpoint.
    AnotherMeant,
    /// Another reason, perhaps of a later version.
    Other(u16),
}

impl RefuseCode {
    /// The code on the wire.
    pub const fn to_wire(self) -> u16 {
        match self {
            Self::Foreign => 1,
            Self::Version => 2,
            Self::Protocol => 3,
            Self::PskRequired => 4,
            Self::PskUnexpected => 5,
            Self::PskMismatch => 6,
            Self::UnknownToken => 7,
            Self::Incompatible => 8,
            Self::Busy => 9,
            Self::Closing => 10,
            Self::Forged => 11,
            Self::AnotherMeant => 12,
            Self::Other(code) => code,
        }
    }

    /// The meaning of a code on the wire.
    pub const fn from_wire(code: u16) -> Self {
        match code {
            1 => Self::Foreign,
            2 => Self::Version,
            3 => Self::Protocol,
            4 => Self::PskRequired,
            5 => Self::PskUnexpected,
            6 => Self::PskMismatch,
            7 => Self::UnknownToken,
            8 => Self::Incompatible,
            9 => Self::Busy,
            10 => Self::Closing,
            11 => Self::Forged,
            12 => Self::AnotherMeant,
            other => Self::Other(other),
        }
    }
}

impl fmt::Display for RefuseCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "code {}", self.to_wire())
    }
}

impl Refusal {
    /// A refusal with a reason for programs and one for people.
    pub fn new(code: RefuseCode, text: impl Into<String>) -> Self {
        Self { code, text: text.into() }
    }

    /// The REFUSE body: code, then as much of the text as fits.
    pub(super) fn encode(&self) -> Vec<u8> {
        let end = self.text.floor_char_boundary(MAX_TEXT_LEN);
        let mut out = Vec::with_capacity(2 + end);
        out.extend(self.code.to_wire().to_le_bytes());
        out.extend(&self.text.as_bytes()[..end]);
        out
    }

    /// Reads a REFUSE body; `None` where it has no code. Control characters are replaced, because
    /// texts reach logs and terminals.
    pub(super) fn decode(body: &[u8]) -> Option<Self> {
        let (code, text) = body.split_first_chunk::<2>()?;
        let text = String::from_utf8_lossy(text)
            .chars()
            .map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c })
            .collect();
        Some(Self { code: RefuseCode::from_wire(u16::from_le_bytes(*code)), text })
    }
}
