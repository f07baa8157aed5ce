//! Normal-mode combine: the rows of each token's ranks come back and are summed, beginning with the
//! biases, without weights.

use std::{num::NonZero, sync::Arc};

use uccl_device::cuda::Stream;

use super::{
    Handle,
    memory::{Launch, ReceivedRows, blocks_for},
    rounds::HandleRounds,
};
use crate::{
    cuda::{
        call::combine_call,
        group::Group,
        memory::check_rows,
        params::{
            CallParams, CombineRound, NormalReturn, NormalSum, ReturnRound, Routes,
            WholeNormalCombine, order,
        },
    },
    host::combine::{CombineRows, Order, slots_of},
    shared::{
        error::{Error, Phase, Result},
        nodes::Nodes,
        record::Row,
    },
};

/// Rows of bf16 that go back: those of a dispatch, in their order.
#[derive(Clone, Copy, Debug)]
pub struct CombineInput {
    /// The number of rows. Fewer than the dispatch had are refused if the host has counts, and else
    /// fail the call.
    pub len: usize,
    /// The first row.
    pub rows: u64,
    /// Bytes from one row to the next, a multiple of 16.
    pub stride: usize,
    /// Values of a row, a multiple of 8.
    pub hidden: usize,
    /// f32 by row and choice, or, where rows are by expert, by row, which go back too; or 0. None
    /// where each expert's row goes back.
    pub weights: u64,
    /// The rows that are sent: one for each token; or, where rows are by expert, another of the
    /// variants.
    pub sends: CombineRows,
    /// The most blocks of the call's launches, to leave other multiprocessors of the GPU free.
    pub max_blocks: Option<NonZero<usize>>,
}

/// Memory for the sums.
#[derive(Clone, Copy, Debug)]
pub struct CombineOutput {
    /// The first row of bf16; rows are contiguous.
    pub rows: u64,
    /// The order of each sum.
    pub order: Order,
    /// Up to two first addends of each sum, with a contiguous row for each token; or 0.
    pub bias: [u64; 2],
    /// f32 by token and choice, or 0: by rank, sums of the ranks' weights; by choice, the weight of
    /// the choice's rank.
    pub weights: u64,
}

/// A combine that was begun.
pub struct Combine {
    handle: Arc<Handle>,
    sent: NormalReturn,
    row: Row,
    sends: CombineRows,
    max_blocks: Option<NonZero<usize>>,
}

impl Combine {
    /// Enqueues the send of rows back to the ranks of their tokens, unless they are sent in chunks.
    ///
    /// # Errors
    /// Arguments are wrong, or an earlier call has failed.
    ///
    /// # Safety
    /// The stream is of the group's context, and comes after the dispatch. `input` describes memory
    /// that the GPU may read until the combine's work has ended. `scratch` has
    /// [`COMBINE_SCRATCH_LEN`](crate::cuda::COMBINE_SCRATCH_LEN) bytes, aligned to 8, which only
    /// this combine uses until then.
    pub unsafe fn begin(
        handle: &Arc<Handle>,
        input: &CombineInput,
        Launch { stream, scratch }: Launch<'_>,
    ) -> Result<Self> {
        let Handle { group, routes, slots, rows, row_layout, generation, .. } = &**handle;
        group.check_of(*generation, Phase::Combine)?;
        let arrived = row_layout.min_combine_rows;
        if input.len < arrived {
            let why = format!("x has {} rows, and {arrived} arrived", input.len);
            return Err(Error::invalid(why));
        }
        let (len, top_k) = (2 * input.hidden, routes.top_k as usize);
        check_rows("rows", input.rows, input.stride, len)?;
        group.check_outside_pool(input.rows)?;
        let is_each = input.sends == CombineRows::EachExpert;
        if (input.sends == CombineRows::Row) == rows.by_expert.is_some() {
            return Err(Error::invalid("rows go back as they came: by token, or by expert"));
        }
        if is_each && input.weights != 0 {
            return Err(Error::invalid("no weights go back with the rows of each expert"));
        }
        let row = Row {
            values: len,
            weights: if input.weights == 0 { 0 } else { top_k },
            slots: if is_each { top_k } else { slots_of(Nodes::one(group.ranks()), top_k) },
        };
        let call = combine_call(group, &row, *slots, false, scratch)?;
        let call = CallParams { dispatch_placement: rows.placement, ..call };
        let sent = NormalReturn {
            group: group.params,
            call,
            rows: input.rows,
            row_stride: input.stride as u64,
            weights: input.weights,
            src_info: rows.tables.src_info,
            origin: rows.tables.origin,
            starts: rows.tables.starts,
            ends: rows.by_expert.map_or(0, |layout| layout.ends),
            metadata: rows.by_expert.map_or(0, |layout| layout.metadata),
            slot_stride: row.stride() as u64,
            row_len: len as u32,
            weights_at: row.weights_at() as u32,
            len: u32::try_from(input.len).unwrap_or(u32::MAX),
            slots: *slots as u32,
            token_rows: row.slots as u32,
            top_k: routes.top_k,
            local_experts: routes.local_experts,
            sends_each: u32::from(is_each),
            spread: rows.spread as u32,
            zero: 0,
        };
        if !group.can_fuse() && handle.rounds.is_none() {
            let blocks = blocks_for(input.len, input.max_blocks);
            // SAFETY: the kernel takes this struct; the module is never unloaded; the caller
            // guarantees the rest. Windows are open as long as the group lives, and freed when the
            // GPU's work has ended.
            unsafe { group.launch(stream, (group.kernels().normal_return, blocks), &sent)? };
        }
        let CombineInput { sends, max_blocks, .. } = *input;
        Ok(Self { handle: Arc::clone(handle), sent, row, sends, max_blocks })
    }

    /// Enqueues the sums, which end the call, and the send of rows that go in chunks.
    ///
    /// # Errors
    /// Arguments are wrong, or an earlier call has failed.
    ///
    /// # Safety
    /// The stream is of the group's context, and comes after the work of [`begin`](Self::begin).
    /// `combined` has a row, and weights if there are any, for each of this rank's tokens; no other
    /// code uses them until this work has ended.
    pub unsafe fn finish(self, combined: &CombineOutput, stream: &Stream) -> Result<()> {
        let Self { handle, sent, row, sends, max_blocks } = self;
        let Handle { group, routes, slots, generation, .. } = &*handle;
        group.check_of(*generation, Phase::Combine)?;
        check_rows("sums", combined.rows, row.values, row.values)?;
        for bias in combined.bias {
            check_rows("biases", bias, row.values, row.values)?;
        }
        if combined.weights != 0 && row.weights == 0 {
            return Err(Error::invalid("no weights go back, and some are asked for"));
        }
        let order = match (combined.order, sends) {
            (Order::ByChoice, _) if routes.top_k == 0 => {
                let why = "tokens that have ranks and no choices are summed by rank";
                return Err(Error::invalid(why));
            }
            (Order::ByRank, CombineRows::EachExpert) => {
                return Err(Error::invalid("rows of each expert are summed by choice"));
            }
            (Order::ByRank, _) => order::BY_RANK,
            (Order::ByChoice, CombineRows::EachExpert) => order::EACH_CHOICE,
            (Order::ByChoice, _) => order::BY_CHOICE,
        };
        let sum = NormalSum {
            group: sent.group,
            call: sent.call,
            routes: *routes,
            bias: combined.bias,
            weights: combined.weights,
            out: combined.rows,
            slot_stride: row.stride() as u64,
            round_tokens: handle.rounds.as_ref().map_or(0, |rounds| rounds.tables.tokens),
            row_len: row.values as u32,
            weights_at: row.weights_at() as u32,
            slots: *slots as u32,
            order,
        };
        if let Some(rounds) = &handle.rounds {
            let of = CombineRounds { sent, sum, rows: &handle.rows, max_blocks };
            // SAFETY: the caller guarantees it.
            return unsafe { of.launch(group, rounds, stream) };
        }
        let (kernels, tokens) = (group.kernels(), routes.tokens as usize);
        // SAFETY: the kernels take these structs; for the rest, as above.
        unsafe {
            if group.can_fuse() {
                let blocks = blocks_for(sent.len as usize + tokens + 1, max_blocks);
                let fused = WholeNormalCombine { send: sent, sum };
                group.launch(stream, (kernels.fused()?.normal_combine, blocks), &fused)
            } else {
                let blocks = blocks_for(tokens, max_blocks);
                group.launch(stream, (kernels.normal_sum, blocks), &sum)
            }
        }
    }
}

/// A combine in the rounds of its dispatch. The parameters are those of one round for all tokens.
struct CombineRounds<'a> {
    sent: NormalReturn,
    sum: NormalSum,
    rows: &'a ReceivedRows,
    max_blocks: Option<NonZero<usize>>,
}

impl CombineRounds<'_> {
    /// Enqueues all rounds: each sends the rows of its tokens back, and sums them.
    ///
    /// # Safety
    /// As for [`Combine::finish`].
    unsafe fn launch(&self, group: &Group, rounds: &HandleRounds, stream: &Stream) -> Result<()> {
        let kernels = group.kernels();
        for (nth, of) in rounds.by_round.iter().enumerate() {
            let call = CallParams { dispatch_placement: of.placement, ..self.sent.call };
            let send = NormalReturn { call, ..self.sent };
            let sum = self.sum_from(rounds.first_token(nth) as u64, call, of.routes);
            let round = rounds.params(nth, self.rows);
            let sums = of.routes.tokens as usize;
            let returns = (send.len as usize).min(group.ranks() * rounds.cut.slots);
            // SAFETY: the kernels take these structs; for the rest, the caller guarantees it.
            unsafe {
                if group.can_fuse() {
                    let blocks = blocks_for(returns + sums + 1, self.max_blocks);
                    let whole = WholeNormalCombine { send, sum };
                    let fused = CombineRound { whole, round };
                    let kernel = kernels.fused()?.normal_combine_round;
                    group.launch(stream, (kernel, blocks), &fused)?;
                } else {
                    let blocks = blocks_for(returns, self.max_blocks);
                    let sent = ReturnRound { send, round };
                    group.launch(stream, (kernels.normal_return_round, blocks), &sent)?;
                    let blocks = blocks_for(sums, self.max_blocks);
                    group.launch(stream, (kernels.normal_sum, blocks), &sum)?;
                }
            }
        }
        Ok(())
    }

    /// The sums of a round, whose tokens begin with this one.
    fn sum_from(&self, first: u64, call: CallParams, routes: Routes) -> NormalSum {
        let NormalSum { bias, weights, out, row_len, .. } = self.sum;
        let rows = first * u64::from(row_len);
        let behind = |address: u64, len: u64| if address == 0 { 0 } else { address + len };
        NormalSum {
            call,
            routes,
            bias: bias.map(|bias| behind(bias, rows)),
            weights: behind(weights, 4 * first * u64::from(routes.top_k)),
            out: out + rows,
            ..self.sum
        }
    }
}
