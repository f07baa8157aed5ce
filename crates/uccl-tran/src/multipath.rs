//! Messages over many paths.
//!
//! A path is an entropy value: a queue pair, a UDP source port. A message is cut into chunks, each
//! with its final place. [`MultipathSender`] chooses a chunk's path when the chunk is sent, and
//! keeps numbers, acknowledgements and round trips by path. Three parts of it can be exchanged:
//! [`PathChoice`], [`LossDetection`], [`CongestionControl`].
//!
//! ```text
//!                     MultipathSender                                     MultipathReceiver
//!   push(message) --> chunks that wait                                     post(room)
//!                     control: may one go?   next() -- path 2, number 7 --> on_attempt() -> Place
//!                     choice: over which path?      -- path 0, number 9 --> on_attempt() -> Repeat
//!   Sent(message) <-- on_ack() <-------------- path 2: largest 7, before, marked -- poll_ack()
//!                     loss: which attempts are lost? They go again, over other paths.
//! ```
//!
//! # The promise
//!
//! Every chunk is placed exactly once before its message ends, and none is placed after that or
//! after a fence. Where the receiver places chunks itself ([`Repeats::Harmless`]: UDP, TCP), it
//! asks [`MultipathReceiver::on_attempt`] first, so a chunk may be under way several times, and a
//! guess is enough to send one again. Where the network places them
//! ([`Repeats::OnlyWhenProven`]: unreliable
//! queue pairs), at most one attempt of a chunk is under way at any time, as [the promise of one
//! path](crate#the-promise) says: only order proves a loss, and a silence is answered by a probe.
//! A path that is given up there keeps its chunks until both ends have torn its queue pair down,
//! and the sender has the receiver's last word on it ([`MultipathReceiver::last_ack`]): then
//! [`MultipathSender::close_path`] sends the rest over other paths.
//!
//! Times are nanoseconds of any clock that does not go back.

mod chunks;
mod numbers;
mod path;
mod receiver;
mod round_trip;
mod sender;
#[cfg(test)]
mod tests;

pub use receiver::{ChunkVerdict, MultipathReceiver};
pub use sender::MultipathSender;
use uccl_wire::ack::{ACK_SPAN, Ack};

use crate::{
    ParamsError,
    choice::{PathChoice, RoundRobin, choice_named},
    control::{CongestionControl, LinkFacts, NoLimit, control_named},
    recovery::{LossDetection, TailProbe, TimeDetection, loss_named},
};

/// A part of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Chunk {
    /// The message, counted from 0 by both ends.
    pub message: u64,
    /// Bytes of the message.
    pub total: u64,
    /// Where the chunk begins in it.
    pub offset: u64,
    /// Bytes of the chunk.
    pub len: u32,
}

/// The content of an attempt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Load {
    /// A chunk.
    Chunk(Chunk),
    /// Nothing: the sender wants an acknowledgement.
    Probe,
}

/// A message for the network: one chunk or probe over one path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Attempt {
    /// The path.
    pub path: u16,
    /// Its number on the path; the lower 32 bits.
    pub number: u32,
    /// Its content.
    pub load: Load,
    /// Bytes that the sender wants to have sent since the beginning, if it asks for credits;
    /// else 0.
    pub wanted_bytes: u64,
}

/// An acknowledgement of a path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PathAck {
    /// The path.
    pub path: u16,
    /// How many numbers of the path came with a mark (ECN) since the beginning; wraps.
    pub marked: u32,
    /// Which numbers of the path have come.
    pub ack: Ack,
}

/// The wish of a sender that has no credits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Demand {
    /// Bytes that it wants to have sent since the beginning.
    pub wanted_bytes: u64,
    /// Bytes that it knows to be granted since the beginning.
    pub known_bytes: u64,
}

/// An event that a [`MultipathSender`] reports.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MultipathEvent {
    /// All chunks of the message have come.
    Sent {
        /// The message.
        message: u64,
    },
    /// The message was cancelled, and no attempt of it is under way any more.
    Cancelled {
        /// The message.
        message: u64,
    },
    /// The path was silent for too long. It gets no chunk until it is opened again.
    PathDead {
        /// The path.
        path: u16,
    },
}

/// Why an acknowledgement was refused. A refused acknowledgement changes nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PathAckError {
    /// There is no such path.
    #[error("path {path} of {paths} was acknowledged")]
    NoPath {
        /// The path.
        path: u16,
        /// How many there are.
        paths: u16,
    },
    /// It covers a number that was not sent.
    #[error("{acked:#x} was acknowledged on path {path}; {next:#x} is the next number there")]
    NeverSent {
        /// The path.
        path: u16,
        /// The number.
        acked: u32,
        /// The next number of the path.
        next: u32,
    },
}

/// Whether a chunk may be sent again while another attempt of it may still land.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Repeats {
    /// It may: the receiver is asked before a chunk is placed.
    Harmless,
    /// It may not: the network places chunks, and paths keep order.
    OnlyWhenProven,
}

/// The parameters of many paths, on which both ends agree.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MultipathParams {
    /// How many paths there are.
    pub paths: u16,
    /// Bytes of a chunk; the last one of a message may be shorter.
    pub chunk_len: u32,
    /// Whether chunks may be under way twice.
    pub repeats: Repeats,
    /// Messages that have chunks under way at any time.
    pub most_open: u32,
    /// The number of chunks of a path after which the receiver acknowledges.
    pub ack_every: u32,
    /// The longest time from a chunk to its acknowledgement by the receiver, in nanoseconds.
    pub ack_delay_ns: u64,
    /// The round trip that is assumed before one has been measured, in nanoseconds.
    pub initial_rtt_ns: u64,
    /// When silent paths are probed.
    pub tail_probe: TailProbe,
    /// The silence after which a path is given up, in nanoseconds.
    pub dead_after_ns: u64,
}

impl Default for MultipathParams {
    fn default() -> Self {
        Self {
            paths: 16,
            chunk_len: 4096,
            repeats: Repeats::Harmless,
            most_open: 64,
            ack_every: 1,
            ack_delay_ns: 20_000,
            initial_rtt_ns: 100_000,
            tail_probe: TailProbe::default(),
            dead_after_ns: 1_000_000_000,
        }
    }
}

impl MultipathParams {
    fn checked(self) -> Result<Self, ParamsError> {
        let zeros = [
            ("paths", self.paths == 0),
            ("chunk_len", self.chunk_len == 0),
            ("most_open", self.most_open == 0),
            ("ack_every", self.ack_every == 0),
            ("tail_probe.least_ns", self.tail_probe.least_ns == 0),
            ("dead_after_ns", self.dead_after_ns == 0),
        ];
        if let Some((name, _)) = zeros.into_iter().find(|(_, zero)| *zero) {
            return Err(ParamsError::Zero(name));
        }
        if self.tail_probe.most_ns < self.tail_probe.least_ns {
            return Err(ParamsError::Below("tail_probe.most_ns", "tail_probe.least_ns"));
        }
        Ok(self)
    }
}

/// The parts of a sender that can be exchanged.
#[derive(Debug)]
pub struct Techniques {
    /// The path of the next chunk.
    pub choice: Box<dyn PathChoice>,
    /// Which attempts are lost.
    pub loss: Box<dyn LossDetection>,
    /// How much may be under way.
    pub control: Box<dyn CongestionControl>,
}

impl Techniques {
    /// The techniques of these names, for so many paths of a network. `None` for an unknown name.
    #[must_use]
    pub fn named(names: [&str; 3], link: &LinkFacts, paths: u16, seed: u64) -> Option<Self> {
        let [choice, loss, control] = names;
        Some(Self {
            choice: choice_named(choice, paths.into(), seed)?,
            loss: loss_named(loss)?,
            control: control_named(control, link)?,
        })
    }
}

impl Default for Techniques {
    /// Paths in turns, loss by time, no limit.
    fn default() -> Self {
        Self {
            choice: Box::new(RoundRobin::default()),
            loss: Box::new(TimeDetection::default()),
            control: Box::new(NoLimit),
        }
    }
}

/// Numbers of a path that may be outstanding: an acknowledgement tells of all of them.
const MOST_NUMBERS: u64 = ACK_SPAN as u64;
/// Of these, the last are for probes.
const MOST_CHUNKS: u64 = MOST_NUMBERS * 3 / 4;
