//! The socket of a stream that has shaken hands, and its keys, if a secret is set.

use std::net::TcpStream;

use uccl_wire::{
    frame::{FrameError, HEADER_LEN, Header, Kind},
    handshake::{Handshake, SessionKeys},
    record::{HEAD_LEN, RecordError, TAG_LEN},
};

/// The most bytes of the `Establish` message.
pub(crate) const MAX_WORD: usize = HEAD_LEN + HEADER_LEN + TAG_LEN;

/// A stream that has shaken hands.
pub(crate) struct Socket {
    pub(crate) tcp: TcpStream,
    pub(crate) keys: Option<SessionKeys>,
}

/// Why bytes are no `Establish` message.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WordError {
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error("a frame of kind {0:?} came where the connection was to be established")]
    Kind(Kind),
}

impl Socket {
    /// The stream after its handshake.
    pub(crate) fn of(tcp: TcpStream, handshake: &mut Handshake) -> Self {
        Self { tcp, keys: handshake.take_keys() }
    }

    /// A number that nobody else should know. `token` travels in the handshake, and others may see
    /// it there.
    pub(crate) fn secret(&self, token: u128) -> u128 {
        self.keys.as_ref().map_or(token, |keys| keys.secret)
    }

    /// The `Establish` message, which is the first after the handshake.
    pub(crate) fn word(&mut self, lanes: u64) -> Vec<u8> {
        let word = Header::bare(Kind::Establish, 0, lanes).encode();
        match &mut self.keys {
            None => word.to_vec(),
            Some(keys) => keys.sealer.sealed(&word),
        }
    }

    /// How many bytes the peer's `Establish` message has.
    pub(crate) fn word_len(&self) -> usize {
        if self.keys.is_some() { MAX_WORD } else { HEADER_LEN }
    }

    /// Reads the peer's `Establish` message, of which all bytes are there. Returns its number of
    /// lanes.
    pub(crate) fn read_word(&mut self, word: &[u8]) -> Result<u64, WordError> {
        let word = match &mut self.keys {
            None => word,
            Some(keys) => keys.opener.open(word)?,
        };
        let word = word.first_chunk().ok_or(RecordError::Forged)?;
        match Header::decode(word)? {
            Header { kind: Kind::Establish, aux, .. } => Ok(aux),
            Header { kind, .. } => Err(WordError::Kind(kind)),
        }
    }
}
