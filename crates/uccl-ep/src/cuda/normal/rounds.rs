//! Calls of several rounds, where ranks have more tokens than the pool has room for. One call sends
//! the counts of all tokens, and then each round is a call of its own, with the next tokens of each
//! rank. Rows go to their places at once (`kernels/ep/normal/rounds.cuh`).

use std::sync::Arc;

use uccl_device::cuda::Stream;

use super::{
    dispatch::{Dispatch, Handle, Progress},
    memory::{DispatchOutput, ReceivedRows, blocks_for},
};
use crate::{
    cuda::{
        call::dispatch_call,
        group::Group,
        memory::{COMBINE_SCRATCH_LEN, Choices, scratch_len},
        params::{
            self, DispatchRound, Layout, NormalReceive, NormalSend, ReceiveRound, Routes, Totals,
            WholeNormalDispatch, phases,
        },
    },
    shared::error::Result,
};

/// How a call's tokens are cut into rounds: the same on all ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RoundCut {
    /// The most tokens of each rank in a round.
    pub(super) slots: usize,
    /// The number of rounds.
    pub(super) count: usize,
    /// The most tokens of any rank in the call.
    pub(super) most: usize,
}

impl RoundCut {
    /// Rounds of `slots` tokens, for ranks with up to `most`.
    pub(super) fn new(slots: usize, most: usize) -> Self {
        Self { slots, count: most.div_ceil(slots.max(1)).max(1), most }
    }

    /// The tokens of a round, for a rank that has so many.
    fn tokens_of(&self, round: usize, tokens: usize) -> usize {
        tokens.saturating_sub(round * self.slots).min(self.slots)
    }
}

/// A round of a dispatch: the routing of its tokens, and the address of its number and place.
#[derive(Clone, Copy)]
pub(super) struct RoundRoutes {
    pub(super) routes: Routes,
    pub(super) placement: u64,
}

/// The rounds of a handle.
pub(super) struct HandleRounds {
    pub(super) cut: RoundCut,
    pub(super) by_round: Vec<RoundRoutes>,
    tables: RoundTables,
}

/// Tables about the first rows of each round, with an entry more for the rows behind the last one.
#[derive(Clone, Copy)]
struct RoundTables {
    firsts: u64,
    /// Bytes of a round in `firsts`.
    ranks_len: usize,
    /// 0 for rows by token.
    expert_rows: u64,
    /// Bytes of a round in `expert_rows`.
    experts_len: usize,
}

/// The layout of the memory for the rounds of a dispatch, which its handle keeps.
pub(super) struct RoundMemory {
    /// By round: the offset of the placement, and of the routing's tables behind it.
    by_round: Vec<usize>,
    firsts: usize,
    expert_rows: usize,
    /// Bytes of all.
    pub(super) len: usize,
}

impl RoundMemory {
    /// For tokens with these routes.
    pub(super) fn of(cut: &RoundCut, routes: &Routes, ranks: usize, by_expert: bool) -> Self {
        let mut len = 0;
        let mut next = |bytes: usize| {
            let offset = len;
            len += bytes.next_multiple_of(16);
            offset
        };
        let tokens = routes.tokens as usize;
        let by_round = (0..cut.count).map(|round| {
            let keeps_routes = round == 0 && tokens <= cut.slots;
            let own = choices_of(cut, routes, ranks, round);
            next(if keeps_routes { COMBINE_SCRATCH_LEN } else { scratch_len(&own, ranks) })
        });
        let by_round = by_round.collect();
        let firsts = next(4 * ranks * (cut.count + 1));
        let experts = if by_expert { ranks * routes.local_experts as usize } else { 0 };
        let expert_rows = next(4 * experts * (cut.count + 1));
        Self { by_round, firsts, expert_rows, len }
    }
}

/// The choices of a round's tokens.
fn choices_of(cut: &RoundCut, routes: &Routes, ranks: usize, round: usize) -> Choices {
    let tokens = cut.tokens_of(round, routes.tokens as usize);
    let (top_k, is_64) = (routes.top_k as usize, routes.is_64 != 0);
    let len = round * cut.slots * top_k * if is_64 { 8 } else { 4 };
    // No address is behind the last choice.
    let experts = if tokens == 0 { routes.choices } else { routes.choices + len as u64 };
    Choices { experts, is_64, tokens, top_k, num_experts: routes.local_experts as usize * ranks }
}

impl HandleRounds {
    /// The kernels' parameters of a round; the rows' tables are the handle's.
    pub(super) fn params(&self, round: usize, rows: &ReceivedRows) -> params::Round {
        let RoundTables { firsts, ranks_len, expert_rows, experts_len } = self.tables;
        let at = |table: u64, len: usize, round: usize| match table {
            0 => 0,
            table => table + (round * len) as u64,
        };
        params::Round {
            starts: rows.tables.starts,
            per_expert: rows.tables.per_expert,
            firsts: at(firsts, ranks_len, round),
            next_firsts: at(firsts, ranks_len, round + 1),
            expert_rows: at(expert_rows, experts_len, round),
            next_expert_rows: at(expert_rows, experts_len, round + 1),
            first_token: self.first_token(round) as u32,
            most: u32::try_from(self.cut.most).unwrap_or(u32::MAX),
            is_last: u32::from(round + 1 == self.cut.count),
            zero: 0,
        }
    }

    /// The number of a rank's first token in a round.
    pub(super) fn first_token(&self, round: usize) -> usize {
        round * self.cut.slots
    }
}

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
        };
        let most = cut.slots.saturating_mul(cut.count);
        let totals = Totals {
            send: send.send,
            starts: rows.tables.starts,
            per_expert: rows.tables.per_expert,
            ends: by_expert.map_or(0, |layout| layout.ends),
            firsts: tables.firsts,
            expert_rows: tables.expert_rows,
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

    /// Enqueues the layout of a round's tokens.
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
        let (call, _) = dispatch_call(group, record, &routes, cut.slots, scratch)?;
        let (token_in_rank, per_expert) = match token_ranks {
            Some(given) => {
                let first = if own.tokens == 0 { 0 } else { round * cut.slots * ranks };
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
                return group.launch(stream, (kernels.normal_dispatch_round, blocks), &fused);
            }
            group.launch(stream, (kernels.normal_send, blocks_for(sent, most)), &send)?;
            let blocks = blocks_for(received, most);
            let received = ReceiveRound { receive, round };
            group.launch(stream, (kernels.normal_receive_round, blocks), &received)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_have_all_tokens_once() {
        for (slots, most) in [(1, 1), (3, 7), (4, 8), (7, 6), (65_535, 65_536), (5, 0)] {
            let cut = RoundCut::new(slots, most);
            for tokens in [0, most.min(1), most / 2, most] {
                let of = |round| cut.tokens_of(round, tokens);
                assert_eq!((0..cut.count).map(of).sum::<usize>(), tokens.min(most), "{cut:?}");
                assert!((0..cut.count).all(|round| of(round) <= slots), "{cut:?}");
            }
            let is_needed = cut.count == 1 || cut.tokens_of(cut.count - 1, most) > 0;
            assert!(is_needed, "{cut:?}: no rank has tokens in the last round");
        }
    }
}
