//! Our sends and notifications that the peer has not answered.
//!
//! Short ones carry their data in the message, as long as the peer's answers keep up. The peer
//! fetches the data of the others, with keys made only for that.

use uccl_wire::message::{self, Source};

use crate::{
    Full, Handles, Violation,
    limits::{EAGER_IOVS, EAGER_MAX, EAGER_WINDOW, MAX_PIECES, MAX_WAITING},
    numbered::NumberedQueue,
};

/// How data reaches a peer that receives it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SendProtocol {
    /// In the message.
    Eager,
    /// The peer fetches it.
    Rendezvous,
}

/// A send or a notification that the peer has not answered.
struct PendingSend<T> {
    handle: T,
    eager: usize,
    pieces: usize,
    /// We have sent the peer a cancel.
    is_withdrawn: bool,
}

impl<T> PendingSend<T> {
    fn new(handle: T, eager: usize, pieces: usize) -> Self {
        Self { handle, eager, pieces, is_withdrawn: false }
    }
}

/// Sends and notifications that the peer has not answered.
pub struct PendingSends<H: Handles> {
    /// Bytes that were sent inside messages.
    eager: usize,
    /// Iovs of sends. The peer keeps a list of them until its receives come.
    pieces: usize,
    sends: NumberedQueue<PendingSend<H::Send>>,
    notifs: NumberedQueue<PendingSend<H::Notif>>,
}

impl<H: Handles> Default for PendingSends<H> {
    fn default() -> Self {
        Self {
            eager: 0,
            pieces: 0,
            sends: NumberedQueue::default(),
            notifs: NumberedQueue::default(),
        }
    }
}

impl<H: Handles> PendingSends<H> {
    /// How to send `len` bytes in `iovs` iovs. `is_readable`: the memory can be copied into a
    /// message.
    ///
    /// # Errors
    /// The peer has to keep too many iovs already.
    pub fn admit_send(
        &self,
        len: usize,
        iovs: usize,
        is_readable: bool,
    ) -> Result<SendProtocol, Full> {
        if self.pieces + iovs > MAX_PIECES {
            let what = "the list of iovs of sends that no receive has met";
            return Err(Full { what, limit: MAX_PIECES });
        }
        let is_short = is_readable && self.has_room(len) && iovs <= EAGER_IOVS;
        Ok(if is_short { SendProtocol::Eager } else { SendProtocol::Rendezvous })
    }

    /// Encodes the head of an eager send. The driver appends the data. Returns the send's number.
    pub fn eager_send(
        &mut self,
        lens: impl ExactSizeIterator<Item = u32> + Clone,
        handle: H::Send,
        out: &mut Vec<u8>,
    ) -> u64 {
        let eager = lens.clone().map(|len| len as usize).sum();
        let sent = PendingSend::new(handle, eager, lens.len());
        message::eager_head(self.sends.next(), lens, out);
        self.push_send(sent)
    }

    /// Encodes a send that the peer fetches. Returns its number.
    pub fn rendezvous_send(
        &mut self,
        sources: impl ExactSizeIterator<Item = Source>,
        handle: H::Send,
        out: &mut Vec<u8>,
    ) -> u64 {
        let sent = PendingSend::new(handle, 0, sources.len());
        message::rts(self.sends.next(), sources, out);
        self.push_send(sent)
    }

    fn push_send(&mut self, sent: PendingSend<H::Send>) -> u64 {
        self.eager += sent.eager;
        self.pieces += sent.pieces;
        let seq = self.sends.next();
        self.sends.push(sent);
        seq
    }

    /// How to send a notification of `len` bytes.
    ///
    /// # Errors
    /// Too many notifications are unanswered. Those that no caller waits for any more count as
    /// well.
    pub fn admit_notif(&self, len: usize) -> Result<SendProtocol, Full> {
        if self.notifs.len() >= MAX_WAITING {
            let what = "the list of notifications that the peer has not taken in";
            return Err(Full { what, limit: MAX_WAITING });
        }
        Ok(if self.has_room(len) { SendProtocol::Eager } else { SendProtocol::Rendezvous })
    }

    /// Encodes the head of an eager notification of `len` bytes. The driver appends the payload.
    /// Returns its number.
    pub fn eager_notif(&mut self, len: usize, handle: H::Notif, out: &mut Vec<u8>) -> u64 {
        let id = self.notifs.next();
        message::notif_head(id, out);
        self.eager += len;
        self.notifs.push(PendingSend::new(handle, len, 0));
        id
    }

    /// Encodes a notification with a payload that the peer fetches. Returns its number.
    pub fn rendezvous_notif(&mut self, source: Source, handle: H::Notif, out: &mut Vec<u8>) -> u64 {
        let id = self.notifs.next();
        message::notif_rts(id, source, out);
        self.notifs.push(PendingSend::new(handle, 0, 0));
        id
    }

    /// Encodes the cancel of a send. The peer still answers it. Returns false and encodes nothing
    /// if the send has been cancelled before, if the peer has answered already, or if no send has
    /// this number.
    pub fn cancel_send(&mut self, seq: u64, out: &mut Vec<u8>) -> bool {
        let Some(sent) = self.sends.get_mut(seq) else { return false };
        if std::mem::replace(&mut sent.is_withdrawn, true) {
            return false;
        }
        message::send_cancel(seq, out);
        true
    }

    /// Notes the peer's answer to a send.
    pub(crate) fn send_ended(&mut self, seq: u64) -> Result<H::Send, Violation> {
        let sent = self.sends.remove(seq).ok_or(Violation::UnknownSend(seq))?;
        self.eager -= sent.eager;
        self.pieces -= sent.pieces;
        Ok(sent.handle)
    }

    /// Notes the peer's answer to a notification.
    pub(crate) fn notif_ended(&mut self, id: u64) -> Result<H::Notif, Violation> {
        let sent = self.notifs.remove(id).ok_or(Violation::UnknownNotif(id))?;
        self.eager -= sent.eager;
        Ok(sent.handle)
    }

    /// Bytes that were sent inside messages and are not answered.
    pub fn eager_bytes(&self) -> usize {
        self.eager
    }

    pub(crate) fn close(&mut self) -> (Vec<H::Send>, Vec<H::Notif>) {
        (self.eager, self.pieces) = (0, 0);
        let sends = self.sends.drain().map(|sent| sent.handle).collect();
        (sends, self.notifs.drain().map(|sent| sent.handle).collect())
    }

    fn has_room(&self, len: usize) -> bool {
        len <= EAGER_MAX && self.eager + len <= EAGER_WINDOW
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Numbers;

    impl Handles for Numbers {
        type Send = u32;
        type Notif = u32;
        type Signal = u32;
        type LookUp = u32;
        type Receive = u32;
        type Ask = u32;
        type PeerCopy = u32;
        type Operation = u32;
    }

    type Outbox = PendingSends<Numbers>;

    #[test]
    fn a_send_that_ended_makes_room_for_its_pieces() {
        let (mut outbox, mut out) = (Outbox::default(), Vec::new());
        let source = Source { addr: 0, len: 1, key: 2, slot: 3 };
        const IOVS: usize = 65_536;
        for _ in 0..MAX_PIECES / IOVS {
            assert_eq!(outbox.admit_send(1, IOVS, false), Ok(SendProtocol::Rendezvous));
            out.clear();
            outbox.rendezvous_send(vec![source; IOVS].into_iter(), 7, &mut out);
        }
        assert!(outbox.admit_send(1, 1, false).is_err());
        assert_eq!(outbox.send_ended(1), Ok(7));
        assert_eq!(outbox.admit_send(1, IOVS, false), Ok(SendProtocol::Rendezvous));
        assert!(outbox.admit_send(1, IOVS + 1, false).is_err());
    }

    #[test]
    fn a_message_that_ended_makes_room_for_bytes_in_messages() {
        let (mut outbox, mut out) = (Outbox::default(), Vec::new());
        for id in 0..(EAGER_WINDOW / EAGER_MAX) as u32 {
            assert_eq!(outbox.admit_notif(EAGER_MAX), Ok(SendProtocol::Eager));
            match id % 2 {
                0 => outbox.eager_notif(EAGER_MAX, id, &mut out),
                _ => outbox.eager_send([EAGER_MAX as u32].into_iter(), id, &mut out),
            };
        }
        for (sends, notifs) in [(0, 0), (1, 0), (1, 1)] {
            assert_eq!(outbox.eager_bytes(), EAGER_WINDOW - (sends + notifs) * EAGER_MAX);
            let way = if sends > 0 { SendProtocol::Eager } else { SendProtocol::Rendezvous };
            assert_eq!(outbox.admit_send(EAGER_MAX, 1, true), Ok(way));
            assert_eq!(outbox.admit_notif(EAGER_MAX), Ok(way));
            let _ = match (sends, notifs) {
                (0, _) => outbox.send_ended(1).map(|_| ()),
                _ => outbox.notif_ended(1).map(|_| ()),
            };
        }
    }

    #[test]
    fn no_more_notifications_are_sent_than_the_peer_keeps() {
        let (mut outbox, mut out) = (Outbox::default(), Vec::new());
        let source = Source { addr: 0, len: 1, key: 2, slot: 3 };
        for handle in 0..MAX_WAITING as u32 {
            assert_eq!(outbox.admit_notif(0), Ok(SendProtocol::Eager));
            out.clear();
            match handle % 2 {
                0 => outbox.eager_notif(0, handle, &mut out),
                _ => outbox.rendezvous_notif(source, handle, &mut out),
            };
        }
        assert!(outbox.admit_notif(0).is_err());
        assert_eq!(outbox.notif_ended(1), Ok(0));
        assert_eq!(outbox.admit_notif(0), Ok(SendProtocol::Eager));
    }

    #[test]
    fn a_send_is_taken_back_once() {
        let (mut outbox, mut out) = (Outbox::default(), Vec::new());
        let seq = outbox.eager_send([0].into_iter(), 7, &mut out);
        assert!(!outbox.cancel_send(seq + 1, &mut out), "there is none of this number");
        assert!(outbox.cancel_send(seq, &mut out));
        assert!(!outbox.cancel_send(seq, &mut out), "the peer knows");
        assert_eq!(outbox.send_ended(seq), Ok(7));
        assert!(!outbox.cancel_send(seq, &mut out), "the peer has answered");
    }

    #[test]
    fn only_short_readable_sends_go_in_messages() {
        let outbox = Outbox::default();
        let way = |len, iovs, is_readable| outbox.admit_send(len, iovs, is_readable);
        assert_eq!(way(EAGER_MAX, EAGER_IOVS, true), Ok(SendProtocol::Eager));
        assert_eq!(way(EAGER_MAX, EAGER_IOVS, false), Ok(SendProtocol::Rendezvous));
        assert_eq!(way(EAGER_MAX, EAGER_IOVS + 1, true), Ok(SendProtocol::Rendezvous));
        assert_eq!(way(EAGER_MAX + 1, 1, true), Ok(SendProtocol::Rendezvous));
    }
}
