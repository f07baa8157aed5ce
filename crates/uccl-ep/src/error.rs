//! Why a call fails.

use std::{fmt, io, time::Duration};

use uccl_device::cuda::GpuError;

use crate::protocol::{Awaited, Mark};

/// The result of a call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Where in a call a rank is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Ranks find each other.
    Join,
    /// Tokens go to the ranks of their experts.
    Dispatch,
    /// What experts made of them comes back.
    Combine,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Join => "join",
            Self::Dispatch => "dispatch",
            Self::Combine => "combine",
        })
    }
}

/// Why a call fails.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument is wrong. Nothing was done.
    #[error("{0}")]
    Invalid(String),
    /// A peer did not do its part in time.
    #[error("{}", overdue(*.phase, *.rank, .awaited, *.waited))]
    Overdue {
        /// What this rank was at.
        phase: Phase,
        /// This rank.
        rank: usize,
        /// What it waited for, of each rank that is late.
        awaited: Vec<Awaited>,
        /// For how long.
        waited: Duration,
    },
    /// A peer has ended, or gave up on a call.
    #[error("{phase} on rank {rank}: rank {peer} {why}")]
    PeerLost {
        /// What this rank was at.
        phase: Phase,
        /// This rank.
        rank: usize,
        /// The peer.
        peer: usize,
        /// What happened to it.
        why: String,
    },
    /// A peer makes another call than this rank, or with other sizes.
    #[error("{phase} on rank {rank}: rank {peer} has {what} {theirs}, this rank {ours}")]
    Disagree {
        /// What this rank was at.
        phase: Phase,
        /// This rank.
        rank: usize,
        /// The peer.
        peer: usize,
        /// What differs.
        what: &'static str,
        /// The peer's value.
        theirs: u64,
        /// This rank's value.
        ours: u64,
    },
    /// The caller was interrupted.
    #[error("interrupted")]
    Interrupted,
    /// A GPU or its driver refuses something.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// The system refuses something.
    #[error("{what}: {source}")]
    Os {
        /// What was tried.
        what: String,
        /// What the system says.
        source: io::Error,
    },
}

impl Error {
    pub(crate) fn invalid(why: impl Into<String>) -> Self {
        Self::Invalid(why.into())
    }
}

fn overdue(phase: Phase, rank: usize, awaited: &[Awaited], waited: Duration) -> String {
    let mut text = format!("{phase} on rank {rank} is not over after {waited:?}");
    for Awaited { peer, what, expected, seen } in awaited {
        let Mark { call, round, .. } = seen;
        text += &format!(
            "; rank {peer}: {what} of call {} round {} expected, ",
            expected.call, expected.round
        );
        text += &match call {
            0 => "nothing seen".to_owned(),
            _ => format!("call {call} round {round} seen"),
        };
    }
    text
}
