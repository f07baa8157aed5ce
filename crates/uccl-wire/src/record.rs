//! Records: they protect the bytes of a stream between two ends that share a key.
//!
//! | field | bytes |
//! | --- | --- |
//! | length of the content, little endian, 1 to [`MAX_CONTENT`] | 4 |
//! | content | |
//! | code: the first 16 bytes of HMAC-SHA256 over number (u64, little endian), length and content | 16 |
//!
//! The number is not sent: both ends count, each direction by itself and with a key of its own. So
//! a record that is changed, left out, repeated, moved or sent back is none. Nothing is encrypted.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use subtle::ConstantTimeEq;

/// Bytes in front of the content.
pub const HEAD_LEN: usize = 4;
/// Bytes behind the content.
pub const TAG_LEN: usize = 16;
/// Most bytes of content.
pub const MAX_CONTENT: usize = 64 << 10;
/// Most bytes of a record.
pub const MAX_RECORD: usize = HEAD_LEN + MAX_CONTENT + TAG_LEN;

/// Why bytes are no record.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordError {
    /// No record has this length.
    #[error("a record of {0} bytes, and there are 1 to {MAX_CONTENT}")]
    Length(u32),
    /// The peer has not sent it, or not in its turn.
    #[error("the peer has not sent these bytes: somebody changes the bytes on their way")]
    Forged,
}

/// A key of HMAC-SHA256.
#[derive(Clone)]
pub(crate) struct StreamKey(Hmac<Sha256>);

impl StreamKey {
    pub(crate) fn new(key: &[u8; 32]) -> Self {
        Self(<Hmac<Sha256> as KeyInit>::new(&block(key)))
    }

    /// The code over these parts, one behind the other.
    pub(crate) fn code<'a>(&self, parts: impl IntoIterator<Item = &'a [u8]>) -> [u8; 32] {
        let mut mac = self.0.clone();
        parts.into_iter().for_each(|part| mac.update(part));
        mac.finalize().into_bytes().into()
    }

    fn tag(&self, number: u64, head: &[u8], content: &[u8]) -> [u8; TAG_LEN] {
        let code = self.code([&number.to_le_bytes()[..], head, content]);
        code.first_chunk().copied().unwrap_or_default()
    }
}

/// A key as long as HMAC's block, which it fills up with zeroes anyway.
fn block(key: &[u8; 32]) -> hmac::digest::Key<Hmac<Sha256>> {
    let mut block = hmac::digest::Key::<Hmac<Sha256>>::default();
    block[..key.len()].copy_from_slice(key);
    block
}

/// Makes records of the bytes that one end sends.
pub struct Sealer {
    key: StreamKey,
    number: u64,
}

impl Sealer {
    /// Seals with a key that only the two ends have, and that is for this direction alone.
    pub fn new(key: &[u8; 32]) -> Self {
        Self { key: StreamKey::new(key), number: 0 }
    }

    /// Makes a record of `out`: its first [`HEAD_LEN`] bytes, which may be anything, and its
    /// content behind them, 1 to
    /// [`MAX_CONTENT`] bytes.
    pub fn seal(&mut self, out: &mut Vec<u8>) {
        let Some((head, content)) = out.split_first_chunk_mut::<HEAD_LEN>() else { return };
        debug_assert!((1..=MAX_CONTENT).contains(&content.len()), "{} bytes", content.len());
        *head = (content.len() as u32).to_le_bytes();
        let tag = self.key.tag(self.number, head, content);
        self.number += 1;
        out.extend_from_slice(&tag);
    }

    /// A record with this content.
    pub fn sealed(&mut self, content: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEAD_LEN + content.len() + TAG_LEN);
        out.extend_from_slice(&[0; HEAD_LEN]);
        out.extend_from_slice(content);
        self.seal(&mut out);
        out
    }
}

/// Opens the records that come from the other end.
pub struct Opener {
    key: StreamKey,
    number: u64,
}

impl Opener {
    /// Opens the records that the other end seals with this key.
    pub fn new(key: &[u8; 32]) -> Self {
        Self { key: StreamKey::new(key), number: 0 }
    }

    /// The length of the record that begins with these bytes; `None` where they are too few to have
    /// it.
    ///
    /// # Errors
    /// There is no such record.
    pub fn len(bytes: &[u8]) -> Result<Option<usize>, RecordError> {
        let Some(head) = bytes.first_chunk::<HEAD_LEN>() else { return Ok(None) };
        let len = u32::from_le_bytes(*head);
        match len as usize {
            content @ 1..=MAX_CONTENT => Ok(Some(HEAD_LEN + content + TAG_LEN)),
            _ => Err(RecordError::Length(len)),
        }
    }

    /// The content of a whole record, which must be the next one.
    ///
    /// # Errors
    /// The bytes are no record, or not the next one.
    pub fn open<'a>(&mut self, record: &'a [u8]) -> Result<&'a [u8], RecordError> {
        if Self::len(record)? != Some(record.len()) {
            return Err(RecordError::Forged);
        }
        let (head, rest) = record.split_at(HEAD_LEN);
        let (content, tag) = rest.split_at(rest.len() - TAG_LEN);
        let want = self.key.tag(self.number, head, content);
        if !bool::from(want[..].ct_eq(tag)) {
            return Err(RecordError::Forged);
        }
        self.number += 1;
        Ok(content)
    }
}

/// Without the keys, which belong in no log.
impl fmt::Debug for Sealer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sealer({})", self.number)
    }
}

impl fmt::Debug for Opener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Opener({})", self.number)
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    /// Both ends of one direction.
    fn ends(key: u8) -> (Sealer, Opener) {
        (Sealer::new(&[key; 32]), Opener::new(&[key; 32]))
    }

    proptest! {
        #[test]
        fn contents_survive(contents in vec(vec(any::<u8>(), 1..300), 1..6)) {
            let (mut sealer, mut opener) = ends(1);
            for content in &contents {
                let record = sealer.sealed(content);
                prop_assert_eq!(Opener::len(&record), Ok(Some(record.len())));
                prop_assert_eq!(opener.open(&record), Ok(&content[..]));
            }
        }

        #[test]
        fn no_byte_can_be_changed(
            content in vec(any::<u8>(), 1..300), at: prop::sample::Index, mask in 1u8..,
        ) {
            let (mut sealer, mut opener) = ends(1);
            let mut record = sealer.sealed(&content);
            let at = at.index(record.len());
            record[at] ^= mask;
            prop_assert!(opener.open(&record).is_err());
            record[at] ^= mask;
            prop_assert_eq!(opener.open(&record), Ok(&content[..]), "a forgery does not count");
        }
    }

    #[test]
    fn records_come_once_each_and_in_order() {
        let (mut sealer, mut opener) = ends(1);
        let [first, second, third] = [b"one", b"two", b"one"].map(|text| sealer.sealed(text));
        assert_eq!(opener.open(&second), Err(RecordError::Forged), "left out");
        opener.open(&first).expect("its turn");
        assert_eq!(opener.open(&first), Err(RecordError::Forged), "repeated");
        assert_eq!(opener.open(&third), Err(RecordError::Forged), "moved");
        opener.open(&second).expect("its turn");
        let (_, mut other) = ends(2);
        assert_eq!(other.open(&first), Err(RecordError::Forged), "another key");
    }

    #[test]
    fn lengths_have_bounds() {
        assert_eq!(Opener::len(&[1, 0, 0]), Ok(None));
        for (len, sound) in [(0, false), (1, true), (MAX_CONTENT, true), (MAX_CONTENT + 1, false)] {
            let head = (len as u32).to_le_bytes();
            let want =
                if sound { Ok(Some(len + 20)) } else { Err(RecordError::Length(len as u32)) };
            assert_eq!(Opener::len(&head), want);
        }
    }

    /// A code is HMAC-SHA256 of number, length and content, and nothing else.
    #[test]
    fn codes_are_hmac_sha256() {
        let (mut sealer, _) = ends(1);
        sealer.sealed(b"before");
        let record = sealer.sealed(b"abc");
        let mac = Hmac::<Sha256>::new_from_slice(&[1; 32]).expect("a key");
        let mac = mac.chain_update([1, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0]).chain_update(b"abc");
        assert_eq!(record[7..], mac.finalize().into_bytes()[..TAG_LEN]);
    }
}
