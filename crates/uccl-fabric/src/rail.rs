//! The traits of an RDMA device ([`Rail`]) and of a channel between two of them ([`Channel`]).
//!
//! The traits are small, so that a new kind of device is little work: it opens, registers,
//! connects, posts and polls. The lane does the rest for all devices: it splits transfers, spreads
//! them over rails, handles keys and failover, and keeps the promises made to the engine.

use std::{
    fmt,
    os::fd::BorrowedFd,
    time::{Duration, Instant},
};

use smallvec::SmallVec;
use uccl_device::{MemoryKind, PciAddress};

use crate::{lane::OpKind, mem::Span, region::Rights};

/// A device's remote key for a region, as sent to the peer: opaque and short.
pub type KeyBytes = SmallVec<[u8; 16]>;

/// The longest key accepted from a peer, in bytes.
pub const MAX_KEY: usize = 256;

/// The longest channel address accepted from a peer, in bytes.
pub const MAX_ADDRESS: usize = 1024;

/// A device that an endpoint has opened, shared by its connections.
pub trait Rail: Send + Sync {
    /// Its name, link, place and speed.
    fn info(&self) -> &RailInfo;

    /// Whether its port is usable right now. While it is not, the caller asks several times a
    /// second.
    fn is_up(&self) -> bool;

    /// Registers memory with the device. We may access it in any way, peers with no more than these
    /// rights. The memory must stay valid until the registration has ended.
    ///
    /// # Errors
    /// When the device refuses the memory: for its kind, its size, or the limit for locked memory.
    fn register(
        &self,
        span: Span,
        kind: MemoryKind,
        rights: Rights,
    ) -> Result<Box<dyn Registration>, RailError>;

    /// Makes our end of a channel. Its address is final once it is connected: until then it may
    /// depend on the peer's.
    ///
    /// # Errors
    /// When the device has no room, or is gone.
    fn open(&self) -> Result<Box<dyn Channel>, RailError>;

    /// Opens the device anew if it was lost and has come back; this may take long. True if so: all
    /// memory has to be registered with it again.
    fn reopen(&self) -> bool {
        false
    }

    /// Makes our end of a channel before the peer makes its own. Our address is sent before the
    /// peer's is known. So a device with several addresses offers another one after each failed
    /// attempt; `failed` counts the attempts that have failed since the last success.
    ///
    /// # Errors
    /// As [`Self::open`].
    fn open_first(&self, failed: u32) -> Result<Box<dyn Channel>, RailError> {
        let _ = failed;
        self.open()
    }
}

/// Describes a rail, for planning and for people.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RailInfo {
    /// The device and its port or domain, as their users write it: `mlx5_0:1`, `cxi0`.
    pub name: String,
    /// Its link; only rails of the same link can be joined. `verbs`, `libfabric:tcp`.
    pub link: String,
    /// Its network, as far as it is known; empty if unknown. Rails of the same network are joined
    /// first.
    pub network: String,
    /// Where it is on the PCI bus.
    pub pci: Option<PciAddress>,
    /// Its speed in Mbit/s, where it is known.
    pub speed_mbps: Option<u64>,
    /// Whether this machine's processors move its bytes: soft-RoCE, a provider over TCP.
    pub is_software: bool,
}

/// Memory registered with a device. After [`end`](Self::end) or a drop, neither we nor a peer reach
/// it through the device any more.
pub trait Registration: Send + Sync {
    /// Ends the registration. Later calls do nothing.
    ///
    /// # Errors
    /// The device kept the registration and may still access the memory. Call this again.
    fn end(&self) -> Result<(), RailError>;

    /// The key that our requests use for this memory: an lkey, or a descriptor's address.
    fn local_key(&self) -> u64;

    /// The key that a peer's requests use for this memory.
    fn remote_key(&self) -> RemoteKey;
}

/// The key and the base address that a peer's requests use for registered memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RemoteKey {
    /// The remote address of the region's first byte: its address, or 0 for devices that use
    /// offsets.
    pub base: u64,
    /// The key.
    pub key: KeyBytes,
}

/// The key of registered memory for one channel, as [`Channel::export`] finds it.
pub enum Export {
    /// It is known.
    Known(RemoteKey),
    /// The device has a key of its own for each channel, and has to make this one.
    ToMake(MakeKey),
}

/// Makes the key that [`Channel::export`] then knows. That may take long, as the device may have to
/// lock the memory. Any thread may call it, while another one calls the channel. If the channel or
/// the registration ends first, it fails; once it has begun, the end of the channel waits for it.
pub type MakeKey = Box<dyn FnOnce() -> Result<(), RailError> + Send>;

/// One contiguous piece to be moved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// Whether it reads or writes.
    pub kind: OpKind,
    /// Our memory; may be empty.
    pub local: Span,
    /// Our memory's [`Registration::local_key`].
    pub local_key: u64,
    /// The remote address, counted from [`RemoteKey::base`].
    pub remote_addr: u64,
    /// The peer's key, as [`Channel::import`] returned it.
    pub remote_key: u64,
    /// The poster's identifier for it, returned in [`RequestEnd::tag`].
    pub tag: u64,
}

impl Request {
    /// A write of no bytes. No device checks the addresses or keys of one.
    #[must_use]
    pub fn of_nothing(tag: u64) -> Self {
        let (kind, local) = (OpKind::Write, Span { addr: 0, len: 0 });
        Self { kind, local, local_key: 0, remote_addr: 0, remote_key: 0, tag }
    }
}

/// How a request ended.
#[derive(Clone, Debug)]
pub struct RequestEnd {
    /// The request's [`tag`](Request::tag).
    pub tag: u64,
    /// `Ok` for a write: its bytes are in the peer's memory; for a read: in ours.
    pub result: Result<(), RequestError>,
}

/// Why a request failed although its channel lives on.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RequestError {
    /// The peer's device refused the key, the range or the kind of access.
    #[error("the peer's device refused access")]
    Access,
    /// Our own device could not reach our memory.
    #[error("the device could not reach local memory")]
    Local,
    /// Another failure that a retry would not mend.
    #[error("{0}")]
    Failed(String),
}

/// The limits of a channel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Longest request, in bytes.
    pub max_bytes: u64,
    /// The lane cuts longer requests into chunks of this many bytes, so that they spread over
    /// rails.
    pub chunk_bytes: u64,
    /// Most requests in flight.
    pub depth: usize,
    /// How many bytes in flight are enough to keep it busy.
    pub window_bytes: u64,
}

/// A connection between two endpoints over a pair of rails. It is reliable: each request ends, or
/// the channel dies.
///
/// Only one thread at a time may call it. Dropping it ends it: when the drop has returned, our
/// requests touch no memory any more, and the peer's requests over this channel touch none of ours.
pub trait Channel: Send {
    /// The address that the peer's end needs to connect, at most [`MAX_ADDRESS`] bytes.
    fn address(&self) -> &[u8];

    /// Connects to the peer's end at this address, which came unchecked from the peer. Requests can
    /// then be posted at both ends, though the path between them may not work; see [`Self::probe`].
    ///
    /// # Errors
    /// When the bytes are not a valid address, or the device cannot reach it.
    fn connect(&mut self, peer: &[u8]) -> Result<(), RailError>;

    /// The current limits. They may change between calls, as the channel sees losses.
    fn limits(&self) -> Limits;

    /// Posts a request that moves no bytes. It ends, with this tag, only if the path to the peer
    /// works.
    ///
    /// # Errors
    /// As [`Self::post`].
    fn probe(&mut self, tag: u64) -> Result<(), RailError>;

    /// Posts requests in order, as one batch, as far as there is room. Returns how many. Each
    /// posted request ends once: [`Self::poll`] reports it, or the channel dies.
    ///
    /// # Errors
    /// The channel is dead: whether these and earlier requests land is unknown.
    ///
    /// # Safety
    /// Our memory must stay valid and registered until the request has ended or the channel is
    /// dropped.
    unsafe fn post(&mut self, requests: &[Request]) -> Result<usize, RailError>;

    /// Handles completions, acknowledgements and timers without blocking, and appends the requests
    /// that have ended.
    ///
    /// # Errors
    /// The channel is dead. Requests that were appended before still count.
    fn poll(&mut self, ended: &mut Vec<RequestEnd>) -> Result<(), RailError>;

    /// Turns a key that the peer sent, unchecked, into a value for [`Request::remote_key`].
    ///
    /// # Errors
    /// When the bytes are not a valid key.
    fn import(&mut self, key: &[u8]) -> Result<u64, RailError>;

    /// The key with which the peer reaches registered memory through this channel, without
    /// blocking. Most devices have one for all of their channels.
    fn export(&mut self, registration: &dyn Registration) -> Export {
        Export::Known(registration.remote_key())
    }

    /// As [`Self::export`], but makes the key if there is none, however long that takes.
    ///
    /// # Errors
    /// When the device needs one key per channel, and cannot make it.
    fn export_now(&mut self, registration: &dyn Registration) -> Result<RemoteKey, RailError> {
        if let Export::ToMake(make) = self.export(registration) {
            make()?;
        }
        match self.export(registration) {
            Export::Known(key) => Ok(key),
            Export::ToMake(_) => Err(RailError::Gone("it has no key after it has made one".into())),
        }
    }

    /// Prepares for sleep: from now on [`Self::fd`] becomes readable when [`Self::poll`] is needed,
    /// or the time in [`Self::wake_in`] runs out. Returns false if there is work right now.
    ///
    /// # Errors
    /// As [`Self::poll`].
    fn arm(&mut self) -> Result<bool, RailError>;

    /// The descriptor to watch while asleep. `None` if the channel has none; then [`Self::wake_in`]
    /// returns the time between polls.
    fn fd(&self) -> Option<BorrowedFd<'_>>;

    /// After how long [`Self::poll`] must be called even without an event. `None`: no such need.
    fn wake_in(&self, _now: Instant) -> Option<Duration> {
        None
    }
}

/// Why a device or a channel cannot be used, or no longer can.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RailError {
    /// A library or a driver is missing, or none of its devices is usable. Names the thing that was
    /// looked for, and the remedy.
    #[error("{0}")]
    Unavailable(String),
    /// A call failed.
    #[error("{what}: {}", std::io::Error::from_raw_os_error(*.errno))]
    Os {
        /// The attempted step, with the name of the call.
        what: String,
        /// The system's number for why it failed.
        errno: i32,
    },
    /// A provider refused, in its own words.
    #[error("{what}: {why}")]
    Provider {
        /// The attempted step, with the name of the call.
        what: String,
        /// The provider's reason.
        why: String,
    },
    /// The peer sent something invalid.
    #[error("the peer sent {0}")]
    Peer(String),
    /// The path to the peer is lost: retries ran out, the port went down, or the peer's end was
    /// destroyed.
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
