//! Signals: words of one end's memory that the other end changes, each exactly once.
//!
//! A signal is sent when the data that it announces is visible at the owner. The owner answers it
//! when it has changed the word. Both messages use the first lane, with which the connection ends.
//! So a signal is never sent twice, and the owner refuses a number that is not the next one.

use uccl_wire::{
    frame::Status,
    message::{self, Place},
    signal::Change,
};

use crate::{Full, Violation, limits::MAX_SIGNALS, numbered::NumberedQueue};

/// Signals of both ends.
pub struct Signals<T> {
    /// Our signals that the peer has not answered.
    sent: NumberedQueue<T>,
    /// The number of the peer's last signal.
    heard: u64,
    /// How many of the peer's signals we have not answered.
    open: usize,
}

impl<T> Default for Signals<T> {
    fn default() -> Self {
        Self { sent: NumberedQueue::default(), heard: 0, open: 0 }
    }
}

impl<T> Signals<T> {
    /// Encodes a signal. The data that it announces must be visible at the owner.
    ///
    /// # Errors
    /// Too many signals are unanswered already.
    pub fn send(
        &mut self,
        word: Place,
        change: Change,
        handle: T,
        out: &mut Vec<u8>,
    ) -> Result<(), Full> {
        if self.sent.len() >= MAX_SIGNALS {
            let what = "the list of signals that the peer has not answered";
            return Err(Full { what, limit: MAX_SIGNALS });
        }
        message::signal(self.sent.next(), word, change, out);
        self.sent.push(handle);
        Ok(())
    }

    /// Encodes the answer to a signal from the peer.
    pub fn answer(&mut self, id: u64, status: Status, out: &mut Vec<u8>) {
        self.open = self.open.saturating_sub(1);
        message::signal_ack(id, status, out);
    }

    /// Notes a signal from the peer.
    pub(crate) fn heard(&mut self, id: u64) -> Result<(), Violation> {
        if id != self.heard + 1 {
            return Err(Violation::SignalOrder { id, last: self.heard });
        }
        if self.open >= MAX_SIGNALS {
            return Err(Violation::Signals);
        }
        self.heard = id;
        self.open += 1;
        Ok(())
    }

    /// Notes the peer's answer to a signal.
    pub(crate) fn ended(&mut self, id: u64) -> Result<T, Violation> {
        self.sent.remove(id).ok_or(Violation::UnknownSignal(id))
    }

    pub(crate) fn close(&mut self) -> Vec<T> {
        self.open = 0;
        self.sent.drain().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORD: Place = Place { addr: 8, key: 1, slot: 0 };

    #[test]
    fn a_signal_is_heard_once_and_in_its_turn() {
        let mut signals = Signals::<()>::default();
        assert_eq!(signals.heard(1), Ok(()));
        assert_eq!(signals.heard(1), Err(Violation::SignalOrder { id: 1, last: 1 }));
        assert_eq!(signals.heard(3), Err(Violation::SignalOrder { id: 3, last: 1 }));
        assert_eq!(signals.heard(2), Ok(()));
    }

    #[test]
    fn signals_that_nobody_answers_are_bounded_on_both_ends() {
        let (mut signals, mut out) = (Signals::default(), Vec::new());
        for handle in 0..MAX_SIGNALS {
            out.clear();
            signals.send(WORD, Change::Set(1), handle, &mut out).expect("there is room");
            signals.heard(handle as u64 + 1).expect("as agreed");
        }
        assert!(signals.send(WORD, Change::Set(1), 0, &mut out).is_err());
        let next = MAX_SIGNALS as u64 + 1;
        assert_eq!(signals.heard(next), Err(Violation::Signals));
        // An answer makes room at both ends.
        assert_eq!(signals.ended(1), Ok(0));
        assert_eq!(signals.ended(1), Err(Violation::UnknownSignal(1)));
        signals.answer(1, Status::Ok, &mut out);
        assert_eq!(signals.heard(next), Ok(()));
        assert!(signals.send(WORD, Change::Set(1), 0, &mut out).is_ok());
    }

    #[test]
    fn a_refused_signal_makes_room_for_another() {
        let (mut signals, mut out) = (Signals::<()>::default(), Vec::new());
        for id in 1..=MAX_SIGNALS as u64 + 1 {
            signals.heard(id).expect("no more than agreed are open");
            out.clear();
            signals.answer(id, Status::UnknownKey, &mut out);
        }
    }

    #[test]
    fn signals_that_are_open_at_the_end_are_given_back() {
        let (mut signals, mut out) = (Signals::default(), Vec::new());
        for handle in 1..=3 {
            signals.send(WORD, Change::Set(1), handle, &mut out).expect("there is room");
        }
        assert_eq!(signals.ended(2), Ok(2));
        assert_eq!(signals.close(), [1, 3]);
        assert_eq!(signals.ended(3), Err(Violation::UnknownSignal(3)));
    }

    #[test]
    fn the_answer_tells_of_the_signal_and_how_it_went() {
        for status in [Status::Ok, Status::UnknownKey] {
            let (mut signals, mut out, mut expected) =
                (Signals::<()>::default(), Vec::new(), Vec::new());
            signals.heard(1).expect("as agreed");
            signals.answer(1, status, &mut out);
            message::signal_ack(1, status, &mut expected);
            assert_eq!(out, expected);
        }
    }
}
