//! Tokens go to the ranks of their experts.

use std::sync::Arc;

use uccl_device::cuda::{Grid, Stream};

use super::{
    group::Group,
    memory::{Choices, Outputs, ScalesOut, Tokens, check_rows},
    params::{
        Area, CallParams, FEW_CHOICES, MAX_TOKENS, ROUTE_THREADS, Receive, Routes, Send, how,
    },
    status::DISPATCH_AGREED,
};
use crate::{
    dispatch::{Payload, TILE},
    error::{Error, Phase, Result},
    header::Header,
    numerics::quantise::Scales,
    record::Record,
};

/// A dispatch that was begun.
pub struct Dispatch {
    group: Arc<Group>,
    call: CallParams,
    routes: Routes,
    area: Area,
    slots: usize,
}

/// What a combine needs of its dispatch.
pub struct Handle {
    pub(super) group: Arc<Group>,
    pub(super) routes: Routes,
    pub(super) slots: usize,
}

impl Dispatch {
    /// Enqueues the sending of a rank's tokens. No rank has more than `slots`.
    ///
    /// # Errors
    /// Arguments are wrong, or an earlier call has failed.
    ///
    /// # Safety
    /// The stream is of the group's context. `tokens` and `choices` describe memory that the GPU may read until this work
    /// has ended, and `scratch` has [`scratch_len`](super::scratch_len) bytes, aligned to 8, which only this dispatch uses
    /// until then.
    pub unsafe fn begin(
        group: &Arc<Group>,
        tokens: &Tokens,
        choices: &Choices,
        slots: usize,
        (scratch, stream): (u64, &Stream),
    ) -> Result<Self> {
        group.check()?;
        let ranks = group.ranks();
        choices.check(ranks)?;
        let record = record_of(tokens, choices.top_k)?;
        // One block counts all tokens.
        let routes = Routes { chunks: 0, ..choices.routes(ranks, scratch) };
        let (call, area) = call_of(group, &record, &routes, slots, scratch)?;
        let is_few = routes.tokens as usize * routes.top_k as usize <= FEW_CHOICES;
        let send = Send {
            group: group.params(),
            call,
            routes,
            area,
            rows: tokens.rows,
            row_stride: tokens.stride as u64,
            global_scale_at: tokens.global_scale,
            global_scale: match tokens.payload {
                Payload::Nvfp4(_, global_scale) => global_scale,
                Payload::Bytes(_) | Payload::Quantised(..) => 0.0,
            },
            how: how_of(tokens.payload),
            is_few: u32::from(is_few),
            zero: 0,
        };
        // SAFETY: both kernels take this struct; the module is never unloaded; the caller's promise. Windows are reached for
        // as long as the group lives, and freed when the GPU's work has ended.
        unsafe {
            if !is_few {
                let grid = Grid { blocks: 1, threads: ROUTE_THREADS };
                stream.launch(group.kernels().route, grid, &send)?;
            }
            // A block for each token, and one for what is told of them.
            let rows = routes.tokens as usize + 1;
            group.launch(stream, (group.kernels().send, rows), &send)?;
        }
        Ok(Self { group: Arc::clone(group), call, routes, area, slots })
    }

    /// Enqueues the taking out of what arrives, which ends the call.
    ///
    /// # Errors
    /// Arguments are wrong, or an earlier call has failed.
    ///
    /// # Safety
    /// The stream is of the group's context, and comes after the work of [`begin`](Self::begin). `outputs` has memory for
    /// `slots` rows of each rank for each local expert, which only this call uses until its work has ended.
    pub unsafe fn receive(self, outputs: &Outputs, stream: &Stream) -> Result<Handle> {
        let Self { group, call, routes, area, slots } = self;
        group.check()?;
        check_rows("rows", outputs.rows, outputs.stride, area.payload as usize)?;
        if outputs.scales.is_none() && area.scales > 0 {
            return Err(Error::invalid("quantised rows have scales"));
        }
        let expert_rows = slots * group.ranks();
        let (words, [row, expert, word], tile_rows) = match outputs.scales {
            None => (0, [0; 3], 0),
            Some(ScalesOut::Strided { words, row_stride, expert_stride, word_stride }) => {
                (words, [row_stride, expert_stride, word_stride], 0)
            }
            Some(ScalesOut::Tiled { words, tile_rows }) => (words, [0; 3], tile_rows),
        };
        let is_tiled = matches!(outputs.scales, Some(ScalesOut::Tiled { .. }));
        if is_tiled && tile_rows < expert_rows.div_ceil(TILE).max(1) {
            let why = format!("{tile_rows} rows of tiles for {expert_rows} rows of an expert");
            return Err(Error::invalid(why));
        }
        let receive = Receive {
            group: group.params(),
            call,
            area,
            rows: outputs.rows,
            row_stride: outputs.stride as u64,
            scales: words,
            scales_row: row as u64,
            scales_expert: expert as u64,
            scales_word: word as u64,
            count: outputs.count,
            stats: outputs.stats,
            waits: outputs.waits,
            src_info: outputs.table.src_info,
            origin: outputs.table.origin,
            layout_range: outputs.table.layout_range,
            expert_rows: expert_rows as u32,
            slots: slots as u32,
            top_k: routes.top_k,
            local_experts: routes.local_experts,
            tile_rows: tile_rows as u32,
            zero: 0,
        };
        // SAFETY: the kernel takes this struct; otherwise as above.
        unsafe {
            group.launch(stream, (group.kernels().receive, slots * group.ranks()), &receive)?;
        }
        Ok(Handle { group, routes, slots })
    }
}

impl Handle {
    /// Rows of each local expert.
    #[must_use]
    pub fn expert_rows(&self) -> usize {
        self.slots * self.group.ranks()
    }
}

/// The kernels' name of a payload.
fn how_of(payload: Payload) -> u32 {
    match payload {
        Payload::Bytes(_) => how::COPIED,
        Payload::Quantised(_, Scales::Exact) => how::EXACT,
        Payload::Quantised(_, Scales::PowerOfTwo) => how::POWER,
        Payload::Quantised(_, Scales::Exponent) => how::EXPONENT,
        Payload::Nvfp4(..) => how::NVFP4,
    }
}

fn record_of(tokens: &Tokens, top_k: usize) -> Result<Record> {
    let record = tokens.payload.record(top_k)?;
    check_rows("rows", tokens.rows, tokens.stride, record.payload)?;
    Ok(record)
}

/// What the kernels need to know of a call with such records, and how they lie in an area of its place.
pub(super) fn call_of(
    group: &Group,
    record: &Record,
    routes: &Routes,
    slots: usize,
    scratch: u64,
) -> Result<(CallParams, Area)> {
    let (ranks, local) = (group.ranks(), routes.local_experts as usize);
    let tokens = routes.tokens as usize;
    if tokens > slots || slots > MAX_TOKENS {
        let why =
            format!("{tokens} tokens, and room for {slots} of each rank, of {MAX_TOKENS} at most");
        return Err(Error::invalid(why));
    }
    let agreed = [record.payload, record.scales, record.top_k, local * ranks, slots];
    let header = Header::<5, 2> {
        phase: Phase::Dispatch,
        agreed: std::array::from_fn(|at| (DISPATCH_AGREED[at], agreed[at])),
        // How many tokens there are for each rank is known to the kernel.
        told: [0, tokens],
    };
    let call = group.call(record.area(local, slots) * ranks, &header, scratch)?;
    Ok((call, area_of(record, local, slots)))
}

fn area_of(record: &Record, local: usize, slots: usize) -> Area {
    Area {
        len: record.area(local, slots) as u64,
        first: Record::first_at(local) as u32,
        stride: record.stride() as u32,
        payload: record.payload as u32,
        scales: record.scales as u32,
        scales_at: record.scales_at() as u32,
        choices_at: record.choices_at() as u32,
        places_at: record.weights_at() as u32,
        token_at: record.token_at() as u32,
    }
}
