//! Low latency dispatch: tokens go to the ranks of their experts.

use std::sync::Arc;

use uccl_device::cuda::Stream;

use super::memory::{DispatchInput, DispatchOutput, ScalesOut};
use crate::{
    cuda::{
        call::dispatch_call,
        group::Group,
        memory::{Choices, check_rows},
        params::{
            Layout, Receive, Routes, SMALL_BATCH_CHOICES, SMALL_BATCH_TOKENS, Send, WholeDispatch,
            format, is_wide,
        },
    },
    host::dispatch::{Payload, TILE},
    numerics::quantise::ScaleFormat,
    shared::{
        error::{Error, Phase, Result},
        record::Record,
    },
};

/// A dispatch.
pub struct Dispatch {
    group: Arc<Group>,
    send: Send,
    slots: usize,
    expert_rows: usize,
    /// The group's generation when it was prepared.
    generation: u32,
    is_begun: bool,
}

/// A dispatch's handle, for its combine.
pub struct Handle {
    pub(super) group: Arc<Group>,
    pub(super) routes: Routes,
    pub(super) slots: usize,
    expert_rows: usize,
    /// The group's generation at the dispatch.
    pub(super) generation: u32,
    /// The address of the dispatch's number and place, and of the ranks that it left out.
    pub(super) placement: u64,
}

impl Dispatch {
    /// Prepares a dispatch of a rank's tokens, and enqueues nothing yet. No rank has more than
    /// `slots`.
    ///
    /// # Errors
    /// Arguments are wrong, or an earlier call has failed.
    ///
    /// # Safety
    /// `tokens` and `choices` describe memory that the GPU may read until the dispatch's work has
    /// ended, and `scratch` has [`scratch_len`](crate::cuda::scratch_len) bytes, aligned to 8,
    /// which only this dispatch uses until then.
    pub unsafe fn new(
        group: &Arc<Group>,
        tokens: &DispatchInput,
        choices: &Choices,
        slots: usize,
        scratch: u64,
    ) -> Result<Self> {
        group.check()?;
        let ranks = group.ranks();
        choices.check(ranks)?;
        let record = record_of(tokens, choices.top_k)?;
        let routes = choices.routes(ranks, scratch);
        let (call, area) = dispatch_call(group, &record, &routes, slots, scratch)?;
        let is_small = !is_wide(ranks) && is_small_batch(routes.tokens as usize, choices.top_k);
        let send = Send {
            group: group.params,
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
            format: format_of(tokens.payload),
            is_small_batch: u32::from(is_small),
            // All ranks compute the same, because they have the same slots.
            in_chunks: u32::from(group.can_fuse() && is_small_batch(slots, choices.top_k)),
        };
        let (group, generation) = (Arc::clone(group), group.generation());
        Ok(Self { group, send, slots, expert_rows: slots * ranks, generation, is_begun: false })
    }

    /// Has the outputs' memory end after `rows` rows of each local expert. Rows behind them are
    /// not received: the ranks that take part send no more.
    ///
    /// # Errors
    /// That is more than all ranks may send.
    pub fn with_expert_rows(self, rows: usize) -> Result<Self> {
        if rows > self.expert_rows {
            let why = format!("{rows} rows of an expert, and all ranks send {}", self.expert_rows);
            return Err(Error::invalid(why));
        }
        Ok(Self { expert_rows: rows, ..self })
    }

    /// Enqueues the send.
    ///
    /// # Errors
    /// An earlier call has failed, or the driver refuses.
    ///
    /// # Safety
    /// The stream is of the group's context; otherwise as for [`new`](Self::new).
    pub unsafe fn begin(&mut self, stream: &Stream) -> Result<()> {
        self.group.check_of(self.generation, Phase::Dispatch)?;
        if self.send.is_small_batch == 0 {
            let layout = Layout::of(&self.group, self.send.call, self.send.routes);
            // SAFETY: as for the launch below.
            unsafe { layout.launch(&self.group, stream)? };
        }
        self.is_begun = true;
        let (send, rows) = (self.group.kernels().send, self.rows());
        // SAFETY: the kernel takes this struct; the module is never unloaded; the caller guarantees
        // the rest. Windows are open as long as the group lives, and freed when the GPU's work has
        // ended.
        unsafe { self.group.launch(stream, (send, rows), &self.send) }
    }

    /// Blocks with work in the send: one for each token, and one for the counts.
    fn rows(&self) -> usize {
        self.send.routes.tokens as usize + 1
    }

    /// Enqueues the receive, which ends the call; and the send, in the same launch if possible, if
    /// it has not begun.
    ///
    /// # Errors
    /// Arguments are wrong, or an earlier call has failed.
    ///
    /// # Safety
    /// The stream is of the group's context, and comes after the work of [`begin`](Self::begin).
    /// `outputs` has memory for `slots` rows of each rank for each local expert, or for as many as
    /// [`with_expert_rows`](Self::with_expert_rows) says, which only this call uses until its work
    /// has ended.
    pub unsafe fn receive(mut self, outputs: &DispatchOutput, stream: &Stream) -> Result<Handle> {
        self.group.check_of(self.generation, Phase::Dispatch)?;
        let receive = self.receive_params(outputs)?;
        let rows = receive.expert_rows as usize;
        if !self.is_begun && self.send.in_chunks != 0 {
            // A block for each token and two for each record, if there are so many, so that no
            // block takes its records late because it has sent.
            let (kernel, rows) = (self.group.kernels().fused()?.dispatch, 2 * rows + self.rows());
            let fused = WholeDispatch { send: self.send, receive };
            // SAFETY: the kernel takes this struct; for the rest, as for `begin`.
            unsafe { self.group.launch(stream, (kernel, rows), &fused)? };
        } else {
            if !self.is_begun {
                // SAFETY: the caller guarantees it.
                unsafe { self.begin(stream)? };
            }
            let kernel = self.group.kernels().receive;
            // SAFETY: the kernel takes this struct; for the rest, as for `begin`.
            unsafe { self.group.launch(stream, (kernel, rows), &receive)? };
        }
        let Send { call, routes, .. } = self.send;
        let Self { group, slots, expert_rows, generation, .. } = self;
        Ok(Handle { group, routes, slots, expert_rows, generation, placement: call.placement })
    }

    fn receive_params(&self, outputs: &DispatchOutput) -> Result<Receive> {
        let Self { group, send: Send { call, routes, area, .. }, slots, expert_rows, .. } = self;
        let (call, routes, area, slots) = (*call, *routes, *area, *slots);
        let expert_rows = *expert_rows;
        check_rows("rows", outputs.rows, outputs.stride, area.payload as usize)?;
        if outputs.scales.is_none() && area.scales > 0 {
            return Err(Error::invalid("quantised rows have scales"));
        }
        let (words, [row, expert, word], tile_rows) = match outputs.scales {
            None => (0, [0; 3], 0),
            Some(ScalesOut::Strided { words, row_stride, expert_stride, word_stride }) => {
                (words, [row_stride, expert_stride, word_stride], 0)
            }
            Some(ScalesOut::Tiled { tile_rows, .. }) if tile_rows * TILE < expert_rows => {
                let why = format!("{tile_rows} rows of tiles for {expert_rows} rows of an expert");
                return Err(Error::invalid(why));
            }
            Some(ScalesOut::Tiled { words, tile_rows }) => (words, [0; 3], tile_rows),
        };
        Ok(Receive {
            group: group.params,
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
            src_info: outputs.tables.src_info,
            records: outputs.tables.records,
            layout_range: outputs.tables.layout_range,
            expert_rows: expert_rows as u32,
            slots: slots as u32,
            top_k: routes.top_k,
            local_experts: routes.local_experts,
            tile_rows: tile_rows as u32,
            in_chunks: self.send.in_chunks,
        })
    }
}

impl Handle {
    /// Rows of each local expert.
    #[must_use]
    pub fn expert_rows(&self) -> usize {
        self.expert_rows
    }
}

/// Whether each block of a launch may read all tokens' choices.
fn is_small_batch(tokens: usize, top_k: usize) -> bool {
    tokens <= SMALL_BATCH_TOKENS && tokens * top_k <= SMALL_BATCH_CHOICES
}

/// The kernels' number of a payload's format.
fn format_of(payload: Payload) -> u32 {
    match payload {
        Payload::Bytes(_) => format::BYTES,
        Payload::Quantised(_, ScaleFormat::Exact) => format::FP8,
        Payload::Quantised(_, ScaleFormat::PowerOfTwo) => format::FP8_POWER_OF_TWO,
        Payload::Quantised(_, ScaleFormat::Exponent) => format::FP8_EXPONENT,
        Payload::Nvfp4(..) => format::NVFP4,
    }
}

fn record_of(tokens: &DispatchInput, top_k: usize) -> Result<Record> {
    let record = tokens.payload.record(top_k)?;
    check_rows("rows", tokens.rows, tokens.stride, record.payload)?;
    Ok(record)
}
