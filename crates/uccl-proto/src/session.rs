//! One end of a connection: it holds the parts together, and handles each message of the peer.

use std::borrow::Cow;

use uccl_wire::{
    frame::Status,
    message::{Answer, AskPieces, Direction, Lens, Message, Place, Ranges, Sources, Verdict},
    signal::Change,
};

use crate::{
    Handles, Violation,
    asked::PeerAsks,
    asks::Asks,
    assembler::Assembler,
    incoming::{CancelState, IncomingQueue},
    lanes::Lanes,
    liveness::Liveness,
    look_ups::LookUps,
    notifications::Notifications,
    outgoing::PendingSends,
    signals::Signals,
};

/// One end of a connection.
pub struct Session<H: Handles> {
    /// Our sends and notifications.
    pub outgoing: PendingSends<H>,
    /// Our receives and the peer's sends.
    pub incoming: IncomingQueue<H::Receive>,
    /// The peer's notifications.
    pub notifications: Notifications,
    /// Signals of both ends.
    pub signals: Signals<H::Signal>,
    /// Our questions for the peer's published regions.
    pub look_ups: LookUps<H::LookUp>,
    /// Copies that we ask the peer for.
    pub asks: Asks<H::Ask>,
    /// Copies that the peer asks for.
    pub asked: PeerAsks<H::PeerCopy>,
    /// Lanes that are lost.
    pub lanes: Lanes<H::Operation>,
    /// When to give up silent lanes.
    pub liveness: Liveness,
    assembler: Assembler,
    is_closed: bool,
}

/// The driver's next step after a message of the peer.
#[derive(Debug, PartialEq, Eq)]
pub enum Event<'m, H: Handles> {
    /// Nothing.
    Nothing,
    /// A receive has met its send: copy the data to where the receive wants it, and answer the send
    /// ([`IncomingQueue::finish`]).
    Received {
        /// The receive.
        receive: H::Receive,
        /// The number of the send.
        seq: u64,
        /// The length of each iov, in bytes; together that of the data.
        lens: Lens<'m>,
        /// The iovs' bytes, one after another.
        data: &'m [u8],
    },
    /// A receive has met its send: fetch the data, and answer the send ([`IncomingQueue::finish`]).
    Fetch {
        /// The receive.
        receive: H::Receive,
        /// The number of the send.
        seq: u64,
        /// Where the data of each iov is.
        sources: Sources<'m>,
    },
    /// The peer wants a send back that this receive is fetching: end the receive.
    EndReceive(H::Receive),
    /// The peer has answered a send.
    SendEnded {
        /// The send.
        send: H::Send,
        /// How it ended.
        verdict: Verdict,
    },
    /// The peer has answered a notification.
    NotifEnded {
        /// The notification.
        notif: H::Notif,
        /// Whether it could be delivered.
        is_delivered: bool,
    },
    /// Change a word of ours at once, and answer ([`Signals::answer`]).
    Signal {
        /// The number of the signal.
        id: u64,
        /// Where the word is.
        word: Place,
        /// How to change it.
        change: Change,
    },
    /// The peer has answered a signal.
    SignalEnded {
        /// The signal.
        signal: H::Signal,
        /// `Ok` if the word has been changed, else why not.
        status: Status,
    },
    /// Answer with the published regions in these ranges ([`LookUps::answer`]).
    LookUp {
        /// The number of the look-up.
        id: u64,
        /// The ranges.
        ranges: Ranges<'m>,
    },
    /// The peer has answered a look-up.
    LookUpEnded {
        /// The look-up.
        look_up: H::LookUp,
        /// `Ok` if the peer publishes regions at all.
        status: Status,
        /// The regions that were found.
        regions: Sources<'m>,
    },
    /// Notifications may be there to be delivered ([`Notifications::next`]).
    Notified,
    /// The peer has answered an ask.
    AskEnded {
        /// The ask.
        ask: H::Ask,
        /// The peer's answer.
        answer: Answer,
    },
    /// The peer asks for a copy: make it, and answer ([`PeerAsks::ended`], [`PeerAsks::answer`]).
    Copy {
        /// The number of the ask.
        id: u64,
        /// In which direction.
        direction: Direction,
        /// The pieces to copy.
        pieces: AskPieces<'m>,
    },
    /// The peer does not want a copy any more: end it.
    EndCopy(H::PeerCopy),
    /// The peer has lost its end of a lane: end ours.
    LaneDown {
        /// Which lane.
        lane: usize,
        /// Operations to post again, if both ends are dead now.
        orphans: Option<Vec<H::Operation>>,
    },
    /// A note from the peer's end of a lane to ours.
    Note {
        /// Which lane.
        lane: u16,
        /// The note, which only that lane understands.
        note: &'m [u8],
    },
}

/// The unfinished items of a connection that ended.
pub struct UnfinishedItems<H: Handles> {
    /// Sends that were not answered.
    pub sends: Vec<H::Send>,
    /// Notifications that were not answered.
    pub notifs: Vec<H::Notif>,
    /// Signals that were not answered: each of them has been applied already, or never will be.
    pub signals: Vec<H::Signal>,
    /// Look-ups that were not answered.
    pub look_ups: Vec<H::LookUp>,
    /// Asks that were not answered.
    pub asks: Vec<H::Ask>,
    /// Operations that waited to be posted again.
    pub orphans: Vec<H::Operation>,
}

impl<H: Handles> Session<H> {
    /// A session for a connection with `lanes` lanes.
    #[must_use]
    pub fn new(lanes: usize) -> Self {
        Self {
            outgoing: PendingSends::default(),
            incoming: IncomingQueue::default(),
            notifications: Notifications::default(),
            signals: Signals::default(),
            look_ups: LookUps::default(),
            asks: Asks::default(),
            asked: PeerAsks::default(),
            lanes: Lanes::default(),
            liveness: Liveness::new(lanes),
            assembler: Assembler::default(),
            is_closed: false,
        }
    }

    /// Takes bytes that came in on the first lane. Returns the message once it is complete.
    ///
    /// # Errors
    /// The fragments do not make up a message.
    pub fn assemble<'a>(&mut self, bytes: &'a [u8]) -> Result<Option<Cow<'a, [u8]>>, Violation> {
        self.assembler.take(bytes)
    }

    /// Handles a message from the peer. Encodes the answer, if one has to be sent at once.
    ///
    /// # Errors
    /// The peer has broken the protocol; end the connection.
    pub fn hear<'m>(
        &mut self,
        message: Message<'m>,
        out: &mut Vec<u8>,
    ) -> Result<Event<'m, H>, Violation> {
        if self.is_closed {
            return Ok(Event::Nothing);
        }
        Ok(match message {
            Message::Eager { seq, lens, data } => {
                let met = self.incoming.eager(seq, lens, data)?;
                met.map_or(Event::Nothing, |receive| Event::Received { receive, seq, lens, data })
            }
            Message::Rts { seq, sources } => {
                let met = self.incoming.rendezvous(seq, sources)?;
                met.map_or(Event::Nothing, |receive| Event::Fetch { receive, seq, sources })
            }
            Message::SendCancel { seq } => match self.incoming.cancelled(seq, out) {
                CancelState::Fetching(receive) => Event::EndReceive(receive),
                CancelState::Unmet | CancelState::Received => Event::Nothing,
            },
            Message::Fin { seq, verdict } => {
                Event::SendEnded { send: self.outgoing.send_ended(seq)?, verdict }
            }
            Message::Notif { id, payload } => {
                self.notifications.arrived(id, payload)?;
                Event::Notified
            }
            Message::NotifRts { id, source } => {
                self.notifications.announced(id, source)?;
                Event::Notified
            }
            Message::NotifAck { id, ok } => {
                Event::NotifEnded { notif: self.outgoing.notif_ended(id)?, is_delivered: ok }
            }
            Message::Signal { id, word, change } => {
                self.signals.heard(id)?;
                Event::Signal { id, word, change }
            }
            Message::SignalAck { id, status } => {
                Event::SignalEnded { signal: self.signals.ended(id)?, status }
            }
            Message::LookUp { id, ranges } => Event::LookUp { id, ranges },
            Message::LookUpAnswer { id, status, regions } => {
                Event::LookUpEnded { look_up: self.look_ups.ended(id)?, status, regions }
            }
            Message::Ask { id, direction, pieces } => {
                self.asked.note(id, &pieces)?;
                Event::Copy { id, direction, pieces }
            }
            Message::AskCancel { id } => {
                self.asked.handle(id).map_or(Event::Nothing, Event::EndCopy)
            }
            Message::Answer { id, answer } => {
                Event::AskEnded { ask: self.asks.answered(id, answer)?, answer }
            }
            Message::LaneDown { lane } => {
                let orphans = self.lanes.peer_end_died(lane, self.liveness.lanes())?;
                Event::LaneDown { lane: lane.into(), orphans }
            }
            Message::Link { lane, note } => Event::Note { lane, note },
        })
    }

    /// Whether the connection has ended: nothing must be added any more.
    pub fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// Ends the session with its connection. Returns the items that the peer may still be using.
    pub fn close(&mut self) -> UnfinishedItems<H> {
        self.is_closed = true;
        let (sends, notifs) = self.outgoing.close();
        self.incoming.close();
        self.notifications.close();
        self.asked.close();
        let (signals, look_ups) = (self.signals.close(), self.look_ups.close());
        let (asks, orphans) = (self.asks.close(), self.lanes.close());
        UnfinishedItems { sends, notifs, signals, look_ups, asks, orphans }
    }
}
