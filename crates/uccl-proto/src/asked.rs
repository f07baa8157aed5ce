//! Copies that the peer asks us for, because we own the memory and copy it better.

use smallvec::SmallVec;
use uccl_wire::{
    frame::Status,
    message::{self, Answer, AskPieces, MAX_ASKED_PIECES, MAX_ASKS},
};

use crate::Violation;

/// Slots of regions in the region table.
pub type Slots = SmallVec<[u32; 4]>;

struct Copy<T> {
    id: u64,
    /// Slots of our regions that it uses.
    slots: Slots,
    pieces: usize,
    /// The driver's handle for the copy, once it has begun.
    handle: Option<T>,
    /// Whether a region that it uses was deregistered.
    is_revoked: bool,
}

/// How a copy ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CopyEnd {
    /// All of it was made.
    Copied,
    /// It was ended early, by the peer or because a region was deregistered.
    Fenced,
    /// It could not be made. The peer then tries its lanes, and learns the reason there.
    Failed,
}

/// The peer's asks that we have not answered.
pub struct PeerAsks<T> {
    open: Vec<Copy<T>>,
    pieces: usize,
}

impl<T> Default for PeerAsks<T> {
    fn default() -> Self {
        Self { open: Vec::new(), pieces: 0 }
    }
}

impl<T: Clone> PeerAsks<T> {
    /// Notes an ask, before its regions are checked: a thread that deregisters a region revokes it
    /// first and then looks here.
    pub(crate) fn note(&mut self, id: u64, pieces: &AskPieces<'_>) -> Result<(), Violation> {
        let count = pieces.iter().len();
        if self.open.len() >= MAX_ASKS || self.pieces + count > MAX_ASKED_PIECES {
            return Err(Violation::Asks);
        }
        if self.open.iter().any(|copy| copy.id == id) {
            return Err(Violation::RepeatedAsk(id));
        }
        let mut slots: Slots = pieces.iter().map(|piece| piece.owner.slot).collect();
        slots.sort_unstable();
        slots.dedup();
        self.pieces += count;
        self.open.push(Copy { id, slots, pieces: count, handle: None, is_revoked: false });
        Ok(())
    }

    /// Adds slots of regions that a copy uses. Returns whether some are new.
    pub fn add(&mut self, id: u64, regions: Slots) -> bool {
        let Some(copy) = self.find(id) else { return false };
        let known = copy.slots.len();
        copy.slots.extend(regions);
        copy.slots.sort_unstable();
        copy.slots.dedup();
        copy.slots.len() > known
    }

    /// Notes that a copy has begun.
    pub fn begun(&mut self, id: u64, handle: T) {
        if let Some(copy) = self.find(id) {
            copy.handle = Some(handle);
        }
    }

    /// The handle of a copy, if it has begun.
    pub(crate) fn handle(&mut self, id: u64) -> Option<T> {
        self.find(id)?.handle.clone()
    }

    /// Encodes the answer to a copy of which no data moves any more. Encodes nothing if the
    /// connection has ended.
    pub fn ended(&mut self, id: u64, end: CopyEnd, out: &mut Vec<u8>) {
        let answer = match end {
            CopyEnd::Copied => Answer::Copied,
            _ if self.find(id).is_some_and(|copy| copy.is_revoked) => {
                Answer::Refused(Status::UnknownKey)
            }
            CopyEnd::Fenced => Answer::Cancelled,
            CopyEnd::Failed => Answer::Declined,
        };
        self.answer(id, answer, out);
    }

    /// Encodes the answer to an ask for which no copy was begun.
    pub fn answer(&mut self, id: u64, answer: Answer, out: &mut Vec<u8>) {
        let Some(at) = self.open.iter().position(|copy| copy.id == id) else { return };
        self.pieces -= self.open.remove(at).pieces;
        message::answer(id, answer, out);
    }

    /// Notes that a region was revoked. Returns the copies that use it and have begun; `None` if no
    /// ask uses it at all.
    pub fn revoke(&mut self, slot: u32) -> Option<SmallVec<[T; 4]>> {
        let mut to_end = None;
        for copy in self.open.iter_mut().filter(|copy| copy.slots.contains(&slot)) {
            copy.is_revoked = true;
            to_end.get_or_insert_with(SmallVec::new).extend(copy.handle.clone());
        }
        to_end
    }

    pub(crate) fn close(&mut self) {
        *self = Self::default();
    }

    fn find(&mut self, id: u64) -> Option<&mut Copy<T>> {
        self.open.iter_mut().find(|copy| copy.id == id)
    }
}

#[cfg(test)]
mod tests {
    use uccl_wire::message::{AskPiece, Direction, MAX_ASK_PIECES, Message, Place};

    use super::*;

    fn note(asked: &mut PeerAsks<u32>, id: u64, count: usize) -> Result<(), Violation> {
        let place = |slot| Place { addr: 0, key: 0, slot };
        let piece = |i| AskPiece { owner: place(i as u32 % 3), asker: place(9), len: 1 };
        let mut bytes = Vec::new();
        message::ask(id, Direction::ToOwner, (0..count).map(piece), &mut bytes);
        match Message::decode(&bytes) {
            Ok(Message::Ask { pieces, .. }) => asked.note(id, &pieces),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_peer_asks_no_more_than_agreed() {
        let mut asked = PeerAsks::default();
        for id in 0..MAX_ASKS as u64 {
            assert_eq!(note(&mut asked, id, 4), Ok(()));
        }
        assert_eq!(note(&mut asked, 5000, 1), Err(Violation::Asks));
        asked.answer(0, Answer::Declined, &mut Vec::new());
        assert_eq!(note(&mut asked, 1, 1), Err(Violation::RepeatedAsk(1)));
        assert_eq!(note(&mut asked, 5000, 1), Ok(()));
        asked.close();
        let most = (MAX_ASKED_PIECES / MAX_ASK_PIECES) as u64;
        for id in 0..most {
            assert_eq!(note(&mut asked, id, MAX_ASK_PIECES), Ok(()));
        }
        assert_eq!(note(&mut asked, most, 1), Err(Violation::Asks));
        asked.answer(7, Answer::Declined, &mut Vec::new());
        assert_eq!(note(&mut asked, most, MAX_ASK_PIECES), Ok(()));
    }

    #[test]
    fn a_copy_of_a_revoked_region_is_refused() {
        let (mut asked, mut out) = (PeerAsks::default(), Vec::new());
        note(&mut asked, 1, 2).expect("as agreed");
        assert_eq!(asked.revoke(2), None);
        assert!(
            asked.add(1, SmallVec::from_slice(&[1, 7])) && !asked.add(1, Slots::from_elem(7, 1))
        );
        assert_eq!(asked.revoke(7), Some(SmallVec::new()), "it has not begun");
        asked.begun(1, 5);
        assert_eq!(asked.revoke(0), Some(SmallVec::from_slice(&[5])));
        asked.ended(1, CopyEnd::Fenced, &mut out);
        let refused = Answer::Refused(Status::UnknownKey);
        assert_eq!(Message::decode(&out), Ok(Message::Answer { id: 1, answer: refused }));
        assert_eq!(asked.revoke(0), None);
    }

    #[test]
    fn nothing_is_answered_after_the_connection() {
        let (mut asked, mut out) = (PeerAsks::default(), Vec::new());
        note(&mut asked, 1, 2).expect("as agreed");
        note(&mut asked, 2, 2).expect("as agreed");
        asked.begun(1, 5);
        asked.close();
        asked.ended(1, CopyEnd::Copied, &mut out);
        asked.answer(2, Answer::Declined, &mut out);
        assert!(out.is_empty() && asked.handle(1).is_none());
    }
}
