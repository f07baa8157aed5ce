//! Where a rank's tensors are: what callers describe of a GPU's memory. Addresses are those that the GPU reaches, aligned
//! to 16 bytes where rows of bytes begin; 0 is none.

use std::num::NonZero;

use super::{Handle, LaidOut};
use crate::{
    cuda::{
        memory::{COMBINE_SCRATCH_LEN, Choices, scratch_len},
        params::{MAX_TOKENS, Routes},
    },
    error::{Error, Result},
    routing::MAX_EXPERTS,
};

/// A rank's tokens.
#[derive(Clone, Copy, Debug)]
pub struct Tokens {
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
    /// The most blocks that the call's launches have, if they are to leave others of the GPU's multiprocessors alone.
    pub most_blocks: Option<NonZero<usize>>,
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

/// What says where tokens go.
#[derive(Clone, Copy)]
pub enum Routed<'a> {
    /// The experts that they chose.
    Choices(Choices),
    /// The experts that they chose when they were laid out.
    LaidOut(&'a LaidOut),
    /// Their ranks.
    Ranks(Ranks),
    /// Where those of an earlier dispatch went, whose choices they come with.
    Again(&'a Handle),
}

/// The ranks of tokens that have no choices.
#[derive(Clone, Copy, Debug)]
pub struct Ranks {
    /// A byte by token and rank: whether it goes there.
    pub goes: u64,
    /// i32 by expert: how many tokens its rank is told of.
    pub per_expert: u64,
    /// How many tokens there are.
    pub tokens: usize,
    /// Experts of all ranks together.
    pub num_experts: usize,
}

impl Ranks {
    fn as_choices(&self) -> Choices {
        let Self { tokens, num_experts, .. } = *self;
        Choices { experts: 0, is_64: false, tokens, top_k: 0, num_experts }
    }
}

impl Routed<'_> {
    /// Bytes of memory that a dispatch uses: until it has ended, if tokens go where they went, and else until the last call with its
    /// handle has ended.
    #[must_use]
    pub fn scratch_len(&self, ranks: usize) -> usize {
        match self {
            Self::Choices(choices) => scratch_len(choices, ranks),
            Self::Ranks(given) => scratch_len(&given.as_choices(), ranks),
            Self::LaidOut(_) | Self::Again(_) => COMBINE_SCRATCH_LEN,
        }
    }

    /// As the kernels take it, with the scratch memory at an address. Fails for what they cannot do.
    pub(super) fn routes(&self, ranks: usize, scratch: u64) -> Result<Routes> {
        match self {
            Self::Choices(choices) => {
                choices.check(ranks)?;
                Ok(choices.routes(ranks, scratch))
            }
            Self::Ranks(given) => {
                let Ranks { tokens, num_experts, .. } = *given;
                let has_experts = num_experts <= MAX_EXPERTS && num_experts.is_multiple_of(ranks);
                if tokens > MAX_TOKENS || !has_experts {
                    return Err(Error::invalid(format!(
                        "{tokens} tokens and {num_experts} experts for {ranks} ranks: a call on a GPU has {MAX_TOKENS} and \
                         {MAX_EXPERTS} at most, and as many experts for each rank"
                    )));
                }
                Ok(given.as_choices().routes(ranks, scratch))
            }
            Self::LaidOut(laid_out) => Ok(laid_out.routes),
            Self::Again(handle) => Ok(handle.routes),
        }
    }
}

/// Where what arrives is put. Tokens of rank 0 come first, in the order of their rank: a row for each, or, by expert, for each
/// token and expert of this rank.
#[derive(Clone, Copy, Debug)]
pub struct Outputs {
    /// How many rows there are. More fail the call.
    pub len: usize,
    /// Payloads: the first row.
    pub rows: u64,
    /// Bytes from one row to the next, a multiple of 16.
    pub stride: usize,
    /// Scales, where rows come with them.
    pub scales: Option<ScalesOut>,
    /// Integers by row and choice, as numbers of this rank's experts: -1 for those of others, and in rows that nothing arrives
    /// for. Or 0. There are none by expert.
    pub choices: u64,
    /// Whether they have 64 bits, or 32.
    pub is_64: bool,
    /// f32 by row and choice, or, by expert, by row; or 0.
    pub weights: u64,
    /// Whether weights of other ranks' experts become 0.
    pub zeroes_foreign_weights: bool,
    /// Whether rows become 0, with their scales and weights, that alignment leaves between those of experts.
    pub zeroes_gaps: bool,
    /// What is told of the rows. None with [`Routed::Again`]: they are those of the earlier dispatch.
    pub table: Option<Table>,
    /// Rows are by expert. With [`Routed::Again`] they are as in the earlier dispatch, whatever is here.
    pub by_expert: Option<ByExpert>,
}

/// Where scales go: word `w` of a row is at `row * row_stride + w * word_stride`, in words.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ScalesOut {
    /// The first word.
    pub words: u64,
    /// From one row to the next.
    pub row_stride: usize,
    /// From one word to the next.
    pub word_stride: usize,
}

/// What a dispatch tells of its rows: memory that its combines need.
#[derive(Clone, Copy, Debug)]
pub struct Table {
    /// i32 by token that arrives: its number at its rank.
    pub src_info: u64,
    /// i32 by token that arrives: `rank * 64`, and which of the token's ranks this one is.
    pub origin: u64,
    /// i32, one more than there are ranks: tokens that arrive before those of each, and how many do.
    pub starts: u64,
    /// i32 by local expert: how many tokens chose it.
    pub per_expert: u64,
}

/// Rows by expert: those of one behind the other, in order of rank and token.
#[derive(Clone, Copy, Debug)]
pub struct ByExpert {
    /// The rows of each begin at a multiple of this.
    pub alignment: usize,
    /// How many tokens the tables have room for. More fail the call.
    pub tokens: usize,
    /// i32 by local expert: behind the last of its rows.
    pub ends: u64,
    /// i32, `2 + top_k` by token that arrives: `rank * slots + token`, `rank * top_k` and the last choice of this rank's experts,
    /// and the row of each choice, or -1.
    pub metadata: u64,
}

/// More than any product of matrices asks for, and few enough for rows of all experts to be counted in 32 bits.
const MAX_ALIGNMENT: usize = 1 << 16;

impl ByExpert {
    /// Fails for what kernels cannot do.
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

/// The blocks of a launch for so many rows, of which a call is to have so many at most.
pub(super) fn blocks_for(rows: usize, most: Option<NonZero<usize>>) -> usize {
    most.map_or(rows, |most| rows.min(most.get()))
}
