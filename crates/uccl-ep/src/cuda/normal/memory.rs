//! The callers' tensors in a GPU's memory. Addresses are those that the GPU uses, aligned to 16
//! bytes where rows of bytes begin; 0 is none.

use std::num::NonZero;

use uccl_device::cuda::Stream;

use super::{DispatchLayout, Handle};
use crate::{
    cuda::{
        memory::{COMBINE_SCRATCH_LEN, Choices, scratch_len},
        params::{MAX_TOKENS, Routes},
    },
    shared::{
        error::{Error, Result},
        routing::MAX_EXPERTS,
    },
};

/// The stream that a call is enqueued on, and the scratch memory that it uses there.
#[derive(Clone, Copy)]
pub struct Launch<'a> {
    /// A stream of the group's context.
    pub stream: &'a Stream,
    /// The address of the scratch memory, aligned to 8.
    pub scratch: u64,
}

/// A rank's tokens.
#[derive(Clone, Copy, Debug)]
pub struct DispatchInput {
    /// The first row.
    pub rows: u64,
    /// Bytes from one row to the next, a multiple of 16.
    pub stride: usize,
    /// Bytes of a row, a multiple of 16.
    pub payload: usize,
    /// Scales that come with the rows: opaque words.
    pub scales: Option<ScalesIn>,
    /// f32 by token and choice, or 0.
    pub weights: u64,
    /// The most blocks of the call's launches, to leave other multiprocessors of the GPU free.
    pub max_blocks: Option<NonZero<usize>>,
}

/// Scales of tokens: word `w` of token `t` is at `t * token_stride + w * word_stride`, in words.
#[derive(Clone, Copy, Debug)]
pub struct ScalesIn {
    /// The first word.
    pub words: u64,
    /// Words of a token.
    pub count: usize,
    /// From one token to the next.
    pub token_stride: usize,
    /// From one word to the next.
    pub word_stride: usize,
}

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
                let has_experts = num_experts <= MAX_EXPERTS && num_experts.is_multiple_of(ranks);
                if tokens > MAX_TOKENS || !has_experts {
                    return Err(Error::invalid(format!(
                        "{tokens} tokens and {num_experts} experts for {ranks} ranks: a call on a GPU has {MAX_TOKENS} and \
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

/// Output memory. Tokens of rank 0 come first, in the order of their rank: a row for each, or,
/// where rows are by expert, one for each token and expert of this rank.
#[derive(Clone, Copy, Debug)]
pub struct DispatchOutput {
    /// The number of rows. More fail the call.
    pub len: usize,
    /// Payloads: the first row.
    pub rows: u64,
    /// Bytes from one row to the next, a multiple of 16.
    pub stride: usize,
    /// Scales, where rows come with them.
    pub scales: Option<ScalesOut>,
    /// Integers by row and choice, with numbers of this rank's experts: -1 for other ranks'
    /// experts, and in rows without a token. Or 0. There are none where rows are by expert.
    pub choices: u64,
    /// Whether they have 64 bits, or 32.
    pub is_64: bool,
    /// f32 by row and choice; or, where rows are by expert, by row; or 0.
    pub weights: u64,
    /// Whether weights of other ranks' experts become 0.
    pub zero_foreign_weights: bool,
    /// Whether the rows that alignment leaves between experts become 0, with their scales and
    /// weights.
    pub zero_gaps: bool,
    /// The handle's tables. `None` with [`Routing::Cached`], which has those of the earlier
    /// dispatch.
    pub tables: Option<RowTables>,
    /// The layout of rows by expert. With [`Routing::Cached`] the earlier dispatch's layout is used
    /// instead.
    pub by_expert: Option<ExpertLayout>,
}

/// The layout of scales: word `w` of a row is at `row * row_stride + w * word_stride`, in words.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ScalesOut {
    /// The first word.
    pub words: u64,
    /// From one row to the next.
    pub row_stride: usize,
    /// From one word to the next.
    pub word_stride: usize,
}

/// A dispatch's tables about its rows, which its combines need.
#[derive(Clone, Copy, Debug)]
pub struct RowTables {
    /// i32 by received token: its number at its rank.
    pub src_info: u64,
    /// i32 by received token: `rank * 64`, plus this rank's index among the token's ranks.
    pub origin: u64,
    /// i32, one more than there are ranks: received tokens before those of each rank, and then all
    /// of them.
    pub starts: u64,
    /// i32 by local expert: tokens that chose it.
    pub per_expert: u64,
}

/// Rows by expert: expert after expert, in order of rank and token.
#[derive(Clone, Copy, Debug)]
pub struct ExpertLayout {
    /// The first row of each expert is a multiple of this.
    pub alignment: usize,
    /// The number of tokens that the tables have room for. More fail the call.
    pub tokens: usize,
    /// i32 by local expert: the row behind its last.
    pub ends: u64,
    /// i32, `2 + top_k` by received token: `rank * slots + token`, `rank * top_k` plus the last
    /// choice of this rank's experts, and the row of each choice, or -1.
    pub metadata: u64,
}

/// More than any matrix product needs, and so few that rows of all experts can be counted in 32
/// bits.
const MAX_ALIGNMENT: usize = 1 << 16;

impl ExpertLayout {
    /// Fails for a layout that kernels cannot take.
    pub(super) fn check(&self, top_k: u32) -> Result<()> {
        if top_k == 0 {
            return Err(Error::invalid(
                "tokens that have ranks and no choices have no rows by expert",
            ));
        }
        if self.ends == 0 || self.metadata == 0 {
            return Err(Error::invalid(
                "a dispatch tells of its rows by expert in two more tables",
            ));
        }
        if self.alignment == 0 || self.alignment > MAX_ALIGNMENT {
            let why = format!("rows are aligned to 1 to {MAX_ALIGNMENT}, not {}", self.alignment);
            return Err(Error::invalid(why));
        }
        Ok(())
    }
}

/// The blocks of a launch for so many rows, limited to `most`.
pub(super) fn blocks_for(rows: usize, most: Option<NonZero<usize>>) -> usize {
    most.map_or(rows, |most| rows.min(most.get()))
}
