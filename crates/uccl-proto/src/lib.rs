//! The protocol of a connection: the messages between its two ends, and their consequences.
//!
//! A [`Session`] is one end. It is plain data: it does no I/O, takes no lock, reads no clock,
//! starts no thread and touches no user's memory. Its driver passes it each event (a call, a
//! message, the end of an operation, the time), writes the messages that it encodes to the first
//! lane *in the order in which it encodes them*, and acts on the events that it returns. So a test
//! can run both ends in one thread, in virtual time, under any schedule.
//!
//! ```text
//!   sender                                receiver
//!     | outgoing.eager_send(lens)            |
//!     |------- Eager 1, its data ----------->| incoming: meets a receive, or waits for one
//!     |<------ Fin 1, Received --------------| incoming.finish(1)
//!     | outgoing.rendezvous_send(sources)    |
//!     |------- Rts 2, keys of the data ----->| Event::Fetch: the driver reads, over any lane
//!     |<------ Fin 2, Received --------------| incoming.finish(2)
//! ```
//!
//! | part | state |
//! | --- | --- |
//! | [`outgoing`] | sends and notifications that the peer has not answered, and how much of them the peer has to keep |
//! | [`incoming`] | receives that wait for sends, sends that wait for receives: the two meet in order |
//! | [`notifications`] | notifications of the peer, which are delivered in order, long ones after they have been fetched |
//! | [`asks`], [`asked`] | copies that an owner of memory makes for its peer: those we asked for, and those we make |
//! | [`signals`] | words of the peer's memory that we change, and of ours that the peer changes, each exactly once |
//! | [`look_ups`] | questions for the peer's published regions |
//! | [`lanes`] | lanes that are lost, and their operations, which are posted again when neither end of a lane lives |
//! | [`liveness`] | when a silent peer is asked for a sign of life, and when it is given up |
//! | [`assembler`] | messages that come in fragments |

#![forbid(unsafe_code)]

pub mod asked;
pub mod asks;
pub mod assembler;
pub mod incoming;
pub mod lanes;
pub mod limits;
pub mod liveness;
pub mod look_ups;
pub mod notifications;
mod numbered;
pub mod outgoing;
mod session;
pub mod signals;

pub use self::session::{Event, Session};

use uccl_wire::message::{MAX_ASSEMBLED, MessageError};

/// The types of the driver's handles, one kind for each item of a session. The session hands them
/// back and never looks inside.
pub trait Handles {
    /// A send of ours, until the peer has answered it.
    type Send;
    /// A notification of ours, until the peer has answered it.
    type Notif;
    /// A signal of ours, until the peer has answered it.
    type Signal;
    /// A look-up of ours, until the peer has answered it.
    type LookUp;
    /// A receive, until its send has been answered.
    type Receive: Clone;
    /// A copy that we asked the peer for.
    type Ask;
    /// A copy that we make for the peer.
    type PeerCopy: Clone;
    /// An operation that is posted again if its lane is lost.
    type Operation;
}

/// The list of unanswered items is full.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{what} is full: {limit}")]
pub struct Full {
    /// Which list.
    pub what: &'static str,
    /// How many entries it can have.
    pub limit: usize,
}

/// How the peer broke the protocol. The connection ends because of it.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// A message that cannot be decoded.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// A message that is shorter than its prefix.
    #[error("a message of {0} bytes")]
    Short(usize),
    /// Fragments of a message that is too long.
    #[error("a message of more than {MAX_ASSEMBLED} bytes")]
    Long,
    /// A fragment of one message among those of another.
    #[error("fragments of different messages are mixed")]
    Mixed,
    /// More sends that no receive has met than was agreed.
    #[error("more unanswered sends than agreed")]
    Sends,
    /// More undelivered notifications than was agreed.
    #[error("more unanswered notifications than agreed")]
    Notifs,
    /// More asks that we have not answered than was agreed.
    #[error("more unanswered asks than agreed")]
    Asks,
    /// More signals that we have not answered than was agreed.
    #[error("more unanswered signals than agreed")]
    Signals,
    /// A signal out of turn: it may have been applied already.
    #[error("signal {id} after signal {last}")]
    SignalOrder {
        /// Its number.
        id: u64,
        /// The last one's.
        last: u64,
    },
    /// An answer to a signal that is not open.
    #[error("an ack of signal {0}, which is not under way")]
    UnknownSignal(u64),
    /// An answer to a look-up that is not open.
    #[error("an answer to look-up {0}, which is not under way")]
    UnknownLookUp(u64),
    /// An ask with the number of another open ask.
    #[error("a second ask {0}")]
    RepeatedAsk(u64),
    /// An answer to a send that is not open.
    #[error("an end of send {0}, which is not under way")]
    UnknownSend(u64),
    /// An answer to a notification that is not open.
    #[error("an ack of notification {0}, which is not under way")]
    UnknownNotif(u64),
    /// An answer to an ask that is not open.
    #[error("an answer to ask {0}, which is not under way")]
    UnknownAsk(u64),
    /// The end of a lane that there is not, or of the first, which ends only with the connection.
    #[error("the end of lane {lane}, of {lanes}")]
    UnknownLane {
        /// Which one.
        lane: usize,
        /// How many there are; the first ends with the connection only.
        lanes: usize,
    },
    /// The end of a lane that had ended.
    #[error("a second end of lane {0}")]
    RepeatedLaneDown(usize),
}
