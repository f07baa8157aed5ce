//! Errors, with the values that a user needs to find the cause.

use std::{fmt, io, net::SocketAddr, time::Duration};

use uccl_wire::flow::FlowWireError;

/// The other end of a flow.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Peer {
    /// Its process.
    pub instance: u64,
    /// Its address, as far as one is known.
    pub addr: Option<SocketAddr>,
    /// This side's device.
    pub device: String,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.addr {
            Some(addr) => write!(f, "{addr}")?,
            None => write!(f, "an unknown address")?,
        }
        write!(f, " (process {:016x}, by {})", self.instance, self.device)
    }
}

/// The requests of a flow that have not ended.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Backlog {
    /// Sends or receives.
    pub requests: usize,
    /// Their bytes that have not been sent, or for which memory is posted and nothing came.
    pub bytes: u64,
}

impl fmt::Display for Backlog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} requests, {} bytes", self.requests, self.bytes)
    }
}

/// Kinds of errors, for callers that tell their own callers a number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ErrorClass {
    /// The operating system failed.
    System,
    /// The caller made a mistake.
    Misuse,
    /// The sizes of two ends do not agree.
    Sizes,
    /// The peer or the network failed.
    Remote,
}

/// Why a call failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FlowError {
    /// The settings cannot be.
    #[error("flows cannot be set like this: {0}")]
    Settings(&'static str),
    /// There is no such device.
    #[error("there is no device {device}; there are {count}")]
    Device {
        /// The number asked for.
        device: usize,
        /// How many there are.
        count: usize,
    },
    /// A handle is damaged, or another program's.
    #[error("this is no handle of a flow: {0}")]
    Handle(#[from] FlowWireError),
    /// A system call failed.
    #[error("{call} failed: {error}")]
    System {
        /// The call, and its subject.
        call: &'static str,
        /// Its error.
        error: SystemError,
    },
    /// The peer did not take the connection in time.
    #[error("no connection to {peer} within {waited:?}; tried: {tried}")]
    Unreachable {
        /// The peer.
        peer: Peer,
        /// How long it was tried.
        waited: Duration,
        /// The addresses and their last errors.
        tried: String,
    },
    /// The peer has been out of reach for longer than the limit.
    #[error("{peer} is lost: {cause}; silent for {silent:?}; outstanding: {outstanding}")]
    Lost {
        /// The peer.
        peer: Peer,
        /// The last thing that went wrong.
        cause: String,
        /// How long nothing has come from it.
        silent: Duration,
        /// The requests that have not ended.
        outstanding: Backlog,
    },
    /// The peer closed the flow while something was outstanding.
    #[error("{peer} closed the flow; outstanding: {outstanding}")]
    PeerClosed {
        /// The peer.
        peer: Peer,
        /// The requests that have not ended.
        outstanding: Backlog,
    },
    /// A message is longer than the receive that it meets.
    #[error("{peer} sent {sent} bytes into a receive of {room} bytes (message {message})")]
    TooLong {
        /// The peer.
        peer: Peer,
        /// The number of the message in its flow.
        message: u64,
        /// Its bytes.
        sent: u64,
        /// Bytes of the receive.
        room: u64,
    },
    /// The peer sent bytes that make no sense.
    #[error("{peer} does not keep to the protocol: {what}")]
    Protocol {
        /// The peer.
        peer: Peer,
        /// The mistake.
        what: String,
    },
    /// A receive has more buffers than a group may have, or none.
    #[error("a receive of {0} buffers; it has 1 to {max}", max = crate::MAX_GROUP)]
    Group(usize),
    /// The slot is not in use.
    #[error("there is no request in slot {0}")]
    Slot(usize),
    /// A thread of the flows has ended, so none can go on.
    #[error("a thread of the flows has ended: {0}")]
    Thread(String),
    /// The flow or listener is closed.
    #[error("it is closed")]
    Closed,
}

/// An error of the operating system that can be copied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SystemError {
    kind: io::ErrorKind,
    code: Option<i32>,
}

impl fmt::Display for SystemError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.code {
            Some(code) => io::Error::from_raw_os_error(code).fmt(f),
            None => self.kind.fmt(f),
        }
    }
}

impl From<&io::Error> for SystemError {
    fn from(error: &io::Error) -> Self {
        Self { kind: error.kind(), code: error.raw_os_error() }
    }
}

impl FlowError {
    pub(crate) fn system(call: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |error| Self::System { call, error: (&error).into() }
    }

    /// Its kind.
    #[must_use]
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::System { .. } | Self::Thread(_) => ErrorClass::System,
            Self::Settings(_)
            | Self::Device { .. }
            | Self::Handle(_)
            | Self::Group(_)
            | Self::Slot(_)
            | Self::Closed => ErrorClass::Misuse,
            Self::TooLong { .. } => ErrorClass::Sizes,
            Self::Unreachable { .. }
            | Self::Lost { .. }
            | Self::PeerClosed { .. }
            | Self::Protocol { .. } => ErrorClass::Remote,
        }
    }
}
