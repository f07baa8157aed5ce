//! Normal-mode dispatch: tokens go to the ranks of their experts.

use std::{num::NonZero, sync::Arc, time::Duration};

use uccl_device::cuda::Stream;

use super::memory::{ByExpert, Outputs, Routed, ScalesIn, ScalesOut, Table, Tokens, blocks_for};
use crate::{
    cuda::{
        dispatch::call_of,
        group::Group,
        memory::check_rows,
        params::{self, Layout, NormalReceive, NormalSend, Routes, WholeNormalDispatch, does},
        told::ToldMemory,
    },
    error::{Error, Phase, Result},
    group::Interrupted,
    patience::Patience,
    record::Record,
};

/// A dispatch that was begun.
pub struct Dispatch {
    pub(super) group: Arc<Group>,
    pub(super) send: NormalSend,
    pub(super) record: Record,
    pub(super) slots: usize,
    pub(super) done: Done,
    /// The tables of an earlier dispatch, if tokens go to the same places.
    pub(super) earlier: Option<Told>,
    most_blocks: Option<NonZero<usize>>,
}

/// The work that launches have done for a call.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Done {
    Nothing,
    /// Counts are sent.
    Counts,
    /// Rows are sent too.
    Rows,
}

/// The result of an attempt to receive.
pub struct Tried {
    /// Counts of the tokens that arrive.
    pub counts: Counts,
    /// The dispatch's handle, if there was room for its rows.
    pub handle: Option<Handle>,
}

/// Tables about rows, and the rows' layout.
#[derive(Clone, Copy)]
pub(super) struct Told {
    pub(super) table: Table,
    pub(super) by_expert: Option<ByExpert>,
    /// Rows from a rank's first to the next rank's; 0: without gaps.
    pub(super) spread: usize,
    /// The address of the dispatch's number and place, and of the ranks that it left out.
    pub(super) placed: u64,
}

/// A dispatch's handle, for its combines.
pub struct Handle {
    pub(super) group: Arc<Group>,
    pub(super) routes: Routes,
    pub(super) slots: usize,
    pub(super) told: Told,
}

/// Counts of the tokens that arrive.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Counts {
    /// Tokens that each rank sends to this one.
    pub from: Vec<u32>,
    /// Tokens, of all ranks, that chose each of this rank's experts.
    pub per_expert: Vec<u32>,
}

impl Counts {
    /// Tokens that arrive.
    #[must_use]
    pub fn total(&self) -> usize {
        self.from.iter().map(|count| *count as usize).sum()
    }
}

impl Dispatch {
    /// Enqueues the layout of a rank's tokens, unless there is one, and, where rows are not sent in
    /// parts, the send. No rank has more than `slots`.
    ///
    /// # Errors
    /// Arguments are wrong, or an earlier call has failed.
    ///
    /// # Safety
    /// The stream is of the group's context. `tokens` and `routed` describe memory that the GPU may
    /// read until the dispatch's work has ended. `scratch` has [`Routed::scratch_len`] bytes,
    /// aligned to 8, which only this dispatch uses, for the time documented there. A layout or handle
    /// in `routed` is of this group, and the stream comes after its work.
    pub unsafe fn begin(
        group: &Arc<Group>,
        tokens: &Tokens,
        routed: Routed<'_>,
        slots: usize,
        (scratch, stream): (u64, &Stream),
    ) -> Result<Self> {
        group.check()?;
        let routes = routed.routes(group.ranks(), scratch)?;
        check_rows("rows", tokens.rows, tokens.stride, tokens.payload)?;
        group.check_apart(tokens.rows)?;
        let (scales, most_blocks) = (tokens.scales.unwrap_or(NO_SCALES), tokens.most_blocks);
        let top_k = routes.top_k as usize;
        let record = Record { payload: tokens.payload, scales: scales.count, top_k };
        let (call, area) = call_of(group, &record, &routes, slots, scratch)?;
        let (goes, per_expert) = match &routed {
            Routed::Ranks(given) => (given.goes, given.per_expert),
            Routed::Choices(_) | Routed::LaidOut(_) | Routed::Again(_) => (0, 0),
        };
        let (is_laid_out, earlier) = match &routed {
            Routed::Choices(_) | Routed::Ranks(_) => (false, None),
            Routed::LaidOut(_) => (true, None),
            Routed::Again(handle) => (true, Some(handle.told)),
        };
        let send = NormalSend {
            send: params::Send {
                group: group.params,
                call,
                routes,
                area,
                rows: tokens.rows,
                row_stride: tokens.stride as u64,
                global_scale_at: 0,
                global_scale: 0.0,
                how: params::how::COPIED,
                is_few: 0,
                in_parts: 0,
            },
            scales: scales.words,
            scales_token: scales.token_stride as u64,
            scales_word: scales.word_stride as u64,
            weights: tokens.weights,
        };
        // SAFETY: the kernel takes this struct; the module is never unloaded; the caller guarantees
        // the rest. Windows are open as long as the group lives, and freed when the GPU's work has
        // ended.
        unsafe {
            if !is_laid_out {
                Layout { goes, per_expert, ..Layout::of(group, call, routes) }
                    .launch(group, stream)?;
            }
            if !group.has_whole_calls() {
                let blocks = blocks_for(rows_of(&send), most_blocks);
                group.launch(stream, (group.kernels().normal_send, blocks), &send)?;
            }
        }
        let done = if group.has_whole_calls() { Done::Nothing } else { Done::Rows };
        let group = Arc::clone(group);
        Ok(Self { group, send, record, slots, done, earlier, most_blocks })
    }

    /// Counts of the tokens that arrive. Waits for the earlier work on the stream, and until every
    /// rank has sent its counts, but no longer than `limit`: after that the group is unusable.
    ///
    /// # Errors
    /// A peer is late, or makes another call; or the caller was interrupted.
    ///
    /// # Safety
    /// The stream is of the group's context, and comes after the work of [`begin`](Self::begin).
    pub unsafe fn counts(
        &mut self,
        stream: &Stream,
        limit: Duration,
        is_interrupted: &mut Interrupted<'_>,
    ) -> Result<Counts> {
        let group = &self.group;
        group.check()?;
        let mut told = group.told();
        let count = params::Count {
            send: self.send.send,
            told: told.address(),
            ticket: told.next_ticket(),
            slots: self.slots as u32,
            begins: u32::from(self.done == Done::Nothing),
        };
        // SAFETY: the kernel takes this struct, and the group keeps the report's memory; for the
        // rest, as above.
        unsafe { group.kernels().count.launch(stream, 1, &count)? };
        if self.done == Done::Nothing {
            self.done = Done::Counts;
        }
        let told = wait_for(group, &told, (stream, limit), is_interrupted)?;
        Ok(self.counts_of(&told))
    }

    /// Enqueues the whole call, with outputs of a guessed size, and waits for the counts as
    /// [`counts`](Self::counts) does, while rows are on their way. If all rows fit, they are taken
    /// out, which ends the call; output rows without a token are not written. If they do not fit,
    /// none is taken out, and [`receive`](Self::receive) has to follow, with enough room; also
    /// where one launch cannot do a whole call.
    ///
    /// # Errors
    /// Those of both.
    ///
    /// # Safety
    /// That of both.
    pub unsafe fn try_receive(
        &mut self,
        outputs: &Outputs,
        (stream, limit): (&Stream, Duration),
        is_interrupted: &mut Interrupted<'_>,
    ) -> Result<Tried> {
        if self.done != Done::Nothing {
            // SAFETY: the caller guarantees it.
            let counts = unsafe { self.counts(stream, limit, is_interrupted)? };
            return Ok(Tried { counts, handle: None });
        }
        let group = &self.group;
        group.check()?;
        let (receive, table) = self.receiving(outputs)?;
        let mut told = group.told();
        let to = (told.address(), told.next_ticket());
        // SAFETY: the group keeps the report's memory; for the rest, the caller guarantees it.
        unsafe { self.launch_whole(receive, to, stream)? };
        self.done = Done::Rows;
        let told = wait_for(group, &told, (stream, limit), is_interrupted)?;
        let handle = (told.is_taken != 0).then(|| self.handle(table));
        Ok(Tried { counts: self.counts_of(&told), handle })
    }

    /// Enqueues the receive, which ends the call.
    ///
    /// # Errors
    /// Arguments are wrong, or an earlier call has failed. More tokens, or rows, than `outputs` has
    /// room for fail the call later, as a late peer does.
    ///
    /// # Safety
    /// The stream is of the group's context, and comes after the work of [`begin`](Self::begin).
    /// `outputs` has as much memory as it says, which only this call uses until its work has ended,
    /// except its table, which is kept for the handle.
    pub unsafe fn receive(self, outputs: &Outputs, stream: &Stream) -> Result<Handle> {
        let group = &self.group;
        group.check()?;
        let (receive, told) = self.receiving(outputs)?;
        // SAFETY: the kernels take these structs; for the rest, as above.
        unsafe {
            if group.has_whole_calls() {
                self.launch_whole(receive, (0, 0), stream)?;
            } else {
                let blocks = blocks_for(outputs.len, self.most_blocks);
                group.launch(stream, (group.kernels().normal_receive, blocks), &receive)?;
            }
        }
        Ok(self.handle(told))
    }

    /// Rows from a rank's first to the next rank's, where they stay.
    pub(super) fn spread(&self) -> usize {
        self.record.spread(self.send.send.routes.local_experts as usize, self.slots)
    }

    /// The parameters of the receive, and the tables about the rows.
    fn receiving(&self, outputs: &Outputs) -> Result<(NormalReceive, Told)> {
        let Self { group, send, slots, earlier, .. } = self;
        let params::Send { call, routes, area, .. } = send.send;
        check_rows("rows", outputs.rows, outputs.stride, area.payload as usize)?;
        let len = u32::try_from(outputs.len)
            .map_err(|_| Error::invalid(format!("{} rows are too many", outputs.len)))?;
        let by_expert = outputs.by_expert;
        let spread = if call.stays != 0 { self.spread() } else { 0 };
        let own = outputs.table.map(|table| Told { table, by_expert, spread, placed: call.placed });
        let Some(told) = (*earlier).or(own) else {
            return Err(Error::invalid("a dispatch tells of its rows in a table"));
        };
        if let Some(by_expert) = &told.by_expert {
            by_expert.check(routes.top_k)?;
        }
        let scales = match outputs.scales {
            Some(scales) => scales,
            None if area.scales == 0 => ScalesOut { words: 0, row_stride: 0, word_stride: 0 },
            None => return Err(Error::invalid("rows come with scales")),
        };
        // The tables of an earlier dispatch are not written again.
        let is_new = |address: u64| if earlier.is_none() { address } else { 0 };
        let Told { table, by_expert, spread, .. } = told;
        let receive = NormalReceive {
            group: group.params,
            call,
            area,
            rows: outputs.rows,
            row_stride: outputs.stride as u64,
            scales: scales.words,
            scales_row: scales.row_stride as u64,
            scales_word: scales.word_stride as u64,
            choices: if by_expert.is_none() { outputs.choices } else { 0 },
            weights: outputs.weights,
            src_info: is_new(table.src_info),
            origin: is_new(table.origin),
            starts: is_new(table.starts),
            per_expert: is_new(table.per_expert),
            ends: is_new(by_expert.map_or(0, |rows| rows.ends)),
            metadata: is_new(by_expert.map_or(0, |rows| rows.metadata)),
            len,
            tokens: by_expert.map_or(len, |rows| u32::try_from(rows.tokens).unwrap_or(u32::MAX)),
            slots: *slots as u32,
            top_k: routes.top_k,
            local_experts: routes.local_experts,
            is_64: u32::from(outputs.is_64),
            zeroes_foreign: u32::from(outputs.zeroes_foreign_weights),
            alignment: by_expert.map_or(0, |rows| rows.alignment as u32),
            zeroes_gaps: u32::from(outputs.zeroes_gaps && by_expert.is_some()),
            spread: spread as u32,
        };
        Ok((receive, told))
    }

    /// Launches the remaining phases of a dispatch in one kernel. If `told` is not 0, the kernel
    /// writes the counts there for the host, and `ticket` last.
    ///
    /// # Safety
    /// As for [`receive`](Self::receive).
    unsafe fn launch_whole(
        &self,
        receive: NormalReceive,
        (told, ticket): (u64, u64),
        stream: &Stream,
    ) -> Result<()> {
        let Self { group, send, done, most_blocks, .. } = self;
        let blocks = blocks_for(receive.len as usize + rows_of(send), *most_blocks);
        let does = match done {
            Done::Nothing => does::WHOLE,
            Done::Counts => does::BEGUN,
            Done::Rows => does::TAKEN,
        };
        let whole = WholeNormalDispatch { send: *send, receive, told, ticket, does, zero: 0 };
        // SAFETY: the kernel takes this struct; for the rest, the caller guarantees it.
        unsafe { group.launch(stream, (group.kernels().normal_dispatch, blocks), &whole) }
    }

    fn handle(&self, told: Told) -> Handle {
        let routes = self.send.send.routes;
        Handle { group: Arc::clone(&self.group), routes, slots: self.slots, told }
    }

    fn counts_of(&self, told: &params::Told) -> Counts {
        let local = self.send.send.routes.local_experts as usize;
        Counts {
            from: told.from[..self.group.ranks()].to_vec(),
            per_expert: told.per_expert[..local].to_vec(),
        }
    }
}

/// Items to send: a row for each token, and the counts.
fn rows_of(send: &NormalSend) -> usize {
    send.send.routes.tokens as usize + 1
}

const NO_SCALES: ScalesIn = ScalesIn { words: 0, count: 0, token_stride: 0, word_stride: 0 };

/// Waits for a kernel's report to the host.
fn wait_for(
    group: &Group,
    told: &ToldMemory,
    (stream, limit): (&Stream, Duration),
    is_interrupted: &mut Interrupted<'_>,
) -> Result<params::Told> {
    let mut patience = Patience::new();
    loop {
        if let Some(told) = told.read() {
            return Ok(told);
        }
        let Some(waited) = patience.due() else {
            patience.pause();
            continue;
        };
        group.check()?;
        // A lost context reports nothing any more.
        stream.is_idle()?;
        let is_over = waited > limit;
        if is_over || is_interrupted() {
            // The kernel may still be running: no later call can begin.
            group.interrupt();
            let (phase, rank) = (Phase::Dispatch, group.rank());
            return Err(match is_over {
                true => Error::Overdue { phase, rank, awaited: Vec::new(), waited },
                false => Error::Interrupted,
            });
        }
    }
}
