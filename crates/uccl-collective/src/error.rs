//! Why a call failed.

use std::{sync::Arc, time::Duration};

use uccl_wire::group::GroupWireError;

/// The result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call failed. After a failed call no byte of it lands any more, and the memory that it was
/// to fill may hold a part of its bytes.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The group has no such rank.
    #[error("there is no connection to rank {rank}: the group has {ranks} ranks")]
    NoSuchRank {
        /// The rank that was named.
        rank: usize,
        /// The number of ranks.
        ranks: usize,
    },
    /// A message to a rank of another host needs registered memory in this group.
    #[error(
        "{len} bytes at {ptr:#x} are not registered, and rank {rank} is on another host: call register_tensor() first"
    )]
    NotRegistered {
        /// The other side of the message.
        rank: usize,
        /// Where the memory starts.
        ptr: usize,
        /// How long it is, in bytes.
        len: usize,
    },
    /// A rank is gone.
    #[error("rank {rank} is lost: {reason}")]
    Lost {
        /// The rank.
        rank: usize,
        /// The sign of its end.
        reason: Arc<str>,
    },
    /// Another rank has given a collective up, or this one has: the group cannot go on.
    #[error("rank {rank} has given a collective of this group up")]
    GivenUp {
        /// The rank.
        rank: usize,
    },
    /// A message failed.
    #[error("a message to or from rank {rank} failed: {reason}")]
    Failed {
        /// The other side of the message.
        rank: usize,
        /// Why.
        reason: uccl_p2p::Error,
    },
    /// The other side's buffer has another length.
    #[error("rank {rank} sent {received} bytes, and {expected} were expected")]
    WrongLength {
        /// The sender.
        rank: usize,
        /// The bytes that came.
        received: u64,
        /// The length of the buffer.
        expected: u64,
    },
    /// Ranks have not come.
    #[error("ranks {missing:?} have not joined the group in {waited:?}: {reason}")]
    NotJoined {
        /// The ranks that are not there.
        missing: Vec<usize>,
        /// The time that they had.
        waited: Duration,
        /// The last error of a connect, if there was one.
        reason: String,
    },
    /// Ranks disagree about the members of a smaller group.
    #[error("rank {rank} goes on with the ranks {theirs:?}, and this one with {ours:?}")]
    Disagreement {
        /// The other rank.
        rank: usize,
        /// The members of its group.
        theirs: Vec<u32>,
        /// The members of this rank's group.
        ours: Vec<u32>,
    },
    /// Bytes that are no rank's card.
    #[error("the card of rank {rank}: {reason}")]
    Card {
        /// The rank.
        rank: usize,
        /// Why not.
        reason: GroupWireError,
    },
    /// A handle that no call returned, or of a call that ended too many calls ago.
    #[error("call {0} is unknown: it was never made, or ended too many calls ago")]
    UnknownWork(u64),
    /// A value that cannot be.
    #[error("{0}")]
    Invalid(String),
    /// The group was closed.
    #[error("the group is closed")]
    Closed,
    /// The engine refused or failed.
    #[error(transparent)]
    Engine(#[from] uccl_p2p::Error),
}
