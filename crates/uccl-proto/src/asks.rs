//! Copies that we ask the peer for, because it owns the memory on its side and copies it better.

use uccl_wire::message::{
    self, Answer, AskPiece, Direction, MAX_ASK_PIECES, MAX_ASKED_PIECES, MAX_ASKS,
};

use crate::{Violation, numbered::NumberedQueue};

/// The peer gets no more asks after this many declined ones in a row.
const PATIENCE: u32 = 8;

struct Ask<A> {
    handle: A,
    pieces: usize,
    /// Whether we have sent the peer a cancel.
    is_withdrawn: bool,
}

/// Asks that the peer has not answered.
pub struct Asks<A> {
    open: NumberedQueue<Ask<A>>,
    pieces: usize,
    /// How often in a row the peer has declined.
    declined: u32,
}

impl<A> Default for Asks<A> {
    fn default() -> Self {
        Self { open: NumberedQueue::default(), pieces: 0, declined: 0 }
    }
}

impl<A> Asks<A> {
    /// Whether the peer may be asked for `pieces` more pieces.
    pub fn admits(&self, pieces: usize) -> bool {
        pieces <= MAX_ASK_PIECES
            && self.open.len() < MAX_ASKS
            && self.pieces + pieces <= MAX_ASKED_PIECES
            && self.declined < PATIENCE
    }

    /// Encodes an ask that [`Self::admits`] has allowed. Its answer gives the handle back.
    pub fn ask(
        &mut self,
        direction: Direction,
        pieces: impl ExactSizeIterator<Item = AskPiece>,
        handle: A,
        out: &mut Vec<u8>,
    ) {
        self.pieces += pieces.len();
        let ask = Ask { handle, pieces: pieces.len(), is_withdrawn: false };
        message::ask(self.open.next(), direction, pieces, out);
        self.open.push(ask);
    }

    /// Notes the peer's answer: it is done with the ask.
    pub(crate) fn answered(&mut self, id: u64, answer: Answer) -> Result<A, Violation> {
        let ask = self.open.remove(id).ok_or(Violation::UnknownAsk(id))?;
        self.pieces -= ask.pieces;
        match answer {
            Answer::Copied => self.declined = 0,
            Answer::Declined => self.declined += 1,
            Answer::Cancelled | Answer::Refused(_) => {}
        }
        Ok(ask.handle)
    }

    /// Whether a matching ask has not been answered.
    pub fn any(&mut self, is_it: impl Fn(&A) -> bool) -> bool {
        self.open.iter_mut().any(|(_, ask)| is_it(&ask.handle))
    }

    /// Encodes the withdrawal of one matching ask. The peer still answers the ask. False if there
    /// is none left.
    pub fn withdraw_one(&mut self, is_it: impl Fn(&A) -> bool, out: &mut Vec<u8>) -> bool {
        let mut open = self.open.iter_mut();
        let Some((id, ask)) = open.find(|(_, ask)| !ask.is_withdrawn && is_it(&ask.handle)) else {
            return false;
        };
        ask.is_withdrawn = true;
        message::ask_cancel(id, out);
        true
    }

    pub(crate) fn close(&mut self) -> Vec<A> {
        self.pieces = 0;
        self.open.drain().map(|ask| ask.handle).collect()
    }
}

#[cfg(test)]
mod tests {
    use uccl_wire::{frame::Status, message::Place};

    use super::*;

    const PLACE: Place = Place { addr: 1, key: 2, slot: 3 };
    const PIECE: AskPiece = AskPiece { owner: PLACE, asker: PLACE, len: 4 };

    fn ask(asks: &mut Asks<u32>, handle: u32, pieces: usize) {
        asks.ask(Direction::ToOwner, vec![PIECE; pieces].into_iter(), handle, &mut Vec::new());
    }

    #[test]
    fn no_more_is_asked_than_agreed() {
        let mut asks = Asks::default();
        assert!(!asks.admits(MAX_ASK_PIECES + 1));
        for i in 0..(MAX_ASKED_PIECES / MAX_ASK_PIECES) as u32 {
            assert!(asks.admits(MAX_ASK_PIECES));
            ask(&mut asks, i, MAX_ASK_PIECES);
        }
        assert!(!asks.admits(1));
        assert_eq!(asks.answered(2, Answer::Copied), Ok(1));
        assert!(asks.admits(MAX_ASK_PIECES) && !asks.admits(MAX_ASK_PIECES + 1));
        assert_eq!(asks.answered(2, Answer::Copied), Err(Violation::UnknownAsk(2)));
    }

    #[test]
    fn a_peer_that_declines_is_not_asked_for_ever() {
        let mut asks = Asks::default();
        for id in 1..=u64::from(PATIENCE) {
            assert!(asks.admits(1));
            ask(&mut asks, 0, 1);
            asks.answered(id, Answer::Declined).expect("it is under way");
        }
        assert!(!asks.admits(1));
    }

    #[test]
    fn an_ask_is_withdrawn_once_and_answered_all_the_same() {
        let (mut asks, mut out) = (Asks::default(), Vec::new());
        [7, 8, 7].iter().for_each(|handle| ask(&mut asks, *handle, 1));
        assert!(asks.withdraw_one(|handle| *handle == 7, &mut out));
        assert!(asks.withdraw_one(|handle| *handle == 7, &mut out));
        assert!(!asks.withdraw_one(|handle| *handle == 7, &mut out));
        assert!(asks.any(|handle| *handle == 7));
        assert_eq!(asks.answered(1, Answer::Cancelled), Ok(7));
        assert_eq!(asks.answered(3, Answer::Copied), Ok(7));
        assert!(!asks.any(|handle| *handle == 7));
        assert_eq!(asks.close(), [8]);
    }

    #[test]
    fn only_declines_in_a_row_count() {
        let mut asks = Asks::default();
        let mut id = 0;
        let mut hear = |asks: &mut Asks<u32>, answer| {
            id += 1;
            ask(asks, 0, 1);
            asks.answered(id, answer).expect("it is under way");
        };
        for _ in 1..PATIENCE {
            hear(&mut asks, Answer::Declined);
        }
        hear(&mut asks, Answer::Copied);
        for _ in 1..PATIENCE {
            hear(&mut asks, Answer::Declined);
        }
        assert!(asks.admits(1), "it has copied meanwhile");
        // Neither answer shows whether the peer is willing.
        hear(&mut asks, Answer::Cancelled);
        hear(&mut asks, Answer::Refused(Status::UnknownKey));
        assert!(asks.admits(1));
        hear(&mut asks, Answer::Declined);
        assert!(!asks.admits(1));
    }

    #[test]
    fn asks_are_bounded_in_number() {
        let mut asks = Asks::default();
        for handle in 0..MAX_ASKS as u32 {
            assert!(asks.admits(1));
            ask(&mut asks, handle, 1);
        }
        assert!(!asks.admits(1));
        asks.answered(1, Answer::Copied).expect("it is under way");
        assert!(asks.admits(1));
    }
}
