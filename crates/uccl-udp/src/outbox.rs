//! The messages that a connection sends, by their numbers.

use std::collections::HashMap;

use uccl_fabric::mem::Span;
use uccl_wire::datagram::DatagramKind;

/// A message that is being sent, or that waits for its answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutMessage {
    pub(crate) kind: DatagramKind,
    /// Its bytes in all.
    pub(crate) total: u32,
    /// Bytes that it asks for.
    pub(crate) length: u32,
    /// A region's key: the peer's, or of a reply our own. Else the peer's message that it answers.
    pub(crate) key: u64,
    pub(crate) addr: u64,
    /// The peer's message that a reply answers.
    pub(crate) answers: u64,
    /// Our memory: of a write its source, of a read its target.
    pub(crate) local: Span,
    /// The tag of the request that it is.
    pub(crate) tag: u64,
    /// The sender is done with it.
    pub(crate) is_settled: bool,
    /// The request has ended, or it is none.
    pub(crate) is_over: bool,
}

/// All messages of which something is left to do.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    next: u64,
    messages: HashMap<u64, OutMessage>,
}

impl OutMessage {
    /// A message that is no request.
    pub(crate) fn answer(kind: DatagramKind, total: u32, key: u64) -> Self {
        Self {
            kind,
            total,
            length: 0,
            key,
            addr: 0,
            answers: key,
            local: Span { addr: 0, len: 0 },
            tag: 0,
            is_settled: false,
            is_over: true,
        }
    }
}

impl Outbox {
    /// Adds the message of the next number.
    pub(crate) fn push(&mut self, message: OutMessage) {
        self.messages.insert(self.next, message);
        self.next += 1;
    }

    pub(crate) fn get(&self, message: u64) -> Option<&OutMessage> {
        self.messages.get(&message)
    }

    /// Changes a message, and forgets it if nothing of it is left to do.
    pub(crate) fn change(&mut self, message: u64, change: impl FnOnce(&mut OutMessage)) {
        let Some(sent) = self.messages.get_mut(&message) else { return };
        change(sent);
        if sent.is_settled && sent.is_over {
            self.messages.remove(&message);
        }
    }

    /// Whether the peer has not taken the refusal of its message yet.
    pub(crate) fn is_refusing(&self, message: u64) -> bool {
        let refuses = |sent: &OutMessage| sent.kind == DatagramKind::Refusal && sent.key == message;
        self.messages.values().any(|sent| refuses(sent) && !sent.is_settled)
    }

    pub(crate) fn len(&self) -> usize {
        self.messages.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_stays_until_it_is_settled_and_over() {
        let mut outbox = Outbox::default();
        (0..3).for_each(|key| outbox.push(OutMessage::answer(DatagramKind::Refusal, 1, key)));
        outbox.push(OutMessage { is_over: false, ..OutMessage::answer(DatagramKind::Read, 0, 7) });
        outbox.change(1, |sent| sent.is_settled = true);
        assert!(outbox.get(1).is_none() && outbox.get(2).is_some_and(|sent| sent.key == 2));
        assert!(outbox.is_refusing(2) && !outbox.is_refusing(1) && !outbox.is_refusing(7));
        outbox.change(3, |sent| sent.is_settled = true);
        assert_eq!(outbox.len(), 3, "its answer is waited for");
        outbox.change(3, |sent| sent.is_over = true);
        outbox.change(u64::MAX, |_| panic!("there is no such message"));
        assert_eq!(outbox.len(), 2);
    }
}
