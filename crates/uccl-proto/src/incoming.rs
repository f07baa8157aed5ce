//! Sends that we receive: receives that wait for their sends, and sends that wait for their
//! receives. They meet in order.

use std::collections::VecDeque;

use uccl_wire::message::{self, Lens, Source, Sources, Verdict};

use crate::{
    Violation,
    limits::{EAGER_WINDOW, MAX_PIECES, MAX_UNEXPECTED},
};

/// A send that came before its receive.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum EarlySend {
    /// Its data came with the message.
    Eager {
        /// Its number.
        seq: u64,
        /// The length of each iov, in bytes.
        lens: Vec<u32>,
        /// Their bytes, one after another.
        data: Vec<u8>,
    },
    /// Its data has to be fetched.
    Rendezvous {
        /// Its number.
        seq: u64,
        /// Where the data of each iov is.
        sources: Vec<Source>,
    },
}

impl EarlySend {
    fn seq(&self) -> u64 {
        match self {
            Self::Eager { seq, .. } | Self::Rendezvous { seq, .. } => *seq,
        }
    }

    fn pieces(&self) -> usize {
        match self {
            Self::Eager { lens, .. } => lens.len(),
            Self::Rendezvous { sources, .. } => sources.len(),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Eager { data, .. } => data.len(),
            Self::Rendezvous { .. } => 0,
        }
    }
}

/// The state of a send when the peer's cancel arrives.
#[derive(PartialEq, Eq, Debug)]
pub(crate) enum CancelState<R> {
    /// No receive had met it. The answer reports it as cancelled.
    Unmet,
    /// A receive is fetching it; that has to end.
    Fetching(R),
    /// It has been received already.
    Received,
}

/// Receives and sends that have not met, and receives that are fetching data.
pub struct IncomingQueue<R> {
    posted: VecDeque<R>,
    arrived: VecDeque<EarlySend>,
    bytes: usize,
    pieces: usize,
    /// Each with the number of its send.
    fetching: Vec<(u64, R)>,
}

impl<R> Default for IncomingQueue<R> {
    fn default() -> Self {
        let (posted, arrived, fetching) = (VecDeque::new(), VecDeque::new(), Vec::new());
        Self { posted, arrived, bytes: 0, pieces: 0, fetching }
    }
}

impl<R: Clone> IncomingQueue<R> {
    /// Starts a receive. Returns the oldest send that waits, which it meets; `None`: the receive
    /// waits.
    pub fn receive(&mut self, receive: R) -> Option<(R, EarlySend)> {
        let Some(arrived) = self.next_arrived() else {
            self.posted.push_back(receive);
            return None;
        };
        if let EarlySend::Rendezvous { seq, .. } = arrived {
            self.fetching.push((seq, receive.clone()));
        }
        Some((receive, arrived))
    }

    /// Handles a send that came with its data. Returns the receive that it meets, if there is one.
    pub(crate) fn eager(
        &mut self,
        seq: u64,
        lens: Lens<'_>,
        data: &[u8],
    ) -> Result<Option<R>, Violation> {
        if let Some(receive) = self.posted.pop_front() {
            return Ok(Some(receive));
        }
        // Before the data is copied.
        self.check_room(data.len(), lens.iter().len())?;
        self.keep(EarlySend::Eager { seq, lens: lens.iter().collect(), data: data.to_vec() });
        Ok(None)
    }

    /// Handles a send with data to be fetched. Returns the receive that fetches it, if there is
    /// one.
    pub(crate) fn rendezvous(
        &mut self,
        seq: u64,
        sources: Sources<'_>,
    ) -> Result<Option<R>, Violation> {
        if let Some(receive) = self.posted.pop_front() {
            self.fetching.push((seq, receive.clone()));
            return Ok(Some(receive));
        }
        self.check_room(0, sources.iter().len())?;
        self.keep(EarlySend::Rendezvous { seq, sources: sources.iter().collect() });
        Ok(None)
    }

    fn check_room(&self, bytes: usize, pieces: usize) -> Result<(), Violation> {
        let is_full = self.bytes + bytes > EAGER_WINDOW
            || self.pieces + pieces > MAX_PIECES
            || self.arrived.len() >= MAX_UNEXPECTED;
        if is_full { Err(Violation::Sends) } else { Ok(()) }
    }

    fn keep(&mut self, arrived: EarlySend) {
        self.bytes += arrived.bytes();
        self.pieces += arrived.pieces();
        self.arrived.push_back(arrived);
    }

    fn next_arrived(&mut self) -> Option<EarlySend> {
        let arrived = self.arrived.pop_front()?;
        self.forget(&arrived);
        Some(arrived)
    }

    fn forget(&mut self, arrived: &EarlySend) {
        self.bytes -= arrived.bytes();
        self.pieces -= arrived.pieces();
    }

    /// Takes back a receive that has met no send.
    pub fn withdraw(&mut self, is_it: impl Fn(&R) -> bool) -> Option<R> {
        let at = self.posted.iter().position(is_it)?;
        self.posted.remove(at)
    }

    /// Handles the peer's cancel of a send.
    pub(crate) fn cancelled(&mut self, seq: u64, out: &mut Vec<u8>) -> CancelState<R> {
        if let Some(at) = self.arrived.iter().position(|arrived| arrived.seq() == seq) {
            if let Some(arrived) = self.arrived.remove(at) {
                self.forget(&arrived);
            }
            message::fin(seq, Verdict::Cancelled, out);
            return CancelState::Unmet;
        }
        let fetching = self.fetching.iter().find(|(fetched, _)| *fetched == seq);
        fetching
            .map_or(CancelState::Received, |(_, receive)| CancelState::Fetching(receive.clone()))
    }

    /// Encodes the answer to a send. Its data must not move any more.
    pub fn finish(&mut self, seq: u64, verdict: Verdict, out: &mut Vec<u8>) {
        if let Some(at) = self.fetching.iter().position(|(fetched, _)| *fetched == seq) {
            self.fetching.swap_remove(at);
        }
        message::fin(seq, verdict, out);
    }

    pub(crate) fn close(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use uccl_wire::message::Message;

    use super::*;

    type Inbox = IncomingQueue<u32>;

    fn come(
        inbox: &mut Inbox,
        seq: u64,
        iovs: usize,
        bytes: usize,
    ) -> Result<Option<u32>, Violation> {
        let lens = (0..iovs).map(|i| if i == 0 { bytes as u32 } else { 0 });
        let mut message = Vec::new();
        message::eager_head(seq, lens.collect::<Vec<_>>().into_iter(), &mut message);
        message.resize(message.len() + bytes, 7);
        match Message::decode(&message).expect("a send") {
            Message::Eager { seq, lens, data } => inbox.eager(seq, lens, data),
            other => panic!("{other:?}"),
        }
    }

    fn announce(inbox: &mut Inbox, seq: u64, iovs: usize) -> Result<Option<u32>, Violation> {
        let source = Source { addr: 0, len: 1, key: 2, slot: 3 };
        let mut message = Vec::new();
        message::rts(seq, vec![source; iovs].into_iter(), &mut message);
        match Message::decode(&message).expect("a send") {
            Message::Rts { seq, sources } => inbox.rendezvous(seq, sources),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn sends_and_receives_meet_in_order_whichever_come_first() {
        let mut inbox = Inbox::default();
        assert_eq!(inbox.receive(1), None);
        assert_eq!(inbox.receive(2), None);
        assert_eq!(announce(&mut inbox, 10, 1), Ok(Some(1)));
        assert_eq!(inbox.cancelled(10, &mut Vec::new()), CancelState::Fetching(1));
        assert_eq!(come(&mut inbox, 11, 1, 5), Ok(Some(2)));
        assert_eq!(come(&mut inbox, 12, 1, 5), Ok(None));
        assert_eq!(announce(&mut inbox, 13, 2), Ok(None));
        let (receive, arrived) = inbox.receive(3).expect("a send waits");
        assert_eq!((receive, arrived.seq(), arrived.bytes()), (3, 12, 5));
        let (receive, arrived) = inbox.receive(4).expect("a send waits");
        assert_eq!((receive, arrived.seq(), arrived.pieces()), (4, 13, 2));
        assert_eq!((inbox.bytes, inbox.pieces), (0, 0));
    }

    /// An honest peer keeps to the agreed limits.
    #[test]
    fn sends_that_no_receive_has_met_are_bounded_in_bytes() {
        let mut inbox = Inbox::default();
        for seq in 0..4 {
            come(&mut inbox, seq, 1, EAGER_WINDOW / 4).expect("as agreed");
        }
        come(&mut inbox, 4, 1, 0).expect("it is full, and no fuller than agreed");
        inbox.next_arrived().expect("the first");
        come(&mut inbox, 5, 1, EAGER_WINDOW / 4).expect("there is room again");
        assert_eq!(come(&mut inbox, 6, 1, 1), Err(Violation::Sends), "a byte too many");
    }

    #[test]
    fn sends_that_no_receive_has_met_are_bounded_in_pieces() {
        let mut inbox = Inbox::default();
        for seq in 0..(MAX_PIECES / 65_536) as u64 {
            come(&mut inbox, seq, 65_536, 0).expect("as agreed");
        }
        assert_eq!(come(&mut inbox, 99, 1, 0), Err(Violation::Sends), "a piece too many");
        assert_eq!(announce(&mut inbox, 99, 1), Err(Violation::Sends), "a piece too many");
    }

    #[test]
    fn sends_that_no_receive_has_met_are_bounded_in_number() {
        let mut inbox = Inbox::default();
        for seq in 0..MAX_UNEXPECTED as u64 {
            come(&mut inbox, seq, 0, 0).expect("as agreed");
        }
        assert_eq!(come(&mut inbox, 99, 0, 0), Err(Violation::Sends), "one too many");
    }

    #[test]
    fn a_send_that_is_wanted_back_is_given_back_unless_it_was_received() {
        let (mut inbox, mut out) = (Inbox::default(), Vec::new());
        come(&mut inbox, 1, 1, 5).expect("as agreed");
        announce(&mut inbox, 2, 1).expect("as agreed");
        assert_eq!(inbox.cancelled(1, &mut out), CancelState::Unmet);
        assert_eq!(inbox.receive(7).map(|(_, arrived)| arrived.seq()), Some(2));
        assert_eq!(inbox.cancelled(2, &mut out), CancelState::Fetching(7));
        inbox.finish(2, Verdict::Cancelled, &mut out);
        assert_eq!(inbox.cancelled(2, &mut out), CancelState::Received);
    }

    #[test]
    fn a_send_that_was_given_back_makes_room_for_others() {
        let (mut inbox, mut out) = (Inbox::default(), Vec::new());
        for seq in 0..3 {
            come(&mut inbox, seq, 1, EAGER_WINDOW).expect("there is room for its bytes");
            assert_eq!(inbox.cancelled(seq, &mut out), CancelState::Unmet);
        }
        for seq in 3..=3 + (MAX_PIECES / 65_536) as u64 {
            announce(&mut inbox, seq, 65_536).expect("there is room for its pieces");
            assert_eq!(inbox.cancelled(seq, &mut out), CancelState::Unmet);
        }
    }
}
