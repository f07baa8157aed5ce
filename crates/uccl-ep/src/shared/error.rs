//! Errors of calls.

use std::{fmt, io, time::Duration};

use uccl_device::cuda::GpuError;

use crate::shared::protocol::{Mark, MissingMark};

/// The result of a call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The call that a rank is in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Ranks find each other.
    Join,
    /// Tokens go to the ranks of their experts.
    Dispatch,
    /// The experts' rows come back.
    Combine,
    /// Ranks wait for each other.
    Barrier,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Join => "join",
            Self::Dispatch => "dispatch",
            Self::Combine => "combine",
            Self::Barrier => "barrier",
        })
    }
}

/// The reason why a call fails.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument is wrong. Nothing was done.
    #[error("{0}")]
    Invalid(String),
    /// This rank has more tokens than a call has room for, and made none. Its peers wait for the
    /// call until it tells them, by `announce_too_many` of its group.
    #[error("{0}")]
    TooManyTokens(String),
    /// A peer is late.
    #[error("{}", overdue(*.phase, *.rank, .awaited, *.waited))]
    Overdue {
        /// This rank's call.
        phase: Phase,
        /// This rank.
        rank: usize,
        /// The words that it waited for, of each late rank.
        awaited: Vec<MissingMark>,
        /// The length of the wait.
        waited: Duration,
    },
    /// A peer has ended, or gave up on a call.
    #[error("{phase} on rank {rank}: rank {peer} {why}")]
    PeerLost {
        /// This rank's call.
        phase: Phase,
        /// This rank.
        rank: usize,
        /// The peer.
        peer: usize,
        /// The peer's fate.
        why: String,
    },
    /// A peer makes another call than this rank, or with other sizes.
    #[error("{phase} on rank {rank}: rank {peer} has {what} {theirs}, this rank {ours}")]
    Disagree {
        /// This rank's call.
        phase: Phase,
        /// This rank.
        rank: usize,
        /// The peer.
        peer: usize,
        /// The size or count that differs.
        what: &'static str,
        /// The peer's value.
        theirs: u64,
        /// This rank's value.
        ours: u64,
    },
    /// Ranks have come or gone since the dispatch that the call belongs to. Nothing was done.
    #[error(
        "{phase} on rank {rank}: what it belongs to is of generation {of} of the group, which has generation {is} since ranks \
         came or went; dispatch again"
    )]
    Stale {
        /// This rank's call.
        phase: Phase,
        /// This rank.
        rank: usize,
        /// The generation of the dispatch, or of the group that was asked.
        of: u32,
        /// The group's generation.
        is: u32,
    },
    /// The caller was interrupted.
    #[error("interrupted")]
    Interrupted,
    /// A GPU or its driver refuses a request.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// The system refuses a request.
    #[error("{what}: {source}")]
    Os {
        /// The request.
        what: String,
        /// The system's answer.
        source: io::Error,
    },
    /// The network between nodes cannot be used.
    #[error("{what}: {source}")]
    Network {
        /// The request.
        what: &'static str,
        /// The reason of the failure.
        source: uccl_p2p::Error,
    },
}

impl Error {
    pub(crate) fn invalid(why: impl Into<String>) -> Self {
        Self::Invalid(why.into())
    }
}

fn overdue(phase: Phase, rank: usize, awaited: &[MissingMark], waited: Duration) -> String {
    let mut text = format!("{phase} on rank {rank} is not over after {waited:?}");
    for late in awaited {
        let (peer, owner) = (late.peer, late.owner);
        if peer == rank && late.what == MissingMark::ROOM {
            let call = late.expected.call;
            text += &format!(
                "; call {call} of this rank was begun and not ended: a hook is to be called"
            );
            continue;
        }
        let relays = match owner == peer || owner == rank {
            true => String::new(),
            false => format!(", which relays for rank {owner}"),
        };
        text += &format!("; rank {peer}{relays}: {}", describe(late));
    }
    text
}

/// Describes the word expected of a peer, and the one seen.
pub(crate) fn describe(late: &MissingMark) -> String {
    let MissingMark { what, expected, seen, .. } = late;
    let Mark { call, round, .. } = seen;
    let seen = match call {
        0 => "nothing seen".to_owned(),
        _ => format!("call {call} round {round} seen"),
    };
    format!("{what} of call {} round {} expected, {seen}", expected.call, expected.round)
}
