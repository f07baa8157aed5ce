//! One end of a connection: its parts together, and what each message of the peer comes to.

use std::borrow::Cow;

use uccl_wire::message::{Answer, AskPieces, Direction, Lens, Message, Sources, Verdict};

use crate::{
    Handles, Violation,
    asked::Asked,
    asks::Asks,
    assembler::Assembler,
    incoming::{Incoming, Withdrawn},
    lanes::Lanes,
    liveness::Liveness,
    notifications::Notifications,
    outgoing::Outgoing,
};

/// One end of a connection.
pub struct Session<H: Handles> {
    /// Sends and notifications of ours.
    pub outgoing: Outgoing<H>,
    /// Receives of ours, and sends of the peer's.
    pub incoming: Incoming<H::Receive>,
    /// Notifications of the peer's.
    pub notifications: Notifications,
    /// Copies that we ask for.
    pub asks: Asks<H::Ask>,
    /// Copies that the peer asks for.
    pub asked: Asked<H::Asked>,
    /// Lanes that are lost.
    pub lanes: Lanes<H::Operation>,
    /// Signs of life.
    pub liveness: Liveness,
    assembler: Assembler,
    is_closed: bool,
}

/// What a message of the peer's asks the driver to do.
#[derive(Debug, PartialEq, Eq)]
pub enum Event<'m, H: Handles> {
    /// Nothing.
    Nothing,
    /// A receive has met its send: its data is copied to where the receive wants it, and the send is answered
    /// ([`Incoming::finish`]).
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
    /// A receive has met its send: the data is fetched, and the send is answered ([`Incoming::finish`]).
    Fetch {
        /// The receive.
        receive: H::Receive,
        /// The number of the send.
        seq: u64,
        /// Where each iov is.
        sources: Sources<'m>,
    },
    /// The peer wants back what a receive fetches: it is to end.
    EndReceive(H::Receive),
    /// The peer has answered a send.
    SendEnded {
        /// The send.
        send: H::Send,
        /// What became of it.
        verdict: Verdict,
    },
    /// The peer has answered a notification.
    NotifEnded {
        /// The notification.
        notif: H::Notif,
        /// Whether it could be delivered.
        is_delivered: bool,
    },
    /// Notifications may be there to be delivered ([`Notifications::next`]).
    Notified,
    /// The peer has answered an ask.
    AskEnded {
        /// The ask.
        ask: H::Ask,
        /// What became of it.
        answer: Answer,
    },
    /// The peer asks for a copy, which is answered ([`Asked::ended`], [`Asked::answer`]).
    Copy {
        /// The number of the ask.
        id: u64,
        /// Which way.
        direction: Direction,
        /// What is to be copied.
        pieces: AskPieces<'m>,
    },
    /// The peer does not want a copy any more: it is to end.
    EndCopy(H::Asked),
    /// The peer has lost its end of a lane: ours is to be ended.
    LaneDown {
        /// Which lane.
        lane: usize,
        /// What is to be posted again, if neither end lives now.
        orphans: Option<Vec<H::Operation>>,
    },
    /// A lane of the peer's says something to ours.
    Note {
        /// Which lane.
        lane: u16,
        /// What, for that lane alone to understand.
        note: &'m [u8],
    },
}

/// What a session knew when its connection ended.
pub struct Closed<H: Handles> {
    /// Sends that were not answered.
    pub sends: Vec<H::Send>,
    /// Notifications that were not answered.
    pub notifs: Vec<H::Notif>,
    /// Asks that were not answered.
    pub asks: Vec<H::Ask>,
    /// Operations that waited to be posted again.
    pub orphans: Vec<H::Operation>,
}

impl<H: Handles> Session<H> {
    /// Of a connection with so many lanes.
    #[must_use]
    pub fn new(lanes: usize) -> Self {
        Self {
            outgoing: Outgoing::default(),
            incoming: Incoming::default(),
            notifications: Notifications::default(),
            asks: Asks::default(),
            asked: Asked::default(),
            lanes: Lanes::default(),
            liveness: Liveness::new(lanes),
            assembler: Assembler::default(),
            is_closed: false,
        }
    }

    /// Takes what came in on the first lane, and gives the message once it is whole.
    ///
    /// # Errors
    /// When the fragments make no message.
    pub fn assemble<'a>(&mut self, bytes: &'a [u8]) -> Result<Option<Cow<'a, [u8]>>, Violation> {
        self.assembler.take(bytes)
    }

    /// Takes a message of the peer's, and encodes what is to be sent about it at once, if anything.
    ///
    /// # Errors
    /// The peer has broken the protocol: the connection ends.
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
                Withdrawn::Fetching(receive) => Event::EndReceive(receive),
                Withdrawn::Unmet | Withdrawn::Received => Event::Nothing,
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

    /// Whether the connection has ended: nothing is to be added any more.
    pub fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// The connection has ended. Gives back what the peer may still be at.
    pub fn close(&mut self) -> Closed<H> {
        self.is_closed = true;
        let (sends, notifs) = self.outgoing.close();
        self.incoming.close();
        self.notifications.close();
        self.asked.close();
        Closed { sends, notifs, asks: self.asks.close(), orphans: self.lanes.close() }
    }
}
