//! The code of a datagram.

use std::fmt;

use crc_fast::{CrcAlgorithm, Digest};
use subtle::ConstantTimeEq;

use super::{CODE_LEN, HEAD_LEN, SEALED_LEN, UdpAddress};
use crate::{handshake::Psk, record::StreamKey};

/// The key of one direction of a connection; without a pre-shared key a checksum.
#[derive(Clone)]
pub struct DatagramKey(Option<StreamKey>);

/// The keys of both directions of a connection.
#[derive(Clone, Debug)]
pub struct DatagramKeys {
    /// Of the datagrams that this end sends.
    pub ours: DatagramKey,
    /// Of those that the peer sends.
    pub theirs: DatagramKey,
}

impl DatagramKeys {
    /// The keys of the connection between these two ends. Both ends have drawn a nonce, so no two
    /// connections have the same. Ports and IP addresses do not count: something on the way may
    /// change them.
    #[must_use]
    pub fn new(psk: Option<&Psk>, ours: &UdpAddress, theirs: &UdpAddress) -> Self {
        let of = |from: &UdpAddress, to: &UdpAddress| {
            let [a, b] = [from, to].map(|end| (end.connection.to_le_bytes(), end.nonce));
            let key = |psk: &Psk| psk.code(b"uccl datagrams' key\0", &[&a.0[..], &a.1, &b.0, &b.1]);
            DatagramKey(psk.map(|psk| StreamKey::new(&key(psk))))
        };
        Self { ours: of(ours, theirs), theirs: of(theirs, ours) }
    }
}

impl DatagramKey {
    /// Writes the code of a datagram into its head.
    pub fn seal(&self, datagram: &mut [u8]) {
        let Some(code) = self.code(datagram) else { return };
        if let Some(place) = datagram.get_mut(SEALED_LEN..HEAD_LEN) {
            place.copy_from_slice(&code);
        }
    }

    /// Whether the code of a datagram is the right one. The time that it takes does not depend on
    /// the place of a difference.
    #[must_use]
    pub fn has_sealed(&self, datagram: &[u8]) -> bool {
        let Some(want) = self.code(datagram) else { return false };
        datagram.get(SEALED_LEN..HEAD_LEN).is_some_and(|got| want[..].ct_eq(got).into())
    }

    /// The code; `None` if the bytes end within the head.
    fn code(&self, datagram: &[u8]) -> Option<[u8; CODE_LEN]> {
        let (head, content) = datagram.split_at_checked(HEAD_LEN)?;
        let head = head.get(..SEALED_LEN)?;
        let mut code = [0; CODE_LEN];
        match &self.0 {
            Some(key) => code.copy_from_slice(key.code([head, content]).get(..CODE_LEN)?),
            None => {
                let mut crc = Digest::new(CrcAlgorithm::Crc32Iscsi);
                crc.update(head);
                crc.update(content);
                code[..4].copy_from_slice(&(crc.finalize() as u32).to_le_bytes());
            }
        }
        Some(code)
    }
}

/// Without the key, which belongs in no log.
impl fmt::Debug for DatagramKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "DatagramKey" } else { "checksum" })
    }
}
