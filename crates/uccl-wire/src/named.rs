//! Notifications that have a name beside their message, as the C++ interface of UCCL sends them.
//!
//! | offset | type | field |
//! | --- | --- | --- |
//! | 0 | u32 | magic, 0xDEADDEAD |
//! | 4 | u32 | 0 (type) |
//! | 8 | u32 | length of the name in bytes |
//! | 12 | u32 | length of the message in bytes |
//! | 16 | | name, message |
//!
//! All numbers are little endian. Any other payload is a message without a name.

use crate::cursor::Reader;

const MAGIC: u32 = 0xdead_dead;
const HEADER_LEN: usize = 16;

/// A message, and the name that its sender gave (its own, as a rule).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NamedMessage<'a> {
    /// The name; empty if there is none.
    pub name: &'a [u8],
    /// The message.
    pub message: &'a [u8],
}

impl<'a> NamedMessage<'a> {
    /// The payload of the notification; `None` if a length is beyond 32 bits.
    pub fn encode(&self) -> Option<Vec<u8>> {
        let (name, message) = (self.name.len(), self.message.len());
        let lengths = [u32::try_from(name).ok()?, u32::try_from(message).ok()?];
        let mut out = Vec::with_capacity(HEADER_LEN + name + message);
        for word in [MAGIC, 0, lengths[0], lengths[1]] {
            out.extend(word.to_le_bytes());
        }
        out.extend(self.name);
        out.extend(self.message);
        Some(out)
    }

    /// Reads a payload. Without such a header, or with lengths that do not match, it is all
    /// message.
    pub fn decode(payload: &'a [u8]) -> Self {
        Self::with_header(payload).unwrap_or(Self { name: &[], message: payload })
    }

    fn with_header(payload: &'a [u8]) -> Option<Self> {
        let mut r = Reader::new(payload);
        let mut word = || r.u32_le().ok();
        let (magic, kind, name, message) = (word()?, word()?, word()?, word()?);
        let (name, message) = (u64::from(name), u64::from(message));
        let whole = name + message == r.remaining() as u64;
        if magic != MAGIC || kind != 0 || !whole {
            return None;
        }
        Some(Self { name: r.take(name).ok()?, message: r.take(message).ok()? })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn round_trips(name: Vec<u8>, message: Vec<u8>) {
            let named = NamedMessage { name: &name, message: &message };
            let payload = named.encode().unwrap();
            prop_assert_eq!(NamedMessage::decode(&payload), named);
        }

        #[test]
        fn anything_else_is_all_message(payload: Vec<u8>, cut in 1usize..40, name: Vec<u8>) {
            if !payload.starts_with(&MAGIC.to_le_bytes()) {
                let expected = NamedMessage { name: &[], message: &payload };
                prop_assert_eq!(NamedMessage::decode(&payload), expected);
            }
            let whole = NamedMessage { name: &name, message: &payload }.encode().unwrap();
            let part = &whole[..whole.len() - cut.min(whole.len())];
            prop_assert_eq!(NamedMessage::decode(part), NamedMessage { name: &[], message: part });
        }
    }

    #[test]
    fn layout() {
        let payload = NamedMessage { name: b"ab", message: b"c" }.encode().unwrap();
        assert_eq!(payload, *b"\xad\xde\xad\xde\0\0\0\0\x02\0\0\0\x01\0\0\0abc");
        let mut other = payload.clone();
        other[4] = 1;
        assert_eq!(NamedMessage::decode(&other), NamedMessage { name: b"", message: &other });
    }
}
