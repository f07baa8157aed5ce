//! One rank's part in one call.

use smallvec::SmallVec;

use super::{
    Mark,
    streams::{Stream, Streams},
};
use crate::shared::places::{Place, SLOTS};

/// The words of a rank's window that its peers set, for the calls that may be under way. A word has
/// a number: see [`Stream`].
pub trait Words {
    /// The mark of the data that a peer has written here.
    fn arrived(&self, word: usize, slot: usize) -> Mark;
    /// The mark of our data that a peer has taken out there.
    fn taken(&self, word: usize, slot: usize) -> Mark;
}

/// How a rank takes the rounds that it receives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReceiveMode {
    /// The round of each stream by itself, as a dispatch does.
    PerStream,
    /// A round when all streams' parts of it are there, as a combine does. All of them have the
    /// same number of rounds.
    AllStreams,
}

/// An action that is possible now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Write a round of this rank's own to the peer's place, and set its `arrived` to the mark.
    Send {
        /// The stream that it leaves by.
        stream: Stream,
        /// Its round and whether it is the last.
        mark: Mark,
    },
    /// The same with the round that came over the [inputs](Call::inputs_of) with tokens of the
    /// stream's owner.
    Relay {
        /// The stream that it leaves by.
        stream: Stream,
        /// Its round and whether it is the last.
        mark: Mark,
    },
    /// Take a round out of this rank's own place: that of one stream, or, without a stream, of all.
    Take {
        /// The stream that it came by.
        stream: Option<Stream>,
        /// The round.
        round: u16,
    },
    /// Set a rank's `taken` to the mark.
    SetTaken {
        /// The rank.
        to: usize,
        /// The word's number.
        word: usize,
        /// The mark.
        mark: Mark,
    },
}

#[derive(Clone, Debug)]
struct SendProgress {
    stream: Stream,
    /// `None`: the number of rounds that arrive.
    rounds: Option<u16>,
    next: u16,
}

impl SendProgress {
    fn has_sent_all(&self) -> bool {
        self.rounds == Some(self.next)
    }
}

#[derive(Clone, Debug)]
struct ReceiveProgress {
    stream: Stream,
    round: u16,
    is_done: bool,
}

/// Streams that a rank passes on: a round leaves when it has come over all inputs, and these are
/// free when it has left over all outputs.
#[derive(Clone, Debug)]
struct Relay {
    inputs: Vec<ReceiveProgress>,
    outputs: Vec<SendProgress>,
}

/// One rank's part in one call. [`next`](Self::next) returns an action that is possible now. The
/// caller does it, and reports it with [`sent`](Self::sent) or [`took`](Self::took), unless it is a
/// [`Step::SetTaken`], before it asks again.
#[derive(Debug)]
pub struct Call {
    me: usize,
    place: Place,
    receive_mode: ReceiveMode,
    own: Vec<SendProgress>,
    arriving: Vec<ReceiveProgress>,
    relays: Vec<Relay>,
    /// By rank, whether it is there.
    is_there: Vec<bool>,
    /// The marks to be set at peers: rank, number of the word, mark.
    pending_taken: SmallVec<[(usize, usize, Mark); 8]>,
    is_ended: bool,
    waits_for_readers: bool,
}

/// The ranks that take part in a call, and this rank's streams.
#[derive(Clone, Debug)]
pub struct Participants {
    /// This rank.
    pub me: usize,
    /// By rank, whether it is there.
    pub is_there: Vec<bool>,
    /// This rank's streams.
    pub streams: Streams,
}

impl Call {
    /// A call that sends `rounds` (at least one) over each of this rank's own streams. Relays are
    /// for calls in which all ranks take part.
    #[must_use]
    pub fn new(
        place: Place,
        receive_mode: ReceiveMode,
        participants: Participants,
        rounds: impl Fn(&Stream) -> u16,
    ) -> Self {
        let Participants { me, is_there, streams } = participants;
        let own =
            |stream: Stream| SendProgress { stream, rounds: Some(rounds(&stream).max(1)), next: 0 };
        let passed = |stream: Stream| SendProgress { stream, rounds: None, next: 0 };
        let receiving = |stream: Stream| ReceiveProgress { stream, round: 0, is_done: false };
        let (leaving, arriving) = match receive_mode {
            ReceiveMode::PerStream => (streams.own, streams.arriving),
            ReceiveMode::AllStreams => (streams.arriving, streams.own),
        };
        let relays = streams.relayed.into_iter().map(|relay| {
            let (across, local) = (vec![relay.across], relay.local);
            let (inputs, outputs) = match receive_mode {
                ReceiveMode::PerStream => (across, local),
                ReceiveMode::AllStreams => (local, across),
            };
            let inputs = inputs.into_iter().map(receiving).collect();
            Relay { inputs, outputs: outputs.into_iter().map(passed).collect() }
        });
        let there = |stream: &Stream| is_there[stream.peer];
        let mut call = Self {
            me,
            place,
            receive_mode,
            own: leaving.into_iter().filter(there).map(own).collect(),
            arriving: arriving.into_iter().filter(there).map(receiving).collect(),
            relays: relays.collect(),
            is_there,
            pending_taken: SmallVec::new(),
            is_ended: false,
            waits_for_readers: false,
        };
        // A call in which nothing arrives has ended already.
        call.end_if_done();
        call
    }

    /// The call's number.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.place.call
    }

    /// The place of its data.
    #[must_use]
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// Whether a rank takes part in the call, and has done so from its beginning.
    #[must_use]
    pub fn is_there(&self, rank: usize) -> bool {
        self.is_there[rank]
    }

    /// The streams that rounds arrive by.
    pub fn arriving(&self) -> impl Iterator<Item = &Stream> {
        self.arriving.iter().map(|receiving| &receiving.stream)
    }

    /// The streams that bring rounds of a rank's tokens, which this rank passes on.
    pub fn inputs_of(&self, rank: usize) -> impl Iterator<Item = &Stream> {
        let inputs = self.relays.iter().flat_map(|relay| &relay.inputs);
        inputs.map(|input| &input.stream).filter(move |stream| stream.owner == rank)
    }

    fn slot(&self) -> usize {
        slot_of(self.place.call)
    }

    fn mark(&self, round: u16, is_last: bool) -> Mark {
        Mark { call: self.place.call, round, is_last }
    }

    /// Whether this rank has sent all of its own rounds.
    #[must_use]
    pub fn has_sent_all(&self) -> bool {
        self.own.iter().all(SendProgress::has_sent_all)
    }

    /// Makes the call end only when all peers have ended it: they read this rank's memory until
    /// then.
    pub fn wait_for_readers(&mut self) {
        self.waits_for_readers = true;
    }

    /// Whether nothing is left to do.
    #[must_use]
    pub fn is_over(&self, words: &impl Words) -> bool {
        let is_done = self.is_ended && self.pending_taken.is_empty() && self.has_sent_all();
        is_done && self.readers(words).next().is_none()
    }

    /// The peers that have not ended, where the call waits for them.
    fn readers(&self, words: &impl Words) -> impl Iterator<Item = MissingMark> {
        let expected = self.mark(0, true);
        let peers = (0..self.is_there.len()).filter(|peer| self.is_there[*peer]);
        let readers = peers.filter_map(move |peer| {
            let seen = words.taken(peer, self.slot());
            let reads = seen.call <= expected.call && seen != expected;
            reads.then_some(MissingMark {
                peer,
                owner: self.me,
                what: MissingMark::END,
                expected,
                seen,
            })
        });
        readers.filter(|_| self.waits_for_readers)
    }

    /// Whether the first round of every stream is there.
    #[must_use]
    pub fn has_all_first_rounds(&self, words: &impl Words) -> bool {
        self.arriving.iter().all(|receiving| self.has_begun(receiving, words))
    }

    /// Whether the first round of every stream that a peer sends is there.
    #[must_use]
    pub fn has_first_rounds_of(&self, peer: usize, words: &impl Words) -> bool {
        let of_peer = |receiving: &&ReceiveProgress| receiving.stream.peer == peer;
        self.arriving.iter().filter(of_peer).all(|receiving| self.has_begun(receiving, words))
    }

    fn has_begun(&self, receiving: &ReceiveProgress, words: &impl Words) -> bool {
        receiving.is_done || receiving.round > 0 || self.has_arrived(receiving, words)
    }

    fn has_arrived(&self, receiving: &ReceiveProgress, words: &impl Words) -> bool {
        let mark = words.arrived(receiving.stream.local_word, self.slot());
        !receiving.is_done && (mark.call, mark.round) == (self.place.call, receiving.round)
    }

    /// The next action that is possible. Rounds are taken out only where `may_take`.
    pub fn next(&mut self, words: &impl Words, may_take: bool) -> Option<Step> {
        if let Some((to, word, mark)) = self.pending_taken.pop() {
            return Some(Step::SetTaken { to, word, mark });
        }
        let send = self.next_send(words).or_else(|| self.next_relayed(words));
        if send.is_some() || !may_take || self.is_ended {
            return send;
        }
        match self.receive_mode {
            ReceiveMode::PerStream => {
                let next = self.arriving.iter().find(|next| self.has_arrived(next, words))?;
                Some(Step::Take { stream: Some(next.stream), round: next.round })
            }
            ReceiveMode::AllStreams => {
                let round = self.arriving.first()?.round;
                let all = self.arriving.iter().all(|next| self.has_arrived(next, words));
                all.then_some(Step::Take { stream: None, round })
            }
        }
    }

    fn next_send(&self, words: &impl Words) -> Option<Step> {
        let may_go = |sending: &&SendProgress| {
            !sending.has_sent_all() && self.missing_room(sending, words).is_none()
        };
        let SendProgress { stream, rounds, next } = *self.own.iter().find(may_go)?;
        Some(Step::Send { stream, mark: self.mark(next, rounds == Some(next + 1)) })
    }

    fn next_relayed(&self, words: &impl Words) -> Option<Step> {
        self.relays.iter().find_map(|relay| {
            let mark = self.ready_round(relay, words)?;
            let may_go = |sending: &&SendProgress| {
                sending.next == mark.round && self.missing_room(sending, words).is_none()
            };
            let SendProgress { stream, .. } = *relay.outputs.iter().find(may_go)?;
            Some(Step::Relay { stream, mark })
        })
    }

    /// The round that has come over all inputs.
    fn ready_round(&self, relay: &Relay, words: &impl Words) -> Option<Mark> {
        let all = relay.inputs.iter().all(|input| self.has_arrived(input, words));
        let first = relay.inputs.first().filter(|_| all)?;
        Some(words.arrived(first.stream.local_word, self.slot()))
    }

    /// The mark that must be set before the next round is written, and is not yet: its rank, and
    /// the mark.
    fn missing_room(&self, sending: &SendProgress, words: &impl Words) -> Option<(usize, Mark)> {
        let Stream { peer, local_word, .. } = sending.stream;
        if let Some(before) = sending.next.checked_sub(1) {
            let mark = self.mark(before, false);
            return (words.taken(local_word, self.slot()) != mark).then_some((peer, mark));
        }
        self.place.after.iter().find_map(|call| {
            let mark = Mark { call: *call, round: 0, is_last: true };
            // If a later call went ahead of this one, the word has its mark: it waited for the same
            // end.
            let lacks = |rank: &usize| {
                let seen = words.taken(*rank, slot_of(*call));
                self.is_there[*rank] && seen.call <= mark.call && seen != mark
            };
            // With relays, a rank can end a call before it knows that a peer has read its last
            // marks. So before it sets the same words again, it waits for the end of that call at
            // all ranks. Otherwise two changes of a word could overtake each other.
            let is_of_all = !self.relays.is_empty() && call + SLOTS as u64 == self.place.call;
            let rank = match is_of_all {
                true => (0..self.is_there.len()).find(lacks),
                false => Some(peer).filter(lacks),
            };
            rank.map(|rank| (rank, mark))
        })
    }

    /// Reports that a round has been written, and `arrived` set. `words` are as they were in
    /// [`next`](Self::next).
    pub fn sent(&mut self, stream: &Stream, words: &impl Words) {
        // No two streams that leave a rank share words.
        let is_it = |sending: &&mut SendProgress| sending.stream == *stream;
        if let Some(sending) = self.own.iter_mut().find(is_it) {
            sending.next += 1;
            return;
        }
        let slot = self.slot();
        for relay in &mut self.relays {
            let Some(sending) = relay.outputs.iter_mut().find(is_it) else { continue };
            sending.next += 1;
            let round = relay.inputs.first().map_or(0, |input| input.round);
            if relay.outputs.iter().all(|output| output.next > round) {
                for input in &mut relay.inputs {
                    advance(input, words, slot, &mut self.pending_taken);
                }
            }
        }
        self.end_if_done();
    }

    /// Reports that a round has been taken out; `stream` as in [`Step::Take`]. `words` are as they
    /// were in [`next`](Self::next).
    pub fn took(&mut self, stream: Option<Stream>, words: &impl Words) {
        let slot = self.slot();
        for receiving in &mut self.arriving {
            if stream.is_none_or(|stream| stream == receiving.stream) {
                advance(receiving, words, slot, &mut self.pending_taken);
            }
        }
        self.end_if_done();
    }

    fn end_if_done(&mut self) {
        let inputs = self.relays.iter().flat_map(|relay| &relay.inputs);
        let is_done = self.arriving.iter().chain(inputs).all(|receiving| receiving.is_done);
        if !is_done || self.is_ended {
            return;
        }
        self.is_ended = true;
        let mark = self.mark(0, true);
        // Ranks that are left out get the mark too: if one takes part in a later call, it writes to
        // this place.
        self.pending_taken.extend((0..self.is_there.len()).map(|rank| (rank, self.me, mark)));
    }

    /// Drops a rank: nothing is sent to it and nothing awaited from it. For calls without relays.
    pub fn drop_rank(&mut self, rank: usize) {
        self.own.retain(|sending| sending.stream.peer != rank);
        self.arriving.retain(|receiving| receiving.stream.peer != rank);
        self.pending_taken.retain(|(to, ..)| *to != rank);
        self.is_there[rank] = false;
        self.end_if_done();
    }

    /// The marks that the call waits for, with the marks that are there instead.
    #[must_use]
    pub fn awaited(&self, words: &impl Words) -> Vec<MissingMark> {
        let relayed = self.relays.iter().filter_map(|relay| {
            let round = self.ready_round(relay, words)?.round;
            Some(relay.outputs.iter().filter(move |output| output.next == round))
        });
        let leaving = self.own.iter().filter(|sending| !sending.has_sent_all());
        let sends = leaving.chain(relayed.flatten()).filter_map(|sending| {
            let (peer, expected) = self.missing_room(sending, words)?;
            let word = if sending.next > 0 { sending.stream.local_word } else { peer };
            let seen = words.taken(word, slot_of(expected.call));
            Some(MissingMark {
                peer,
                owner: sending.stream.owner,
                what: MissingMark::ROOM,
                expected,
                seen,
            })
        });
        let inputs = self.relays.iter().flat_map(|relay| &relay.inputs);
        let receives = self.arriving.iter().chain(inputs).filter_map(|receiving| {
            let Stream { peer, owner, local_word, .. } = receiving.stream;
            let waits = !receiving.is_done && !self.has_arrived(receiving, words);
            let expected = self.mark(receiving.round, false);
            let seen = words.arrived(local_word, self.slot());
            waits.then_some(MissingMark { peer, owner, what: MissingMark::DATA, expected, seen })
        });
        let readers = self.readers(words).filter(|_| self.is_ended);
        sends.chain(receives).chain(readers).collect()
    }
}

fn slot_of(call: u64) -> usize {
    call as usize % SLOTS
}

/// Advances a stream by the round that has been taken out.
fn advance(
    receiving: &mut ReceiveProgress,
    words: &impl Words,
    slot: usize,
    pending_taken: &mut SmallVec<[(usize, usize, Mark); 8]>,
) {
    let Stream { peer, local_word, remote_word, .. } = receiving.stream;
    let mark = words.arrived(local_word, slot);
    (receiving.round, receiving.is_done) = (receiving.round + 1, mark.is_last);
    if !mark.is_last {
        pending_taken.push((peer, remote_word, Mark { is_last: false, ..mark }));
    }
}

/// A mark that a call waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MissingMark {
    /// The rank that should have set it.
    pub peer: usize,
    /// The rank that owns the tokens.
    pub owner: usize,
    /// Data, room for data, or its end of the call.
    pub what: &'static str,
    /// The mark that it should have set.
    pub expected: Mark,
    /// The mark that is there.
    pub seen: Mark,
}

impl MissingMark {
    /// Data is missing.
    pub const DATA: &str = "data";
    /// Room for data is missing.
    pub const ROOM: &str = "room";
    /// The end of the call is missing.
    pub const END: &str = "end";
}
