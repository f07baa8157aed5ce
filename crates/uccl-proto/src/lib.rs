//! The protocol of a connection: what its two ends say to each other, and what follows from it.
//!
//! A [`Session`] is one end. It is plain data: it does no I/O, takes no lock, reads no clock, starts no thread and touches
//! nobody's memory. Whoever drives it tells it what has happened (a call, a message, the end of an operation, the time),
//! writes the messages that it encodes to the first lane *in the order in which it encodes them*, and does what its
//! answers ask for. So both ends run in one thread, in virtual time, under any schedule that a test can think of.
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
//! | part | what it knows |
//! | --- | --- |
//! | [`outgoing`] | sends and notifications that the peer has not answered, and how much of them the peer has to keep |
//! | [`incoming`] | receives that wait for sends, sends that wait for receives: the two meet in order |
//! | [`notifications`] | notifications of the peer, which are delivered in order, long ones after they have been fetched |
//! | [`asks`], [`asked`] | copies that an owner of memory makes for its peer: those we asked for, and those we make |
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
pub mod notifications;
mod numbered;
pub mod outgoing;
mod session;

pub use self::session::{Event, Session};

use uccl_wire::message::{MAX_ASSEMBLED, MessageError};

/// What the driver keeps for each thing that a session knows: the session hands it back and never looks inside.
pub trait Handles {
    /// A send of ours, until the peer has answered it.
    type Send;
    /// A notification of ours, until the peer has answered it.
    type Notif;
    /// A receive of ours, until it has been answered.
    type Receive: Clone;
    /// A copy that we asked the peer for.
    type Ask;
    /// A copy that we make for the peer.
    type Asked: Clone;
    /// An operation that is posted again if its lane is lost.
    type Operation;
}

/// A list of what the peer has not answered is full.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{what} is full: {limit}")]
pub struct Full {
    /// Which list.
    pub what: &'static str,
    /// How much it takes.
    pub limit: usize,
}

/// How the peer broke the protocol. The connection ends with it.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// A message that cannot be read.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// A message without a prefix.
    #[error("a message of {0} bytes")]
    Short(usize),
    /// Fragments that add up to too much.
    #[error("a message of more than {MAX_ASSEMBLED} bytes")]
    Long,
    /// A fragment of one message among those of another.
    #[error("fragments of different messages are mixed")]
    Mixed,
    /// Sends that no receive has met, beyond what was agreed.
    #[error("more unanswered sends than agreed")]
    Sends,
    /// Notifications that nobody has taken, beyond what was agreed.
    #[error("more unanswered notifications than agreed")]
    Notifs,
    /// Asks that we have not answered, beyond what was agreed.
    #[error("more unanswered asks than agreed")]
    Asks,
    /// A number that stands for another ask.
    #[error("a second ask {0}")]
    RepeatedAsk(u64),
    /// An answer to nothing.
    #[error("an end of send {0}, which is not under way")]
    UnknownSend(u64),
    /// An answer to nothing.
    #[error("an ack of notification {0}, which is not under way")]
    UnknownNotif(u64),
    /// An answer to nothing.
    #[error("an answer to ask {0}, which is not under way")]
    UnknownAsk(u64),
    /// The end of a lane that cannot end.
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
