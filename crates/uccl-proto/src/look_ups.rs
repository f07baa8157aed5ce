//! Look-ups: questions for the regions that the peer publishes at some addresses.
//!
//! The owner answers at once, so it keeps nothing about a look-up. Both messages use the first
//! lane, with which the connection ends.

use uccl_wire::{
    frame::Status,
    message::{self, Range, Source},
};

use crate::{Full, Violation, limits::MAX_LOOK_UPS, numbered::NumberedQueue};

/// Our look-ups that the peer has not answered.
pub struct LookUps<T>(NumberedQueue<T>);

impl<T> Default for LookUps<T> {
    fn default() -> Self {
        Self(NumberedQueue::default())
    }
}

impl<T> LookUps<T> {
    /// Encodes a look-up of at most [`message::MAX_RANGES`] ranges.
    ///
    /// # Errors
    /// Too many look-ups are unanswered already.
    pub fn send(
        &mut self,
        ranges: impl Iterator<Item = Range>,
        handle: T,
        out: &mut Vec<u8>,
    ) -> Result<(), Full> {
        if self.0.len() >= MAX_LOOK_UPS {
            let what = "the list of look-ups that the peer has not answered";
            return Err(Full { what, limit: MAX_LOOK_UPS });
        }
        message::look_up(self.0.next(), ranges, out);
        self.0.push(handle);
        Ok(())
    }

    /// Encodes the answer to a look-up from the peer, of at most [`message::MAX_FOUND`] regions.
    pub fn answer(
        &self,
        id: u64,
        status: Status,
        regions: impl Iterator<Item = Source>,
        out: &mut Vec<u8>,
    ) {
        message::look_up_answer(id, status, regions, out);
    }

    /// Notes the peer's answer to a look-up.
    pub(crate) fn ended(&mut self, id: u64) -> Result<T, Violation> {
        self.0.remove(id).ok_or(Violation::UnknownLookUp(id))
    }

    pub(crate) fn close(&mut self) -> Vec<T> {
        self.0.drain().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn send(look_ups: &mut LookUps<usize>, handle: usize) -> Result<(), Full> {
        look_ups.send([Range { addr: 8, len: 8 }].into_iter(), handle, &mut Vec::new())
    }

    #[test]
    fn look_ups_that_nobody_answers_are_bounded() {
        let mut look_ups = LookUps::default();
        for handle in 0..MAX_LOOK_UPS {
            send(&mut look_ups, handle).expect("there is room");
        }
        assert!(send(&mut look_ups, 0).is_err());
        assert_eq!(look_ups.ended(1), Ok(0));
        assert_eq!(look_ups.ended(1), Err(Violation::UnknownLookUp(1)));
        assert!(send(&mut look_ups, 0).is_ok(), "an answer makes room");
    }

    #[test]
    fn look_ups_that_are_open_at_the_end_are_given_back() {
        let mut look_ups = LookUps::default();
        (1..=3).for_each(|handle| send(&mut look_ups, handle).expect("there is room"));
        assert_eq!(look_ups.ended(2), Ok(2));
        assert_eq!(look_ups.close(), [1, 3]);
        assert_eq!(look_ups.ended(3), Err(Violation::UnknownLookUp(3)));
    }
}
