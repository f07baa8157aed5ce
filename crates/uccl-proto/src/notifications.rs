//! Incoming notifications: they are delivered in order, and long ones are fetched first.

use std::collections::VecDeque;

use uccl_wire::message::{self, Source};

use crate::{
    Violation,
    limits::{EAGER_WINDOW, MAX_WAITING},
};

enum ArrivedNotification {
    Fetching,
    Here(Vec<u8>),
    There(Source),
}

/// The next step for the oldest notification that has not been delivered.
#[derive(PartialEq, Eq, Debug)]
pub enum NextStep {
    /// Deliver it, after its answer has been sent: its receiver may close the connection at once.
    Deliver(Vec<u8>),
    /// Fetch its payload.
    Fetch {
        /// Its number.
        id: u64,
        /// Where the payload is.
        source: Source,
    },
    /// There is none, or its payload is being fetched.
    Nothing,
}

/// Notifications of one connection that have not been delivered, oldest first.
#[derive(Default)]
pub struct Notifications {
    queue: VecDeque<(u64, ArrivedNotification)>,
    bytes: usize,
}

impl Notifications {
    /// Adds a notification that came with its payload.
    pub(crate) fn arrived(&mut self, id: u64, payload: &[u8]) -> Result<(), Violation> {
        if self.bytes + payload.len() > EAGER_WINDOW {
            return Err(Violation::Notifs);
        }
        self.push(id, ArrivedNotification::Here(payload.to_vec()))?;
        self.bytes += payload.len();
        Ok(())
    }

    /// Adds a notification with a payload to be fetched.
    pub(crate) fn announced(&mut self, id: u64, source: Source) -> Result<(), Violation> {
        self.push(id, ArrivedNotification::There(source))
    }

    fn push(&mut self, id: u64, waiting: ArrivedNotification) -> Result<(), Violation> {
        if self.queue.len() >= MAX_WAITING {
            return Err(Violation::Notifs);
        }
        self.queue.push_back((id, waiting));
        Ok(())
    }

    /// Returns the next step. If that is a delivery, encodes the answer.
    pub fn next(&mut self, out: &mut Vec<u8>) -> NextStep {
        let Some((id, waiting)) = self.queue.front_mut() else { return NextStep::Nothing };
        let id = *id;
        match std::mem::replace(waiting, ArrivedNotification::Fetching) {
            ArrivedNotification::Here(payload) => {
                self.queue.pop_front();
                self.bytes -= payload.len();
                message::notif_ack(id, true, out);
                NextStep::Deliver(payload)
            }
            ArrivedNotification::There(source) => NextStep::Fetch { id, source },
            ArrivedNotification::Fetching => NextStep::Nothing,
        }
    }

    /// Notes that a payload has been fetched (`is_here`), or cannot be fetched. Encodes the answer,
    /// after which the notification is delivered or dropped. False if it is not being fetched.
    pub fn fetched(&mut self, id: u64, is_here: bool, out: &mut Vec<u8>) -> bool {
        let is_first = self.queue.front().is_some_and(|(first, waiting)| {
            *first == id && matches!(waiting, ArrivedNotification::Fetching)
        });
        if is_first {
            self.queue.pop_front();
            message::notif_ack(id, is_here, out);
        }
        is_first
    }

    pub(crate) fn close(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: Source = Source { addr: 1, len: 2, key: 3, slot: 4 };

    #[test]
    fn notifications_come_in_order_also_behind_one_that_is_fetched() {
        let (mut notifs, mut out) = (Notifications::default(), Vec::new());
        notifs.arrived(1, b"one").expect("as agreed");
        notifs.announced(2, SOURCE).expect("as agreed");
        notifs.arrived(3, b"three").expect("as agreed");
        assert_eq!(notifs.next(&mut out), NextStep::Deliver(b"one".to_vec()));
        assert_eq!(notifs.next(&mut out), NextStep::Fetch { id: 2, source: SOURCE });
        assert_eq!(notifs.next(&mut out), NextStep::Nothing);
        assert!(!notifs.fetched(3, true, &mut out), "it is not its turn");
        assert!(notifs.fetched(2, true, &mut out));
        assert!(!notifs.fetched(2, true, &mut out), "it has been");
        assert_eq!(notifs.next(&mut out), NextStep::Deliver(b"three".to_vec()));
        assert_eq!(notifs.next(&mut out), NextStep::Nothing);
    }

    #[test]
    fn notifications_that_are_not_taken_are_bounded() {
        let (mut notifs, mut out) = (Notifications::default(), Vec::new());
        notifs.arrived(1, &vec![0; EAGER_WINDOW]).expect("as agreed");
        assert_eq!(notifs.arrived(2, &[0]), Err(Violation::Notifs));
        assert!(matches!(notifs.next(&mut out), NextStep::Deliver(_)));
        for id in 0..MAX_WAITING as u64 {
            notifs.arrived(id, &[]).expect("as agreed");
        }
        assert_eq!(notifs.arrived(2, &[]), Err(Violation::Notifs));
        assert_eq!(notifs.announced(2, SOURCE), Err(Violation::Notifs));
    }

    #[test]
    fn a_delivered_notification_makes_room_for_more() {
        let (mut notifs, mut out) = (Notifications::default(), Vec::new());
        for id in 1..=3 {
            notifs.arrived(id, &vec![7; EAGER_WINDOW]).expect("as agreed");
            assert!(matches!(notifs.next(&mut out), NextStep::Deliver(_)));
        }
    }

    #[test]
    fn a_notification_that_is_not_fetched_is_not_answered() {
        let (mut notifs, mut out) = (Notifications::default(), Vec::new());
        notifs.announced(1, SOURCE).expect("as agreed");
        assert!(!notifs.fetched(1, true, &mut out) && out.is_empty());
        assert_eq!(notifs.next(&mut out), NextStep::Fetch { id: 1, source: SOURCE });
        assert!(notifs.fetched(1, true, &mut out));
    }

    #[test]
    fn the_answer_tells_whether_the_payload_is_here() {
        for is_here in [false, true] {
            let (mut notifs, mut out) = (Notifications::default(), Vec::new());
            notifs.announced(4, SOURCE).expect("as agreed");
            notifs.next(&mut out);
            assert!(notifs.fetched(4, is_here, &mut out));
            let mut expected = Vec::new();
            message::notif_ack(4, is_here, &mut expected);
            assert_eq!(out, expected);
        }
    }
}
