//! Messages that are longer than a lane takes, and come in fragments.

use std::borrow::Cow;

use uccl_wire::message::{MAX_ASSEMBLED, MORE, PREFIX_LEN};

use crate::Violation;

/// The fragments of a message that is not complete yet.
#[derive(Default)]
pub struct Assembler {
    fragments: Vec<u8>,
}

impl Assembler {
    /// Takes incoming bytes. Returns the message once it is complete.
    ///
    /// # Errors
    /// The fragments do not make up a message.
    pub fn take<'a>(&mut self, bytes: &'a [u8]) -> Result<Option<Cow<'a, [u8]>>, Violation> {
        let Some((prefix, body)) = bytes.split_at_checked(PREFIX_LEN) else {
            return Err(Violation::Short(bytes.len()));
        };
        let has_more = prefix[1] & MORE != 0;
        if !has_more && self.fragments.is_empty() {
            return Ok(Some(Cow::Borrowed(bytes)));
        }
        if self.fragments.len() + body.len() > MAX_ASSEMBLED {
            return Err(Violation::Long);
        }
        if self.fragments.is_empty() {
            self.fragments.extend_from_slice(prefix);
            self.fragments[1] = 0;
        } else if self.fragments[0] != prefix[0] {
            return Err(Violation::Mixed);
        }
        self.fragments.extend_from_slice(body);
        Ok((!has_more).then(|| Cow::Owned(std::mem::take(&mut self.fragments))))
    }
}

/// Cuts a message that is longer than a lane takes. Each item is a fragment's head and its part of
/// the message.
pub fn fragments(message: &[u8], max: usize) -> impl Iterator<Item = ([u8; PREFIX_LEN], &[u8])> {
    let (prefix, body) = message.split_at(PREFIX_LEN.min(message.len()));
    let chunks = body.chunks(max.saturating_sub(PREFIX_LEN).max(1));
    let last = chunks.len().saturating_sub(1);
    let mut head = [0; PREFIX_LEN];
    head[..prefix.len()].copy_from_slice(prefix);
    chunks.enumerate().map(move |(i, chunk)| {
        head[1] = if i < last { MORE } else { 0 };
        (head, chunk)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(tag: u8, body: usize) -> Vec<u8> {
        let mut message = vec![0; PREFIX_LEN];
        message[0] = tag;
        message.extend((0..body).map(|i| i as u8));
        message
    }

    #[test]
    fn fragments_become_the_message_that_they_were() {
        for body in [0, 1, 99, 100, 101, 1000] {
            let (whole, mut assembler) = (message(5, body), Assembler::default());
            let mut came = Vec::new();
            for (head, part) in fragments(&whole, 100 + PREFIX_LEN) {
                let fragment = [&head, part].concat();
                came.extend(assembler.take(&fragment).expect("in order").map(Cow::into_owned));
            }
            assert!(came == [whole] || body == 0 && came.is_empty(), "{body}");
        }
    }

    #[test]
    fn fragments_that_make_no_message_are_refused() {
        let mut assembler = Assembler::default();
        assert_eq!(assembler.take(&[1; 3]), Err(Violation::Short(3)));
        let (mut first, other) = (message(5, 10), message(6, 10));
        first[1] = MORE;
        assert_eq!(assembler.take(&first), Ok(None));
        assert_eq!(assembler.take(&other), Err(Violation::Mixed));
        let mut long = message(5, MAX_ASSEMBLED / 2);
        long[1] = MORE;
        assert_eq!(assembler.take(&long), Ok(None));
        assert_eq!(assembler.take(&long), Err(Violation::Long));
    }
}
