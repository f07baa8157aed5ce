//! What is asked of a device that moves memory one-sidedly, and of a channel between two of them.
//!
//! These traits are small so that a kind of device is little work: it opens, registers, connects, posts and
//! polls. Cutting, spreading, keys, failover and what the engine is promised are the lane's, once for all.

use std::{
    fmt,
    os::fd::BorrowedFd,
    time::{Duration, Instant},
};

use smallvec::SmallVec;
use uccl_device::{MemoryKind, PciAddress};

use crate::{lane::OpKind, mem::Span, region::Rights};

/// What a device calls the right to reach a region, as it travels to the peer: opaque, and short.
pub type KeyBytes = SmallVec<[u8; 16]>;

/// The longest key that is taken from a peer, in bytes.
pub const MAX_KEY: usize = 256;

/// The longest address of a channel that is taken from a peer, in bytes.
pub const MAX_ADDRESS: usize = 1024;

/// A device that an endpoint has opened, shared by its connections.
pub trait Rail: Send + Sync {
    /// What it is.
    fn info(&self) -> &RailInfo;

    /// Whether its port can be used right now. Asked several times a second while it cannot.
    fn is_up(&self) -> bool;

    /// Makes memory reachable for the device: by us, and by peers for no more than these rights. The memory stays
    /// valid until the registration has ended.
    ///
    /// # Errors
    /// When the device does not take it: its kind, its size, or the limit for locked memory.
    fn register(
        &self,
        span: Span,
        kind: MemoryKind,
        rights: Rights,
    ) -> Result<Box<dyn Registration>, RailError>;

    /// Makes our end of a channel.
    ///
    /// # Errors
    /// When the device has no room, or is gone.
    fn open(&self) -> Result<Box<dyn Channel>, RailError>;
}

/// What a rail is, for planning and for people.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RailInfo {
    /// The device and its port or domain, as their users write it: `mlx5_0:1`, `cxi0`.
    pub name: String,
    /// Which link it belongs to: only rails with the same word can be joined. `verbs`, `libfabric:tcp`.
    pub link: String,
    /// The network that it is on, as far as it can be told: rails of one network are joined first. Empty: unknown.
    pub network: String,
    /// Where it is on the PCI bus.
    pub pci: Option<PciAddress>,
    /// Its speed in Mbit/s, where it is known.
    pub speed_mbps: Option<u64>,
    /// Whether this machine's processors move its bytes: soft-RoCE, siw, a provider over TCP.
    pub is_software: bool,
}

/// Memory that a device can reach, until this [ends](Self::end) or is dropped: then neither we nor a peer reach it
/// through the device any more.
pub trait Registration: Send + Sync {
    /// Ends it. Once it has ended nothing happens.
    ///
    /// # Errors
    /// The device did not let go, and may still reach the memory. To be tried again.
    fn end(&self) -> Result<(), RailError>;

    /// What a request names our memory with: an lkey, a descriptor's address.
    fn local_key(&self) -> u64;

    /// What a peer's requests name it with.
    fn remote_key(&self) -> RemoteKey;
}

/// How a peer's requests name registered memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RemoteKey {
    /// What the first byte of the region is called: its address, or 0 where offsets are used.
    pub base: u64,
    /// The key.
    pub key: KeyBytes,
}

/// One contiguous piece to be moved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// What it does.
    pub kind: OpKind,
    /// Our memory; may be empty.
    pub local: Span,
    /// Our memory's [`Registration::local_key`].
    pub local_key: u64,
    /// The peer's memory: in its terms, counted from [`RemoteKey::base`].
    pub remote_addr: u64,
    /// What [`Channel::import`] made of the peer's key.
    pub remote_key: u64,
    /// The poster's name for it.
    pub tag: u64,
}

impl Request {
    /// A write of no bytes, of which no device looks at addresses or keys.
    #[must_use]
    pub fn of_nothing(tag: u64) -> Self {
        let (kind, local) = (OpKind::Write, Span { addr: 0, len: 0 });
        Self { kind, local, local_key: 0, remote_addr: 0, remote_key: 0, tag }
    }
}

/// How a request ended.
#[derive(Clone, Debug)]
pub struct Ended {
    /// The poster's name for it.
    pub tag: u64,
    /// For a write: its bytes are in the peer's memory. For a read: in ours.
    pub result: Result<(), RequestError>,
}

/// Why one request failed, other than by the loss of its channel.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RequestError {
    /// The peer's device refused the key, the range or the kind of access.
    #[error("the peer's device refused access")]
    Access,
    /// Our own device could not reach our memory.
    #[error("the device could not reach local memory")]
    Local,
    /// Something else that trying again would not mend.
    #[error("{0}")]
    Failed(String),
}

/// What a channel takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Longest request, in bytes.
    pub max_bytes: u64,
    /// What longer requests are cut into, so that they spread over rails.
    pub chunk_bytes: u64,
    /// Most requests in flight.
    pub depth: usize,
    /// How many bytes in flight are enough to keep it busy.
    pub window_bytes: u64,
}

/// What two endpoints have over a pair of rails; reliable, in that a request either ends or the channel dies.
///
/// One thread at a time calls it. Dropping it is what ends it: when the drop has returned, no memory is
/// touched by requests of ours, and none of ours by requests of the peer's that came this way.
pub trait Channel: Send {
    /// What the peer's end must know, at most [`MAX_ADDRESS`] bytes.
    fn address(&self) -> &[u8];

    /// Joins the peer's end, of which these bytes came from the peer, unchecked. Both ends are then ready
    /// to be posted to, though the way between them may not work; see [`Self::probe`].
    ///
    /// # Errors
    /// When the bytes are no such address, or the device does not get there.
    fn connect(&mut self, peer: &[u8]) -> Result<(), RailError>;

    /// What it takes. May change from call to call, as losses are seen.
    fn limits(&self) -> Limits;

    /// Posts a request that moves nothing and ends, with this tag, only if the way to the peer works.
    ///
    /// # Errors
    /// As [`Self::post`].
    fn probe(&mut self, tag: u64) -> Result<(), RailError>;

    /// Posts requests, in order, as one batch, as far as there is room; says how many. Each of those ends
    /// once, by [`Self::poll`] or by the death of the channel.
    ///
    /// # Errors
    /// The channel is of no more use: whether these and earlier requests land is unknown.
    ///
    /// # Safety
    /// Our memory must stay valid and registered until the request has ended or the channel is dropped.
    unsafe fn post(&mut self, requests: &[Request]) -> Result<usize, RailError>;

    /// Does what is to be done without blocking (completions, acknowledgements, timers), and appends what
    /// has ended.
    ///
    /// # Errors
    /// The channel is of no more use. What was appended before still counts.
    fn poll(&mut self, ended: &mut Vec<Ended>) -> Result<(), RailError>;

    /// What requests name memory with, of which the peer sent this key, unchecked.
    ///
    /// # Errors
    /// When it is no such key.
    fn import(&mut self, key: &[u8]) -> Result<u64, RailError>;

    /// The key with which the peer reaches registered memory through this channel. Most devices have one
    /// for all of their channels.
    ///
    /// # Errors
    /// When the device makes one for each channel, and cannot.
    fn export(&mut self, registration: &dyn Registration) -> Result<RemoteKey, RailError> {
        Ok(registration.remote_key())
    }

    /// Prepares for sleep: from now on what [`Self::poll`] is needed for shows as readable on [`Self::fd`],
    /// or is due by [`Self::wake_in`]. False: there is something to do right now.
    ///
    /// # Errors
    /// As [`Self::poll`].
    fn arm(&mut self) -> Result<bool, RailError>;

    /// What to watch while asleep. `None`: there is nothing to watch, and [`Self::wake_in`] says how often
    /// to look.
    fn fd(&self) -> Option<BorrowedFd<'_>>;

    /// After how long [`Self::poll`] must be called even if nothing shows; `None`: need not be.
    fn wake_in(&self, _now: Instant) -> Option<Duration> {
        None
    }
}

/// Why a device cannot be used, or not any more.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RailError {
    /// A library or a driver is missing, or none of its devices will do: what was looked for, and the remedy.
    #[error("{0}")]
    Unavailable(String),
    /// A call failed.
    #[error("{what}: {}", std::io::Error::from_raw_os_error(*.errno))]
    Os {
        /// What was attempted, with the name of the call.
        what: String,
        /// The system's number for why it failed.
        errno: i32,
    },
    /// A provider refused, in its own words.
    #[error("{what}: {why}")]
    Provider {
        /// What was attempted, with the name of the call.
        what: String,
        /// The provider's reason.
        why: String,
    },
    /// What the peer sent makes no sense.
    #[error("the peer sent {0}")]
    Peer(String),
    /// The way to the peer is lost: retries ran out, the port went down, the peer's end was destroyed.
    #[error("the way to the peer is lost: {0}")]
    Lost(String),
    /// The device itself is gone.
    #[error("the device is gone: {0}")]
    Gone(String),
}

impl RailError {
    /// A failed call, with the system's number (positive).
    pub fn os(what: impl fmt::Display, errno: i32) -> Self {
        Self::Os { what: what.to_string(), errno }
    }
}
