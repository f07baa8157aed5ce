//! How ranks join: what they exchange, and how all of them learn that one of them cannot.

use uccl_p2p::Endpoint;

use crate::error::{Error, Phase, Result};

/// Gives every rank what every rank gives, in order of rank; `None` for a rank that is not there.
pub type Exchange<'a> = dyn FnMut(Vec<u8>) -> Result<Vec<Option<Vec<u8>>>> + 'a;

/// Makes the endpoint of a rank that has far peers, with these settings.
pub type MakeEndpoint<'a> = dyn FnMut(uccl_p2p::Config) -> uccl_p2p::Result<Endpoint> + 'a;

/// What a rank's card says of the group: what it is, what the card has, and what this rank has.
pub(crate) type Facts = [(&'static str, u64, u64); 3];

/// Compares a peer's card with what this rank knows.
pub(crate) fn agree(rank: usize, peer: usize, facts: Facts) -> Result<()> {
    match facts.into_iter().find(|(_, theirs, ours)| theirs != ours) {
        None => Ok(()),
        Some((what, theirs, ours)) => {
            Err(Error::Disagree { phase: Phase::Join, rank, peer, what, theirs, ours })
        }
    }
}

/// Tells all ranks whether this one could join, and hears it of them. A rank that failed says why, so that none waits for it
/// in vain.
pub(crate) fn all_joined<T>(
    rank: usize,
    joined: Result<T>,
    exchange: &mut Exchange<'_>,
) -> Result<T> {
    let verdict = joined.as_ref().err().map(ToString::to_string).unwrap_or_default();
    let verdicts = exchange(verdict.into_bytes())?;
    let joined = joined?;
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
