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
    /// Ranks have come or gone since the dispatch that the call belongs to. Nothing was done.
    #[error(
        "{phase} on rank {rank}: what it belongs to is of generation {of} of the group, which has generation {is} since ranks \
         came or went; dispatch again"
    )]
    Stale {
        /// What this rank was at.
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
    /// The network between nodes cannot be used.
    #[error("{what}: {source}")]
    Network {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: uccl_p2p::Error,
    },
}

impl Error {
    pub(crate) fn invalid(why: impl Into<String>) -> Self {
        Self::Invalid(why.into())
    }
}

fn overdue(phase: Phase, rank: usize, awaited: &[Awaited], waited: Duration) -> String {
    let mut text = format!("{phase} on rank {rank} is not over after {waited:?}");
    for late in awaited {
        let (peer, about) = (late.peer, late.about);
        if peer == rank && late.what == Awaited::ROOM {
            let call = late.expected.call;
            text += &format!(
                "; call {call} of this rank was begun and not ended: a hook is to be called"
            );
            continue;
        }
        let relays = match about == peer || about == rank {
            true => String::new(),
            false => format!(", which relays for rank {about}"),
        };
        text += &format!("; rank {peer}{relays}: {}", described(late));
    }
    text
}

/// What was expected of a peer, and what was seen.
pub(crate) fn described(late: &Awaited) -> String {
    let Awaited { what, expected, seen, .. } = late;
    let Mark { call, round, .. } = seen;
    let seen = match call {
        0 => "nothing seen".to_owned(),
        _ => format!("call {call} round {round} seen"),
    };
    format!("{what} of call {} round {} expected, {seen}", expected.call, expected.round)
}
