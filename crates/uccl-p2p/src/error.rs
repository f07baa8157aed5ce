//! Why a call or a transfer failed.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use crate::ids::{ConnId, MrId, TransferId};

/// The result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call was refused or a transfer failed.
///
/// Cheap to clone: a finished transfer returns the same error each time that it is asked.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No such connection, or it has been removed.
    #[error("{0} is unknown: it was never made, or has been removed")]
    UnknownConnection(ConnId),
    /// No such region, or it has been deregistered.
    #[error("{0} is unknown: it was never registered, or has been deregistered")]
    UnknownRegion(MrId),
    /// No such transfer, or its result is not kept any more.
    #[error("{0} is unknown: it was never posted, or finished too many transfers ago")]
    UnknownTransfer(TransferId),
    /// A local range is not inside the region that was named for it.
    #[error(
        "iov {iov}: {len} bytes at {ptr:#x} are not inside {mr} ({region_len} bytes at {region_ptr:#x})"
    )]
    OutsideRegion {
        /// Index of the iov in the request.
        iov: usize,
        /// Start of the range.
        ptr: usize,
        /// Length of the range in bytes.
        len: usize,
        /// The region that was named.
        mr: MrId,
        /// Where that region starts.
        region_ptr: usize,
        /// How long that region is, in bytes.
        region_len: usize,
    },
    /// A local range is longer than the peer's advert.
    #[error("iov {iov}: {len} bytes do not fit the {advertised} bytes that the peer advertised")]
    OutsideAdvert {
        /// Index of the iov in the request.
        iov: usize,
        /// Length of the range in bytes.
        len: usize,
        /// Length of the advert in bytes.
        advertised: u64,
    },
    /// An advert that this connection's peer did not make.
    #[error(
        "iov {iov}: the advert is not from this connection's peer (forged, or made by a peer that has since restarted)"
    )]
    ForeignAdvert {
        /// Index of the iov in the request.
        iov: usize,
    },
    /// Something in the request does not make sense.
    #[error("{0}")]
    Invalid(String),
    /// The peer refused an access: unknown or revoked key, or a range outside the region.
    #[error("{peer} refused the access: {reason}")]
    RemoteAccess {
        /// The peer that refused.
        peer: Arc<str>,
        /// Why.
        reason: String,
    },
    /// Memory of the peer's that was named by its address is not published.
    #[error("{len} bytes at {addr:#x} of {peer} are not published: {reason}")]
    NotPublished {
        /// The owner of that address.
        peer: Arc<str>,
        /// The first address that is not published.
        addr: u64,
        /// How many bytes were wanted there.
        len: u64,
        /// Why not.
        reason: &'static str,
    },
    /// The message is longer than the receiver's memory for it.
    #[error("message of {sent} bytes is longer than the {capacity} bytes of the receive")]
    Truncated {
        /// Bytes sent.
        sent: u64,
        /// Bytes the receive could take.
        capacity: u64,
    },
    /// The bytes that arrived are not the bytes that were sent.
    #[error("checksum mismatch on data from {peer}")]
    Checksum {
        /// The sender.
        peer: Arc<str>,
    },
    /// The local memory of an operation could not be read or written.
    #[error("local memory fault: {0}")]
    LocalMemory(String),
    /// A GPU could not move the data, or the path to the peer does not reach GPU memory.
    #[error("GPU memory to or from {peer}: {reason}")]
    Gpu {
        /// The other side.
        peer: Arc<str>,
        /// Why not.
        reason: String,
    },
    /// A device could not move the data.
    #[error("data to or from {peer}: {reason}")]
    Device {
        /// The other side.
        peer: Arc<str>,
        /// The device's reason.
        reason: String,
    },
    /// The deadline passed. The transfer has been fenced: no byte of it lands any more. If the
    /// connection was lost over it, that does not hold for the peer's memory.
    #[error("deadline of {after:?} passed{}", match .peer { Some(p) => format!(" waiting for {p}"), None => String::new() })]
    DeadlineExceeded {
        /// The deadline, counted from the post.
        after: Duration,
        /// The peer that the transfer waited for; `None` if it waited for copies by this process.
        peer: Option<Arc<str>>,
    },
    /// The transfer was cancelled, here or by the peer. It has been fenced: no byte of it lands any
    /// more. If the connection was lost over it, that does not hold for the peer's memory.
    ///
    /// Or a connect was cancelled here: no connection was made.
    #[error("cancelled by {by}")]
    Cancelled {
        /// The side that cancelled.
        by: Arc<str>,
    },
    /// An earlier write of the same context has failed, so a strong signal cannot say that all its
    /// bytes are there.
    #[error(
        "an earlier write of context {context} failed, so its strong signals are not sent any more: use another context"
    )]
    ContextFailed {
        /// The context.
        context: u32,
    },
    /// The peer is gone or silent; the connection has been closed.
    #[error("lost {peer}: {reason}")]
    ConnectionLost {
        /// The peer that is gone.
        peer: Arc<str>,
        /// The sign of its end.
        reason: String,
    },
    /// Memory cannot be given back yet: it must stay allocated. To wait again, deregister the
    /// regions (or close the endpoint) again.
    #[error(
        "{} cannot be given back: {by} may still touch the memory ({reason}); keep it allocated, and deregister or close again to wait again",
        list(.regions)
    )]
    StillTouched {
        /// The regions; none if only memory of the endpoint itself is concerned.
        regions: Arc<[MrId]>,
        /// The peer, device or endpoint that may touch them.
        by: Arc<str>,
        /// Why they may.
        reason: Arc<str>,
    },
    /// A connection could not be made.
    #[error("cannot connect to {addr}: {reason}")]
    Connect {
        /// The peer's address.
        addr: SocketAddr,
        /// Why not.
        reason: String,
    },
    /// The peer spoke another protocol or version, or broke this one.
    #[error("protocol error from {peer}: {reason}")]
    Protocol {
        /// The peer.
        peer: Arc<str>,
        /// Its mistake.
        reason: String,
    },
    /// The peer is of an older build, which does not know the requested feature. Nothing was sent.
    #[error("{peer} does not know {what}: it runs an older build of this library")]
    TooOld {
        /// The peer.
        peer: Arc<str>,
        /// The feature that it does not know.
        what: &'static str,
    },
    /// Too much is outstanding already; poll or wait for earlier transfers, then try again.
    #[error("{what} is full ({limit}): poll or wait for earlier transfers, then try again")]
    Full {
        /// The list or queue that is full.
        what: &'static str,
        /// Its limit.
        limit: usize,
    },
    /// The call timed out before its event happened.
    #[error("timed out after {0:?}")]
    Timeout(Duration),
    /// The caller was interrupted (Ctrl-C).
    #[error("interrupted")]
    Interrupted,
    /// The endpoint has been closed.
    #[error("the endpoint is closed")]
    Closed,
    /// The endpoint belongs to another process, from which this one was forked.
    #[error("this endpoint belongs to process {owner}: a forked child makes its own")]
    Forked {
        /// The process that made it.
        owner: u32,
    },
    /// A worker of the endpoint panicked; the endpoint is unusable, the process lives.
    #[error("internal error: a worker panicked: {0}")]
    Panicked(Arc<str>),
    /// The operating system refused something.
    #[error("{what}: {source}")]
    Os {
        /// The action that failed.
        what: String,
        /// The system's error.
        source: Arc<std::io::Error>,
    },
    /// A setting is not understood.
    #[error("{name}={value:?}: {reason}")]
    Config {
        /// The setting's environment variable.
        name: &'static str,
        /// Its value; `...` for a secret.
        value: String,
        /// Why that will not do.
        reason: String,
    },
}

fn list(regions: &[MrId]) -> String {
    const NAMED: usize = 8;
    let named: Vec<_> = regions.iter().take(NAMED).map(MrId::to_string).collect();
    let others = regions.len().saturating_sub(NAMED);
    match others {
        _ if regions.is_empty() => "what the endpoint has".to_owned(),
        0 => named.join(", "),
        _ => format!("{} and {others} others", named.join(", ")),
    }
}

impl Error {
    /// Wraps an operating system error with the action that failed.
    pub fn os(what: impl Into<String>, source: impl Into<std::io::Error>) -> Self {
        Self::Os { what: what.into(), source: Arc::new(source.into()) }
    }
}
impl From<uccl_proto::Full> for Error {
    fn from(full: uccl_proto::Full) -> Self {
        Self::Full { what: full.what, limit: full.limit }
    }
}
