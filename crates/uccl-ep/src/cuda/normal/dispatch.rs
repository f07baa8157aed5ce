//! Normal-mode dispatch: tokens go to the ranks of their experts.

use std::{num::NonZero, sync::Arc, time::Duration};

use uccl_device::cuda::Stream;

use super::{
    memory::{DispatchInput, DispatchOutput, Launch, ReceivedRows, blocks_for},
    rounds::HandleRounds,
    routing::{Routing, TokenRanks},
    row_layout::{ReceiveCounts, RowLayout},
};
use crate::{
    cuda::{
        call::{check_slots, counts_call},
        group::Group,
        mailbox::{CountsMailbox, Ticket},
        memory::check_rows,
        params::{
            self, Layout, NormalReceive, NormalSend, Recount, Routes, WholeNormalDispatch, phases,
        },
    },
    host::group::InterruptCheck,
    shared::{
        backoff::Backoff,
        error::{Error, Phase, Result},
        record::Record,
    },
};

/// A dispatch that was begun.
pub struct Dispatch {
    pub(super) group: Arc<Group>,
    pub(super) send: NormalSend,
    pub(super) record: Record,
    pub(super) slots: usize,
    pub(super) progress: Progress,
    /// The tables of an earlier dispatch, if tokens go to the same places.
    pub(super) cached: Option<ReceivedRows>,
    /// The rounds of that dispatch, if it had several.
    pub(super) cached_rounds: Option<Arc<HandleRounds>>,
    /// The ranks of tokens without choices.
    pub(super) token_ranks: Option<TokenRanks>,
    pub(super) max_blocks: Option<NonZero<usize>>,
    /// The group's generation when it was begun.
    generation: u32,
}

/// The work that launches have done for a call.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    Nothing,
    /// Counts are sent.
    Counts,
    /// Rows are sent too.
    Rows,
}

/// The result of an attempt to receive.
pub struct ReceiveAttempt {
    /// Counts of the tokens that arrive.
    pub counts: ReceiveCounts,
    /// The dispatch's handle, if there was room for its rows.
    pub handle: Option<Handle>,
}

/// A dispatch's handle, for its combines.
pub struct Handle {
    pub(super) group: Arc<Group>,
    pub(super) routes: Routes,
    pub(super) slots: usize,
    pub(super) rows: ReceivedRows,
    /// The layout of the rows, with counts if the host has them.
    pub(super) row_layout: RowLayout,
    /// Whether the host has waited for the counts of this dispatch.
    pub(super) is_counted: bool,
    /// The group's generation at the dispatch.
    pub(super) generation: u32,
    /// The rounds of the dispatch, if it had several.
    pub(super) rounds: Option<Arc<HandleRounds>>,
}

impl Handle {
    /// The layout of the received rows; an upper bound if the host has no counts.
    #[must_use]
    pub fn row_layout(&self) -> &RowLayout {
        &self.row_layout
    }

    /// The most tokens of any rank in the dispatch.
    #[must_use]
    pub fn max_tokens(&self) -> usize {
        self.rounds.as_ref().map_or(self.slots, |rounds| rounds.cut.most)
    }

    /// The layout of rows for a dispatch with this handle: the handle's, unless the host has to
    /// wait for the counts of rows.
    pub(super) fn layout_of_next(&self, needs_counts: bool) -> Option<RowLayout> {
        let RowLayout { tokens, alignment, rows, is_view, .. } = self.row_layout;
        let is_known = self.is_counted || is_view || !needs_counts;
        is_known.then(|| RowLayout { alignment, rows, ..RowLayout::by_token(tokens) })
    }
}

impl Dispatch {
    /// Enqueues the layout of a rank's tokens, unless there is one, and, where rows are not sent in
    /// chunks, the send. No rank has more than `slots`.
    ///
    /// # Errors
    /// Arguments are wrong, or an earlier call has failed.
    ///
    /// # Safety
    /// The stream is of the group's context. `tokens` and `routing` describe memory that the GPU
    /// may read until the dispatch's work has ended. `scratch` has [`Routing::scratch_len`] bytes,
    /// aligned to 8, which only this dispatch uses, for the time documented there. A layout or
    /// handle in `routing` is of this group, and the stream comes after its work.
    pub unsafe fn begin(
        group: &Arc<Group>,
        tokens: &DispatchInput,
        routing: Routing<'_>,
        slots: usize,
        launch: Launch<'_>,
    ) -> Result<Self> {
        check_slots(routing.tokens(), slots)?;
        // SAFETY: the caller guarantees it.
        let mut dispatch = unsafe { Self::lay_out(group, tokens, routing, slots, launch) }?;
        if !group.can_fuse() {
            let blocks = blocks_for(rows_of(&dispatch.send), dispatch.max_blocks);
            let kernel = group.kernels().normal_send;
            // SAFETY: the kernel takes this struct; for the rest, the caller guarantees it.
            unsafe { group.launch(launch.stream, (kernel, blocks), &dispatch.send)? };
            dispatch.progress = Progress::Rows;
        }
        Ok(dispatch)
    }

    /// Enqueues the layout of any number of tokens, unless there is one. Nothing is sent yet.
    ///
    /// # Errors
    /// As for [`begin`](Self::begin), but for the number of tokens.
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn lay_out(
        group: &Arc<Group>,
        tokens: &DispatchInput,
        routing: Routing<'_>,
        slots: usize,
        Launch { stream, scratch }: Launch<'_>,
    ) -> Result<Self> {
        let generation = routing.generation().unwrap_or_else(|| group.generation());
        group.check_of(generation, Phase::Dispatch)?;
        let routes = routing.routes(group.ranks(), scratch)?;
        check_rows("rows", tokens.rows, tokens.stride, tokens.payload)?;
        group.check_outside_pool(tokens.rows)?;
        let (scales, max_blocks) = (tokens.scale_count(), tokens.max_blocks);
        let top_k = routes.top_k as usize;
        let record = Record { payload: tokens.payload, scales, top_k };
        let (call, area) = counts_call(group, &record, &routes, slots, scratch)?;
        let token_ranks = match &routing {
            Routing::Ranks(given) => Some(*given),
            Routing::Choices(_) | Routing::Layout(_) | Routing::Cached(_) => None,
        };
        let (is_laid_out, cached) = match &routing {
            Routing::Choices(_) | Routing::Ranks(_) => (false, None),
            Routing::Layout(_) => (true, None),
            Routing::Cached(handle) => (true, Some(*handle)),
        };
        let send = tokens.params(params::Send {
            group: group.params,
            call,
            routes,
            area,
            rows: 0,
            row_stride: 0,
            global_scale_at: 0,
            global_scale: 0.0,
            format: params::format::BYTES,
            is_small_batch: 0,
            in_chunks: 0,
        });
        // SAFETY: the kernel takes this struct; the module is never unloaded; the caller guarantees
        // the rest. Windows are open as long as the group lives, and freed when the GPU's work has
        // ended.
        unsafe {
            if !is_laid_out {
                let token_in_rank = token_ranks.map_or(0, |given| given.token_in_rank);
                let per_expert = token_ranks.map_or(0, |given| given.per_expert);
                Layout { token_in_rank, per_expert, ..Layout::of(group, call, routes) }
                    .launch(group, stream)?;
            }
        }
        Ok(Self {
            group: Arc::clone(group),
            send,
            record,
            slots,
            progress: Progress::Nothing,
            cached: cached.map(|handle| handle.rows),
            cached_rounds: cached.and_then(|handle| handle.rounds.clone()),
            token_ranks,
            max_blocks,
            generation,
        })
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
        is_interrupted: &mut InterruptCheck<'_>,
    ) -> Result<ReceiveCounts> {
        let group = &self.group;
        group.check_of(self.generation, Phase::Dispatch)?;
        let mut mailbox = group.mailbox();
        let ticket = mailbox.next_ticket();
        let count = params::Count {
            send: self.send.send,
            mailbox: ticket.mailbox,
            ticket: ticket.number,
            slots: self.slots as u32,
            begins: u32::from(self.progress == Progress::Nothing),
        };
        // SAFETY: the kernel takes this struct, and the group keeps the report's memory; for the
        // rest, as above.
        unsafe { group.kernels().count.launch(stream, 1, &count)? };
        if self.progress == Progress::Nothing {
            self.progress = Progress::Counts;
        }
        let report = wait_for(group, &mailbox, stream, limit, is_interrupted)?;
        Ok(self.counts_of(&report))
    }

    /// The counts of the handle that this dispatch uses. Waits for the earlier work on the stream,
    /// as [`counts`](Self::counts) does, and makes no call.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn recount(
        &self,
        stream: &Stream,
        limit: Duration,
        is_interrupted: &mut InterruptCheck<'_>,
    ) -> Result<ReceiveCounts> {
        let group = &self.group;
        let Some(rows) = &self.cached else {
            return Err(Error::invalid("a dispatch without a handle counts in a call"));
        };
        let mut mailbox = group.mailbox();
        let ticket = mailbox.next_ticket();
        let recount = Recount {
            group: group.params,
            starts: rows.tables.starts,
            per_expert: rows.tables.per_expert,
            mailbox: ticket.mailbox,
            ticket: ticket.number,
            local_experts: self.send.send.routes.local_experts,
            zero: 0,
        };
        // SAFETY: the kernel takes this struct, and the group keeps the report's memory; for the
        // rest, the caller guarantees it.
        unsafe { group.kernels().normal_recount.launch(stream, 1, &recount)? };
        let report = wait_for(group, &mailbox, stream, limit, is_interrupted)?;
        Ok(self.counts_of(&report))
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
        outputs: &DispatchOutput,
        stream: &Stream,
        limit: Duration,
        is_interrupted: &mut InterruptCheck<'_>,
    ) -> Result<ReceiveAttempt> {
        if self.progress != Progress::Nothing {
            // SAFETY: the caller guarantees it.
            let counts = unsafe { self.counts(stream, limit, is_interrupted)? };
            return Ok(ReceiveAttempt { counts, handle: None });
        }
        let group = &self.group;
        group.check_of(self.generation, Phase::Dispatch)?;
        let (receive, tables) = self.receive_params(outputs)?;
        let mut mailbox = group.mailbox();
        let ticket = mailbox.next_ticket();
        // SAFETY: the group keeps the report's memory; for the rest, the caller guarantees it.
        unsafe { self.launch_fused(receive, ticket, stream)? };
        self.progress = Progress::Rows;
        let report = wait_for(group, &mailbox, stream, limit, is_interrupted)?;
        let handle = (report.is_taken != 0).then(|| self.handle(tables, outputs.len));
        Ok(ReceiveAttempt { counts: self.counts_of(&report), handle })
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
    /// except its tables, which are kept for the handle.
    pub unsafe fn receive(self, outputs: &DispatchOutput, stream: &Stream) -> Result<Handle> {
        let group = &self.group;
        group.check_of(self.generation, Phase::Dispatch)?;
        let (receive, rows) = self.receive_params(outputs)?;
        // SAFETY: the kernels take these structs; for the rest, as above.
        unsafe {
            if group.can_fuse() {
                self.launch_fused(receive, Ticket::default(), stream)?;
            } else {
                let blocks = blocks_for(outputs.len, self.max_blocks);
                group.launch(stream, (group.kernels().normal_receive, blocks), &receive)?;
            }
        }
        Ok(self.handle(rows, outputs.len))
    }

    /// Rows from a rank's first to the next rank's, in the pool.
    pub(super) fn spread(&self) -> usize {
        self.record.spread(self.send.send.routes.local_experts as usize, self.slots)
    }

    /// The parameters of the receive, and the tables about the rows.
    pub(super) fn receive_params(
        &self,
        outputs: &DispatchOutput,
    ) -> Result<(NormalReceive, ReceivedRows)> {
        let Self { send, slots, cached, .. } = self;
        let params::Send { call, routes, area, .. } = send.send;
        check_rows("rows", outputs.rows, outputs.stride, area.payload as usize)?;
        let by_expert = outputs.by_expert;
        let spread = if call.zero_copy != 0 { self.spread() } else { 0 };
        let own = outputs.tables.map(|tables| ReceivedRows {
            tables,
            by_expert,
            spread,
            placement: call.placement,
        });
        let Some(rows) = (*cached).or(own) else {
            return Err(Error::invalid("a dispatch tells of its rows in a table"));
        };
        if let Some(by_expert) = &rows.by_expert {
            by_expert.check(routes.top_k)?;
        }
        let receive = outputs.params(&send.send, &rows, cached.is_some(), *slots)?;
        Ok((receive, rows))
    }

    /// Launches the remaining phases of a dispatch in one kernel. With a ticket for a mailbox, the
    /// kernel writes the counts there for the host.
    ///
    /// # Safety
    /// As for [`receive`](Self::receive).
    unsafe fn launch_fused(
        &self,
        receive: NormalReceive,
        ticket: Ticket,
        stream: &Stream,
    ) -> Result<()> {
        let Self { group, send, progress, max_blocks, .. } = self;
        let blocks = blocks_for(receive.len as usize + rows_of(send), *max_blocks);
        let phases = match progress {
            Progress::Nothing => phases::ALL,
            Progress::Counts => phases::AFTER_COUNTS,
            Progress::Rows => phases::RECEIVE,
        };
        let Ticket { mailbox, number: ticket } = ticket;
        let fused = WholeNormalDispatch { send: *send, receive, mailbox, ticket, phases, zero: 0 };
        let kernel = group.kernels().fused()?.normal_dispatch;
        // SAFETY: the kernel takes this struct; for the rest, the caller guarantees it.
        unsafe { group.launch(stream, (kernel, blocks), &fused) }
    }

    /// The handle of rows that are in an output of `len` rows.
    pub(super) fn handle(&self, rows: ReceivedRows, len: usize) -> Handle {
        let params::Send { call, routes, .. } = self.send.send;
        let row_layout = RowLayout {
            tokens: rows.by_expert.map_or(len, |layout| layout.tokens),
            alignment: rows.by_expert.map(|layout| layout.alignment),
            rows: rows.by_expert.map(|_| len),
            min_combine_rows: 0,
            is_view: call.zero_copy != 0,
        };
        let (group, slots, generation) = (Arc::clone(&self.group), self.slots, self.generation);
        Handle {
            group,
            routes,
            slots,
            rows,
            row_layout,
            is_counted: false,
            generation,
            rounds: None,
        }
    }

    fn counts_of(&self, report: &params::HostMailbox) -> ReceiveCounts {
        let local = self.send.send.routes.local_experts as usize;
        ReceiveCounts {
            per_rank: report.from[..self.group.ranks()].to_vec(),
            per_expert: report.per_expert[..local].to_vec(),
            most_tokens: report.most_tokens as usize,
        }
    }
}

/// Items to send: a row for each token, and the counts.
fn rows_of(send: &NormalSend) -> usize {
    send.send.routes.tokens as usize + 1
}

/// Waits for a kernel's report to the host.
fn wait_for(
    group: &Group,
    mailbox: &CountsMailbox,
    stream: &Stream,
    limit: Duration,
    is_interrupted: &mut InterruptCheck<'_>,
) -> Result<params::HostMailbox> {
    let mut backoff = Backoff::new();
    loop {
        if let Some(report) = mailbox.read() {
            return Ok(report);
        }
        let Some(waited) = backoff.due() else {
            backoff.pause();
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
