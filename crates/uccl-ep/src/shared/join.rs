//! Joining of ranks: the bytes that they exchange, and how all of them learn that one cannot join.

use uccl_p2p::Endpoint;

use crate::shared::error::{Error, Phase, Result};

/// Collects the bytes of every rank, in order of rank, and gives them to all; `None` for a rank
/// that is not there.
pub type Exchange<'a> = dyn FnMut(Vec<u8>) -> Result<Vec<Option<Vec<u8>>>> + 'a;

/// Makes the endpoint of a rank that has far peers, with these settings.
pub type EndpointMaker<'a> = dyn FnMut(uccl_p2p::Config) -> uccl_p2p::Result<Endpoint> + 'a;

/// A rank's progress in a group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Position {
    /// The number of its meetings with others.
    pub(crate) generation: u32,
    /// The number of its next call.
    pub(crate) next_call: u64,
}

impl Position {
    /// The position of a new rank.
    pub(crate) const FIRST: Self = Self { generation: 0, next_call: 1 };

    /// The position from which these ranks continue together. Calls that failed, or that a rank
    /// missed, leave ranks at different calls: all continue behind the furthest, so that no number
    /// is used twice.
    pub(crate) fn after(ranks: impl Iterator<Item = Self>) -> Self {
        let furthest = ranks.fold(Self::FIRST, |a, b| Self {
            generation: a.generation.max(b.generation),
            next_call: a.next_call.max(b.next_call),
        });
        Self { generation: furthest.generation.saturating_add(1), ..furthest }
    }
}

/// Facts of a rank's card: the name of each, the card's value, and this rank's value.
pub(crate) type Facts<'a> = &'a [(&'static str, u64, u64)];

/// Compares a peer's card with this rank's values.
pub(crate) fn agree(rank: usize, peer: usize, facts: Facts<'_>) -> Result<()> {
    match facts.iter().copied().find(|(_, theirs, ours)| theirs != ours) {
        None => Ok(()),
        Some((what, theirs, ours)) => {
            Err(Error::Disagree { phase: Phase::Join, rank, peer, what, theirs, ours })
        }
    }
}

/// Tells all ranks whether this one could join, and learns it of them. A rank that failed sends the
/// reason, so that none waits for it in vain.
pub(crate) fn all_joined<T>(
    rank: usize,
    joined: Result<T>,
    exchange: &mut Exchange<'_>,
) -> Result<T> {
    agree_on_outcome(rank, joined, exchange)?
}

/// The same, with an inner error that all ranks know of: each has one.
pub(crate) fn agree_on_outcome<T>(
    rank: usize,
    joined: Result<T>,
    exchange: &mut Exchange<'_>,
) -> Result<Result<T>> {
    let verdict = joined.as_ref().err().map(ToString::to_string).unwrap_or_default();
    let verdicts = exchange(verdict.into_bytes())?;
    Ok(joined.and_then(|joined| check_verdicts(rank, joined, &verdicts)))
}

fn check_verdicts<T>(rank: usize, joined: T, verdicts: &[Option<Vec<u8>>]) -> Result<T> {
    let failed =
        |(_, text): &(usize, &Option<Vec<u8>>)| text.as_ref().is_some_and(|text| !text.is_empty());
    match verdicts.iter().enumerate().find(failed) {
        None => Ok(joined),
        Some((peer, text)) => {
            let text = String::from_utf8_lossy(text.as_deref().unwrap_or_default());
            let why = format!("could not join: {text}");
            Err(Error::PeerLost { phase: Phase::Join, rank, peer, why })
        }
    }
}
