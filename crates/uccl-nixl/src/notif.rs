//! A notification between agents: who sends it, and what it says.
//!
//! The sender's name in UTF-8 or not, behind its length in 4 bytes, little endian; then the message.

const LEN_BYTES: usize = 4;

/// What every notification of an agent begins with.
pub(crate) fn prefix(agent: &[u8]) -> Vec<u8> {
    let len = u32::try_from(agent.len()).unwrap_or(u32::MAX);
    let name = &agent[..len as usize];
    [&len.to_le_bytes(), name].concat()
}

/// Sender and message; `None` if it is not one of ours.
pub(crate) fn parse(payload: &[u8]) -> Option<(&[u8], &[u8])> {
    let (len, rest) = payload.split_first_chunk::<LEN_BYTES>()?;
    rest.split_at_checked(u32::from_le_bytes(*len) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_messages_of_any_bytes_and_length() {
        for (name, message) in
            [(&b"agent"[..], &b"done"[..]), (b"", b""), (b"\0\xff", &[0; 70_000])]
        {
            let payload = [prefix(name), message.to_vec()].concat();
            assert_eq!(parse(&payload), Some((name, message)));
        }
    }

    #[test]
    fn what_is_too_short_for_its_name_is_refused() {
        for payload in [&b""[..], b"\0\0\0", b"\x05\0\0\0abcd"] {
            assert_eq!(parse(payload), None);
        }
    }
}
