//! One rank's part in one call.

use smallvec::SmallVec;

use super::Mark;
use crate::placing::{Place, SLOTS};

/// The words of a rank's window that its peers set, for the calls that may be under way.
pub trait Words {
    /// What a peer says of its data here.
    fn arrived(&self, from: usize, slot: usize) -> Mark;
    /// What a peer says of our data there.
    fn taken(&self, by: usize, slot: usize) -> Mark;
}

/// How a rank takes what it receives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Takes {
    /// The round of each rank by itself, as a dispatch does.
    EachAlone,
    /// A round when all ranks' parts of it are there, as a combine does. All ranks send the same number of rounds.
    AllTogether,
}

/// What can be done now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Write this round to a rank's place, and set its `arrived` to the mark.
    Send {
        /// The rank.
        to: usize,
        /// Its round and whether it is the last.
        mark: Mark,
    },
    /// Take a round out of this rank's own place. `from` is `None` if it is that of all ranks.
    Take {
        /// The rank that sent it.
        from: Option<usize>,
        /// The round.
        round: u16,
    },
    /// Set a rank's `taken` to the mark.
    Tell {
        /// The rank.
        to: usize,
        /// What it is told.
        mark: Mark,
    },
}

#[derive(Clone, Copy, Debug)]
struct Sending {
    rounds: u16,
    next: u16,
}

#[derive(Clone, Copy, Default, Debug)]
struct Receiving {
    round: u16,
    is_done: bool,
}

/// One rank's part in one call. [`next`](Self::next) says what can be done now; whoever does it says so, with
/// [`sent`](Self::sent) or [`took`](Self::took), before it asks again.
#[derive(Debug)]
pub struct Call {
    place: Place,
    takes: Takes,
    /// By rank; `None`: it is not there.
    sending: Vec<Option<Sending>>,
    receiving: Vec<Option<Receiving>>,
    /// What is to be told yet.
    tell: SmallVec<[(usize, Mark); 8]>,
    is_ended: bool,
    waits_for_readers: bool,
}

impl Call {
    /// A call in which `rounds[r]` rounds (at least one) go to rank `r`, or `None` if the rank is not there.
    #[must_use]
    pub fn new(place: Place, takes: Takes, rounds: &[Option<u16>]) -> Self {
        let sending =
            |rounds: &Option<u16>| rounds.map(|rounds| Sending { rounds: rounds.max(1), next: 0 });
        let receiving = |rounds: &Option<u16>| rounds.map(|_| Receiving::default());
        Self {
            place,
            takes,
            sending: rounds.iter().map(sending).collect(),
            receiving: rounds.iter().map(receiving).collect(),
            tell: SmallVec::new(),
            is_ended: false,
            waits_for_readers: false,
        }
    }

    /// The call's number.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.place.call
    }

    /// Where its data is.
    #[must_use]
    pub fn place(&self) -> &Place {
        &self.place
    }

    fn slot(&self) -> usize {
        self.place.call as usize % SLOTS
    }

    fn mark(&self, round: u16, is_last: bool) -> Mark {
        Mark { call: self.place.call, round, is_last }
    }

    /// Whether all has been sent that this rank sends.
    #[must_use]
    pub fn has_sent_all(&self) -> bool {
        self.sending.iter().flatten().all(|sending| sending.next == sending.rounds)
    }

    /// Has the call end only when all peers have: they read this rank's memory until then.
    pub fn wait_for_readers(&mut self) {
        self.waits_for_readers = true;
    }

    /// Whether nothing is left to do.
    #[must_use]
    pub fn is_over(&self, words: &impl Words) -> bool {
        let is_done = self.is_ended && self.tell.is_empty() && self.has_sent_all();
        is_done && self.readers(words).next().is_none()
    }

    /// The peers that have not ended, where the call waits for them.
    fn readers(&self, words: &impl Words) -> impl Iterator<Item = Awaited> {
        let expected = self.mark(0, true);
        let peers = self.sending.iter().enumerate().filter_map(move |(peer, sending)| {
            let seen = words.taken(peer, self.slot());
            let reads = sending.is_some() && seen.call <= expected.call && seen != expected;
            reads.then_some(Awaited { peer, what: "end", expected, seen })
        });
        peers.filter(|_| self.waits_for_readers)
    }

    /// Whether the first round of every rank is there.
    #[must_use]
    pub fn has_heard_all(&self, words: &impl Words) -> bool {
        (0..self.receiving.len()).all(|rank| self.has_heard(rank, words))
    }

    fn has_heard(&self, rank: usize, words: &impl Words) -> bool {
        self.receiving[rank].is_none_or(|receiving| {
            receiving.is_done || receiving.round > 0 || self.has_arrived(rank, receiving, words)
        })
    }

    fn has_arrived(&self, from: usize, receiving: Receiving, words: &impl Words) -> bool {
        let mark = words.arrived(from, self.slot());
        !receiving.is_done && (mark.call, mark.round) == (self.place.call, receiving.round)
    }

    /// What can be sent now.
    pub fn next_send(&mut self, words: &impl Words) -> Option<Step> {
        (0..self.sending.len()).find_map(|to| {
            let sending = self.sending[to]?;
            let is_next =
                sending.next < sending.rounds && self.lacks_room(to, sending, words).is_none();
            let mark = self.mark(sending.next, sending.next + 1 == sending.rounds);
            is_next.then_some(Step::Send { to, mark })
        })
    }

    /// What can be done now, but sending: only where `may_take`, rounds are taken out.
    pub fn next(&mut self, words: &impl Words, may_take: bool) -> Option<Step> {
        if let Some((to, mark)) = self.tell.pop() {
            return Some(Step::Tell { to, mark });
        }
        if let Some(send) = self.next_send(words) {
            return Some(send);
        }
        if !may_take || self.is_ended {
            return None;
        }
        match self.takes {
            Takes::EachAlone => (0..self.receiving.len()).find_map(|from| {
                let receiving = self.receiving[from]?;
                let has_arrived = self.has_arrived(from, receiving, words);
                has_arrived.then_some(Step::Take { from: Some(from), round: receiving.round })
            }),
            Takes::AllTogether => {
                let round = self.receiving.iter().flatten().next()?.round;
                let has_arrived = |(from, receiving): (usize, &Option<Receiving>)| {
                    receiving.is_none_or(|receiving| self.has_arrived(from, receiving, words))
                };
                let all = self.receiving.iter().enumerate().all(has_arrived);
                all.then_some(Step::Take { from: None, round })
            }
        }
    }

    /// The mark of a rank's `taken` that has to be there, and is not, before the next round is written to its place.
    fn lacks_room(&self, to: usize, sending: Sending, words: &impl Words) -> Option<Mark> {
        let taken = |mark: &Mark| words.taken(to, mark.call as usize % SLOTS);
        if let Some(before) = sending.next.checked_sub(1) {
            return Some(self.mark(before, false)).filter(|mark| taken(mark) != *mark);
        }
        let ended = |call: &u64| Mark { call: *call, round: 0, is_last: true };
        // A later call has the word already if it went ahead of this one, and it waited for the same end.
        let lacks = |mark: &Mark| taken(mark).call <= mark.call && taken(mark) != *mark;
        self.place.after.iter().map(ended).find(lacks)
    }

    /// A round has been written, and `arrived` set.
    pub fn sent(&mut self, to: usize) {
        if let Some(sending) = &mut self.sending[to] {
            sending.next += 1;
        }
    }

    /// A round has been taken out; `from` as in [`Step::Take`]. `words` still say what they did.
    pub fn took(&mut self, from: Option<usize>, words: &impl Words) {
        for rank in 0..self.receiving.len() {
            if from.is_some_and(|from| from != rank) {
                continue;
            }
            let is_last = words.arrived(rank, self.slot()).is_last;
            let Some(receiving) = &mut self.receiving[rank] else { continue };
            let round = receiving.round;
            (receiving.round, receiving.is_done) = (round + 1, is_last);
            if !is_last {
                self.tell.push((rank, self.mark(round, false)));
            }
        }
        if self.receiving.iter().flatten().all(|receiving| receiving.is_done) {
            self.end();
        }
    }

    fn end(&mut self) {
        self.is_ended = true;
        for rank in 0..self.receiving.len() {
            if self.receiving[rank].is_some() {
                self.tell.push((rank, self.mark(0, true)));
            }
        }
    }

    /// A rank is not there any more: nothing is sent to it and nothing awaited.
    pub fn drop_rank(&mut self, rank: usize) {
        (self.sending[rank], self.receiving[rank]) = (None, None);
        self.tell.retain(|(to, _)| *to != rank);
        if !self.is_ended && self.receiving.iter().flatten().all(|receiving| receiving.is_done) {
            self.end();
        }
    }

    /// What the call waits for: a rank, the mark that it should have set, and the one that it has set.
    #[must_use]
    pub fn awaited(&self, words: &impl Words) -> Vec<Awaited> {
        let slot = self.slot();
        let sends = self.sending.iter().enumerate().filter_map(|(peer, sending)| {
            let sending = (*sending)?;
            let sending = Some(sending).filter(|sending| sending.next < sending.rounds)?;
            let expected = self.lacks_room(peer, sending, words)?;
            let seen = words.taken(peer, expected.call as usize % SLOTS);
            Some(Awaited { peer, what: "room", expected, seen })
        });
        let receives = self.receiving.iter().enumerate().filter_map(|(peer, receiving)| {
            let receiving = (*receiving)?;
            let waits = !receiving.is_done && !self.has_arrived(peer, receiving, words);
            let expected = self.mark(receiving.round, false);
            waits.then_some(Awaited {
                peer,
                what: "data",
                expected,
                seen: words.arrived(peer, slot),
            })
        });
        let readers = self.readers(words).filter(|_| self.is_ended);
        sends.chain(receives).chain(readers).collect()
    }
}

/// What a call waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Awaited {
    /// The rank that should have set it.
    pub peer: usize,
    /// Data, room for data, or its end of the call.
    pub what: &'static str,
    /// The mark that it should have set.
    pub expected: Mark,
    /// The mark that is there.
    pub seen: Mark,
}
