//! The routing of a dispatch's tokens.

use super::{DispatchLayout, Handle};
use crate::{
    cuda::{
        memory::{COMBINE_SCRATCH_LEN, Choices, scratch_len},
        params::{Routes, max_call_tokens},
    },
    shared::{
        error::{Error, Result},
        routing::MAX_EXPERTS,
    },
};

/// The routing of tokens.
#[derive(Clone, Copy)]
pub enum Routing<'a> {
    /// By their experts.
    Choices(Choices),
    /// By their experts, with a layout computed before.
    Layout(&'a DispatchLayout),
    /// By their ranks.
    Ranks(TokenRanks),
    /// To the places of an earlier dispatch, with its choices.
    Cached(&'a Handle),
}

/// The ranks of tokens that have no choices.
#[derive(Clone, Copy, Debug)]
pub struct TokenRanks {
    /// A byte by token and rank: whether the token goes there.
    pub token_in_rank: u64,
    /// i32 by expert: the token count that its rank gets.
    pub per_expert: u64,
    /// The number of tokens.
    pub tokens: usize,
    /// Experts of all ranks together.
    pub num_experts: usize,
}

impl TokenRanks {
    fn as_choices(&self) -> Choices {
        let Self { tokens, num_experts, .. } = *self;
        Choices { experts: 0, is_64: false, tokens, top_k: 0, num_experts }
    }
}

impl Routing<'_> {
    /// The number of tokens.
    #[must_use]
    pub fn tokens(&self) -> usize {
        match self {
            Self::Choices(choices) => choices.tokens,
            Self::Ranks(given) => given.tokens,
            Self::Layout(layout) => layout.routes.tokens as usize,
            Self::Cached(handle) => handle.routes.tokens as usize,
        }
    }

    /// The generation of the handle, if there is one.
    pub(super) fn generation(&self) -> Option<u32> {
        match self {
            Self::Choices(_) | Self::Layout(_) | Self::Ranks(_) => None,
            Self::Cached(handle) => Some(handle.generation),
        }
    }

    /// Bytes of the memory that a dispatch uses: with [`Cached`](Self::Cached) until it has ended,
    /// and else until the last call with its handle has ended.
    #[must_use]
    pub fn scratch_len(&self, ranks: usize) -> usize {
        match self {
            Self::Choices(choices) => scratch_len(choices, ranks),
            Self::Ranks(given) => scratch_len(&given.as_choices(), ranks),
            Self::Layout(_) | Self::Cached(_) => COMBINE_SCRATCH_LEN,
        }
    }

    /// The same routing without a layout: tokens in rounds have a layout for each round.
    pub(super) fn without_layout(self, ranks: usize) -> Self {
        let Self::Layout(layout) = self else { return self };
        let Routes { choices: experts, is_64, tokens, top_k, local_experts, .. } = layout.routes;
        Self::Choices(Choices {
            experts,
            is_64: is_64 != 0,
            tokens: tokens as usize,
            top_k: top_k as usize,
            num_experts: local_experts as usize * ranks,
        })
    }

    /// The kernels' tables, in the scratch memory at an address. Fails for a routing that kernels
    /// cannot take.
    pub(super) fn routes(&self, ranks: usize, scratch: u64) -> Result<Routes> {
        match self {
            Self::Choices(choices) => {
                choices.check(ranks)?;
                Ok(choices.routes(ranks, scratch))
            }
            Self::Ranks(given) => {
                let TokenRanks { tokens, num_experts, .. } = *given;
                let most = max_call_tokens(ranks);
                let has_experts = num_experts <= MAX_EXPERTS && num_experts.is_multiple_of(ranks);
                if tokens > most || !has_experts {
                    return Err(Error::invalid(format!(
                        "{tokens} tokens and {num_experts} experts for {ranks} ranks: a call on a GPU has {most} and \
                         {MAX_EXPERTS} at most, and as many experts for each rank"
                    )));
                }
                Ok(given.as_choices().routes(ranks, scratch))
            }
            Self::Layout(layout) => Ok(layout.routes),
            Self::Cached(handle) => Ok(handle.routes),
        }
    }
}
