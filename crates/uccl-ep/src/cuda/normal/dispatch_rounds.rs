//! Dispatches in rounds.

use std::sync::Arc;

use uccl_device::cuda::Stream;

use super::{
    dispatch::{Dispatch, Handle, Progress},
    memory::{DispatchOutput, ReceivedRows, blocks_for},
    rounds::{HandleRounds, RoundCut, RoundMemory, RoundRoutes, RoundTables, choices_of},
};
use crate::{
    cuda::{
        call::dispatch_call,
        group::Group,
        params::{
            self, DispatchRound, Layout, NormalReceive, NormalSend, ReceiveRound, Routes, Totals,
            WholeNormalDispatch, phases,
        },
    },
    shared::error::Result,
};

/// A round that is sent and received.
struct RoundCall {
    send: NormalSend,
    receive: NormalReceive,
    round: params::Round,
}

impl Dispatch {
    /// Bytes of the memory for the rounds of this dispatch, which its handle keeps.
    pub(super) fn rounds_len(&self, cut: &RoundCut, by_expert: bool) -> usize {
        if self.cached_rounds.is_some() {
            return 0;
        }
        RoundMemory::of(cut, &self.send.send.routes, self.group.ranks(), by_expert).len
    }

    /// Enqueues the rest of a call in rounds: the counts of all tokens, and then all rounds.
    /// Records that the call has sent before are not used.
    ///
    /// # Errors
    /// As for [`receive`](Self::receive).
    ///
    /// # Safety
    /// As there. `memory` has [`rounds_len`](Self::rounds_len) bytes, aligned to 16, which are kept
    /// for the handle.
    pub(super) unsafe fn receive_in_rounds(
        self,
        cut: RoundCut,
        (outputs, memory): (&DispatchOutput, u64),
        stream: &Stream,
    ) -> Result<Handle> {
        self.group.check()?;
        let (receive, rows) = self.receive_params(outputs)?;
        let rounds = match &self.cached_rounds {
            Some(rounds) => Arc::clone(rounds),
            // SAFETY: the caller guarantees it.
            None => Arc::new(unsafe { self.begin_rounds(cut, (&receive, &rows), memory, stream) }?),
        };
        for round in 0..rounds.cut.count {
            // SAFETY: the caller guarantees it.
            unsafe { self.send_round(&rounds, round, (&receive, &rows), stream) }?;
        }
        let handle = self.handle(rows, outputs.len);
        Ok(Handle { rounds: Some(rounds), ..handle })
    }

    /// Enqueues the call with the counts of all tokens, and the layouts of the rounds' tokens.
    ///
    /// # Safety
    /// As for [`receive_in_rounds`](Self::receive_in_rounds).
    unsafe fn begin_rounds(
        &self,
        cut: RoundCut,
        (receive, rows): (&NormalReceive, &ReceivedRows),
        memory: u64,
        stream: &Stream,
    ) -> Result<HandleRounds> {
        let Self { group, send, .. } = self;
        let (ranks, routes, by_expert) = (group.ranks(), send.send.routes, rows.by_expert);
        let layout = RoundMemory::of(&cut, &routes, ranks, by_expert.is_some());
        let at = |offset: usize| memory + offset as u64;
        let tables = RoundTables {
            firsts: at(layout.firsts),
            ranks_len: 4 * ranks,
            expert_rows: if by_expert.is_some() { at(layout.expert_rows) } else { 0 },
            experts_len: 4 * ranks * routes.local_experts as usize,
            tokens: at(layout.tokens),
        };
        let most = cut.slots.saturating_mul(cut.count);
        let totals = Totals {
            send: send.send,
            starts: rows.tables.starts,
            per_expert: rows.tables.per_expert,
            ends: by_expert.map_or(0, |layout| layout.ends),
            firsts: tables.firsts,
            expert_rows: tables.expert_rows,
            round_tokens: tables.tokens,
            len: receive.len,
            tokens: receive.tokens,
            most: u32::try_from(most).unwrap_or(u32::MAX),
            alignment: receive.alignment,
            begins: u32::from(self.progress == Progress::Nothing),
            zero: 0,
        };
        // SAFETY: the kernel takes this struct; for the rest, the caller guarantees it.
        unsafe { group.kernels().normal_totals.launch(stream, 1, &totals)? };
        let mut by_round = Vec::with_capacity(cut.count);
        for (round, offset) in layout.by_round.iter().enumerate() {
            let placement = at(*offset);
            let routes = match round == 0 && routes.tokens as usize <= cut.slots {
                true => routes,
                // SAFETY: the caller guarantees it.
                false => unsafe { self.lay_out_round(&cut, round, placement, stream) }?,
            };
            by_round.push(RoundRoutes { routes, placement });
        }
        Ok(HandleRounds { cut, by_round, tables })
    }

    /// Enqueues the layout of a round's tokens, if it has any.
    ///
    /// # Safety
    /// As for [`receive_in_rounds`](Self::receive_in_rounds).
    unsafe fn lay_out_round(
        &self,
        cut: &RoundCut,
        round: usize,
        scratch: u64,
        stream: &Stream,
    ) -> Result<Routes> {
        let Self { group, send, record, token_ranks, .. } = self;
        let ranks = group.ranks();
        let own = choices_of(cut, &send.send.routes, ranks, round);
        let routes = own.routes(ranks, scratch);
        if own.tokens == 0 {
            return Ok(routes);
        }
        let (call, _) = dispatch_call(group, record, &routes, cut.slots, scratch)?;
        let (token_in_rank, per_expert) = match token_ranks {
            Some(given) => {
                let first = round * cut.slots * ranks;
                (given.token_in_rank + first as u64, given.per_expert)
            }
            None => (0, 0),
        };
        let layout = Layout { token_in_rank, per_expert, ..Layout::of(group, call, routes) };
        // SAFETY: the caller guarantees it.
        unsafe { layout.launch(group, stream)? };
        Ok(routes)
    }

    /// Enqueues a round.
    ///
    /// # Safety
    /// As for [`receive_in_rounds`](Self::receive_in_rounds).
    unsafe fn send_round(
        &self,
        rounds: &HandleRounds,
        round: usize,
        (receive, rows): (&NormalReceive, &ReceivedRows),
        stream: &Stream,
    ) -> Result<()> {
        let Self { group, record, .. } = self;
        let RoundRoutes { routes, placement } = rounds.by_round[round];
        // A dispatch with a handle leaves the handle's placements as they are.
        let placement = match &self.cached_rounds {
            Some(_) => self.send.send.call.placement,
            None => placement,
        };
        let (call, area) = dispatch_call(group, record, &routes, rounds.cut.slots, placement)?;
        let first = rounds.first_token(round) as u64;
        let send =
            self.send.starting_at(first, params::Send { call, area, routes, ..self.send.send });
        let send = NormalSend { round_tokens: rounds.tables.tokens, ..send };
        let receive = NormalReceive { call, area, slots: rounds.cut.slots as u32, ..*receive };
        let of = RoundCall { send, receive, round: rounds.params(round, rows) };
        // SAFETY: the caller guarantees it.
        unsafe { self.launch_round(group, of, stream) }
    }

    /// Launches a round, in one kernel or two.
    ///
    /// # Safety
    /// As for [`receive_in_rounds`](Self::receive_in_rounds).
    unsafe fn launch_round(&self, group: &Group, of: RoundCall, stream: &Stream) -> Result<()> {
        let RoundCall { send, receive, round } = of;
        let (kernels, most) = (group.kernels(), self.max_blocks);
        let sent = send.send.routes.tokens as usize + 1;
        let received = (receive.len as usize).min(group.ranks() * receive.slots as usize);
        // SAFETY: the kernels take these structs; for the rest, the caller guarantees it.
        unsafe {
            if group.can_fuse() {
                let (mailbox, ticket, phases) = (0, 0, phases::ALL);
                let whole = WholeNormalDispatch { send, receive, mailbox, ticket, phases, zero: 0 };
                let blocks = blocks_for(sent + received, most);
                let fused = DispatchRound { whole, round };
                let kernel = kernels.fused()?.normal_dispatch_round;
                return group.launch(stream, (kernel, blocks), &fused);
            }
            group.launch(stream, (kernels.normal_send, blocks_for(sent, most)), &send)?;
            let blocks = blocks_for(received, most);
            let received = ReceiveRound { receive, round };
            group.launch(stream, (kernels.normal_receive_round, blocks), &received)
        }
    }
}
