//! Combine: the experts' rows come back and are summed.

mod peer_blocks;
mod relay;

use std::{slice, sync::Arc, time::Duration};

use smallvec::SmallVec;

pub use self::relay::slots_of;
use self::{
    peer_blocks::{PeerBlocks, block_with, is_read},
    relay::RelayLayout,
};
use crate::{
    host::{
        blocks::Block,
        dispatch::{Handle, Room},
        group::{CallGuard, Group, InterruptCheck, Milestone, WaitContext},
        wait_times::WaitTimes,
    },
    numerics::{logfmt, quantise::GROUP, sum},
    shared::{
        error::{Error, Phase, Result},
        header::Header,
        nodes::Nodes,
        protocol::{Call, ReceiveMode, Step, Stream},
        record::Row,
        routing::{MAX_TOP_K, first_of},
    },
};

/// The rows that a rank sends back for each token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CombineRows {
    /// The token's one row.
    Row,
    /// Its row of each expert.
    EachExpert,
    /// The sum of its rows of all experts of this rank, in order of choice, rounded to bf16.
    SumOfExperts,
}

/// The order in which a token's returned rows are summed. Each sum is made in f32 and rounded once.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum SumOrder {
    /// Rank by rank, ascending. Weights are summed too.
    ByRank,
    /// Choice by choice. A rank's one row counts as the last of its choices. Weights are those of
    /// the choice's rank.
    ByChoice,
    /// Each choice multiplied by its weight, one for each choice of each token: rank by rank, in
    /// the order of their first choices. The choices of one rank are summed first, one by one, and
    /// this part is added.
    Weighted(*const f32),
}

/// The order in which a node's relay sums the rows of its ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// Rank by rank, ascending. Weights are summed too.
    ByRank,
    /// By the last of each rank's choices. Weights are those of the choice's rank.
    ByChoice,
}

/// Rows of bf16 that go back.
#[derive(Clone, Copy, Debug)]
pub struct CombineInput {
    /// The first row.
    pub rows: *const u8,
    /// The number of rows.
    pub len: usize,
    /// Bytes from one row to the next.
    pub stride: usize,
    /// Values of a row.
    pub hidden: usize,
    /// The rows that are sent.
    pub sends: CombineRows,
    /// Weights that go back too: one for each choice of each row; or, where rows are by expert, one
    /// for each row.
    pub weights: Option<*const f32>,
    /// Whether rows are packed as LogFMT-10 in transit.
    pub is_packed: bool,
    /// Whether, after a dispatch with relays, a node's rows of a token are summed at its relay and
    /// rounded to bf16, and only this sum crosses to the other node; in this order, which the sum
    /// of nodes has too. `None`: every row goes all the way.
    pub relays: Option<Order>,
    /// Whether rows do not change until the combine has ended: this rank's own tokens are then
    /// summed from them, and peers read rows in a [`Block`] in place.
    pub is_stable: bool,
}

/// Choices given to a combine: one for each choice of each token.
#[derive(Clone, Copy, Debug)]
pub enum CombineChoices {
    /// Of 32 bits.
    I32(*const i32),
    /// Of 64 bits.
    I64(*const i64),
}

impl CombineChoices {
    /// # Safety
    /// There is a choice `at`.
    unsafe fn is_none(self, at: usize) -> bool {
        // SAFETY: the caller guarantees it.
        unsafe {
            match self {
                Self::I32(all) => all.add(at).read() < 0,
                Self::I64(all) => all.add(at).read() < 0,
            }
        }
    }
}

/// Memory for the sums.
#[derive(Clone, Copy, Debug)]
pub struct CombineOutput {
    /// The first row of bf16; rows are contiguous.
    pub rows: *mut u16,
    /// The order of the sums.
    pub sums: SumOrder,
    /// Up to two first addends of each sum, with a row for each token.
    pub bias: [Option<*const u16>; 2],
    /// Weights: one for each choice of each token.
    pub weights: Option<*mut f32>,
}

/// A combine in flight. A drop before its end gives the call up, and tells the peers that wait for
/// it.
pub struct Combine {
    context: CombineContext,
    call: Call,
    guard: CallGuard,
    wait_times: WaitTimes,
    /// Whether the end waits for the peers that read this rank's block.
    waits_for_readers: bool,
}

/// The rows that this rank sends back, and the layout of a place.
struct CombineContext {
    handle: Arc<Handle>,
    input: CombineInput,
    row: Row,
    /// The layout of a place, if rows are relayed.
    relay_layout: Option<RelayLayout>,
    /// The block from which peers read rows in place.
    block: Option<Arc<Block>>,
    /// Tokens of each rank that have rows in its place at once.
    tokens_per_round: usize,
    /// Choices that sums leave out.
    given_choices: Option<CombineChoices>,
}

// SAFETY: any thread may use the memory behind its pointers, as `Combine::begin` demands.
unsafe impl Send for CombineContext {}

impl Combine {
    /// Begins to send rows back to the ranks of their tokens. Where all fit at once
    /// ([`Room::Tokens`]), they have been sent when this returns.
    ///
    /// # Errors
    /// Arguments are wrong, or a peer is late.
    ///
    /// # Safety
    /// `input` describes memory with the rows and weights of `handle`, which any thread may read,
    /// until this returns or, in rounds and with `is_stable`, until the combine is over or dropped.
    pub unsafe fn begin(
        handle: &Arc<Handle>,
        input: CombineInput,
        is_interrupted: &mut InterruptCheck<'_>,
    ) -> Result<Self> {
        let (group, routing) = (&handle.group, &handle.routing);
        group.check_is_last(Phase::Combine)?;
        check(handle, &input)?;
        let (ranks, top_k) = (group.ranks(), routing.top_k());
        let CombineInput { hidden, sends, weights, is_packed, .. } = input;
        let relay_layout = RelayLayout::of(handle, &input)?;
        let values = if is_packed { logfmt::max_len(hidden) } else { 2 * hidden };
        let weights = weights.map_or(0, |_| top_k);
        // Where every row goes all the way, a place may be smaller. All ranks come to the same
        // result.
        let relay_layout = relay_layout.filter(|relay_layout| match handle.room {
            Room::Tokens(tokens) => {
                Row { values, weights, slots: relay_layout.slots() }.place(tokens)
                    <= group.pool_len()
            }
            Room::Bytes(_) => true,
        });
        let slots = match (&relay_layout, sends) {
            (Some(relay_layout), _) => relay_layout.slots(),
            (None, CombineRows::EachExpert) => top_k,
            (None, CombineRows::Row | CombineRows::SumOfExperts) => {
                slots_of(Nodes::one(ranks), top_k)
            }
        };
        let row = Row { values, weights, slots };
        let (tokens_per_round, len) = match handle.room {
            Room::Tokens(tokens) => (tokens, row.place(tokens)),
            Room::Bytes(len) => (row.tokens_in(len), len),
        };
        let rounds_of = |tokens: usize| tokens.div_ceil(tokens_per_round.max(1));
        let most = handle.counts.tokens_of.iter().max().map_or(0, |most| *most as usize);
        if tokens_per_round == 0 && most > 0 || u16::try_from(rounds_of(most)).is_err() {
            let why = format!(
                "{most} tokens do not come back in {:?}; make the buffer larger",
                handle.room
            );
            return Err(Error::invalid(why));
        }
        let place = group.place(len)?;
        let nodes =
            relay_layout.as_ref().map_or(Nodes::one(ranks), |relay_layout| relay_layout.nodes);
        let rounds =
            |stream: &Stream| rounds_of(handle.counts.tokens_of[stream.owner] as usize) as u16;
        let mut participants = group.participants(nodes);
        // A rank that the dispatch left out has no rows of this rank's tokens, nor this rank of its
        // tokens.
        let both = participants.is_there.iter_mut().zip(&handle.sent_to);
        both.for_each(|(is_there, sent)| *is_there &= sent);
        let call = Call::new(place, ReceiveMode::AllStreams, participants, rounds);
        let guard = CallGuard::new(group, &call);
        let block = block_with(group, &input);
        if let Some(block) = &block {
            group.note_reading(block, call.number());
        }
        let block = block.filter(|_| is_read(group, &input, relay_layout.as_ref()));
        let (handle, given_choices) = (Arc::clone(handle), None);
        let context = CombineContext {
            handle,
            input,
            row,
            relay_layout,
            block,
            tokens_per_round,
            given_choices,
        };
        let wait_times = WaitTimes::new(ranks);
        let mut combine = Self { context, call, guard, wait_times, waits_for_readers: true };
        if matches!(combine.context.handle.room, Room::Tokens(_)) {
            combine.drive(Milestone::AllSent, is_interrupted, &mut |_, _, _| Ok(()))?;
        }
        Ok(combine)
    }

    /// Lets the call end without a wait for peers that read this rank's rows in a block: the next
    /// writer there waits for [`Group::is_read`].
    pub fn leave_rows(&mut self) {
        self.waits_for_readers = false;
    }

    /// Leaves choices that are negative here out of sums of [each
    /// expert](CombineRows::EachExpert)'s rows, though the dispatch had them.
    ///
    /// # Safety
    /// There is a number for each choice of each token, which may be read until the combine is over
    /// or dropped.
    pub unsafe fn leave_out(&mut self, given_choices: CombineChoices) {
        self.context.given_choices = Some(given_choices);
    }

    /// Sums the returned rows, and ends the call. Then no peer reads this rank's rows any more,
    /// unless [`leave_rows`](Self::leave_rows) was called. Returns, by rank, the time spent waiting
    /// for its rows.
    ///
    /// # Errors
    /// A peer is late, or combines something else.
    ///
    /// # Safety
    /// `combined` has memory for each of this rank's tokens, which only this call uses.
    pub unsafe fn finish(
        mut self,
        combined: CombineOutput,
        is_interrupted: &mut InterruptCheck<'_>,
    ) -> Result<Vec<Duration>> {
        self.context.check_order(combined.sums)?;
        let mut scratch = vec![0; self.context.scratch_len()];
        if self.context.block.is_some() && self.waits_for_readers {
            self.call.wait_for_readers();
        }
        self.drive(Milestone::Over, is_interrupted, &mut |context, call, round| {
            let peer_blocks = PeerBlocks::of(context, call)?;
            let tokens = context.handle.routing.tokens();
            let first = usize::from(round) * context.tokens_per_round;
            for token in first..tokens.min(first + context.tokens_per_round) {
                // SAFETY: the caller guarantees it.
                unsafe {
                    match &context.relay_layout {
                        None => {
                            context.sum((call, &peer_blocks), token, &combined, &mut scratch)?
                        }
                        Some(relay_layout) => {
                            context.sum_nodes(relay_layout, call, token, &combined, &mut scratch)
                        }
                    }
                }
            }
            Ok(())
        })?;
        self.guard.has_ended = true;
        Ok(self.wait_times.waited())
    }

    fn drive(
        &mut self,
        until: Milestone,
        is_interrupted: &mut InterruptCheck<'_>,
        take: &mut TakeRound<'_>,
    ) -> Result<()> {
        let Self { context, call, wait_times, .. } = self;
        let wait_times = (until != Milestone::AllSent).then_some(wait_times);
        let mut wait = WaitContext { phase: Phase::Combine, is_interrupted, wait_times };
        context.group().drive(call, until, &mut wait, |call, step| match step {
            Step::Send { stream, mark } => {
                context.send(call, &stream, mark.round);
                Ok(())
            }
            Step::Take { round, .. } => take(context, call, round),
            Step::Relay { stream, mark } => context.relay(call, &stream, mark),
            Step::SetTaken { .. } => Ok(()),
        })
    }
}

impl CombineContext {
    fn group(&self) -> &Group {
        &self.handle.group
    }

    fn header(&self) -> Header<6, 1> {
        let Row { values, weights, slots } = self.row;
        let agreed = [
            ("bytes of a row", values),
            ("weights of a row", weights),
            ("rows of a token", slots),
            ("slots", self.tokens_per_round),
            ("packed rows", usize::from(self.input.is_packed)),
            (
                "sums of nodes (1 by rank, 2 by choice)",
                self.input.relays.map_or(0, |by| 1 + by as usize),
            ),
        ];
        let values = [self.block.as_ref().map_or(0, |block| block.word() as usize)];
        Header { phase: Phase::Combine, agreed, values }
    }

    /// The part of a stream's header that needs no agreement, if the rest agrees: the peer's block,
    /// or 0.
    fn peer_block(&self, call: &Call, stream: &Stream) -> Result<u64> {
        let theirs = self.group().window().header(stream, call.number());
        let [block] = self.header().values_of(self.group().rank(), stream.peer, theirs)?;
        Ok(block)
    }

    /// The slot, among those of a token of rank `owner`, of this rank's one row. `last` is the last
    /// of the token's choices that is this rank's.
    fn slot_of(&self, owner: usize, last: usize) -> usize {
        let (me, top_k) = (self.group().rank(), self.handle.routing.top_k());
        match &self.relay_layout {
            None => slot_of_one(me, self.group().ranks(), top_k, last),
            Some(relay_layout) => relay_layout.near(owner, me, last),
        }
    }

    /// Writes the rows of a round to a rank's place.
    fn send(&self, call: &Call, stream: &Stream, round: u16) {
        let Some(mut writer) = self.group().window().writer(stream) else { return };
        let to = stream.owner;
        if round == 0 {
            writer.write_header(call.number(), self.header().to_words());
        }
        if to == self.group().rank() && self.sums_own_in_place() {
            return;
        }
        let width = self.handle.width();
        let first = usize::from(round) * self.tokens_per_round;
        let mut rounded = vec![0; self.input.hidden];
        for at in self.handle.counts.rows_from(to) {
            let entry = &self.handle.table[at * width..][..width];
            let token = entry[0] as usize;
            if token < first || token >= first + self.tokens_per_round {
                continue;
            }
            let mut slot_at =
                |slot| writer.memory_at(self.row_at(call, slot, token - first), self.row.stride());
            // SAFETY: rows and weights may be read, as `begin` demands; each slot that is written
            // is this rank's until the mark, and has room for a row.
            unsafe { self.send_token(entry, at, &mut slot_at, &mut rounded) };
        }
    }

    /// Writes the rows that go back for one token.
    ///
    /// # Safety
    /// `slot_at` gives memory for a row of a slot.
    unsafe fn send_token(
        &self,
        entry: &[i32],
        at: usize,
        slot_at: &mut dyn FnMut(usize) -> *mut u8,
        rounded: &mut [u16],
    ) {
        let rows = entry[2..].iter().enumerate();
        let rows = rows.filter_map(|(k, row)| Some((k, usize::try_from(*row).ok()?)));
        let one_slot = || self.slot_of(entry[1] as usize, self.handle.last_choices[at].into());
        // SAFETY: the caller guarantees it; `check` compared each row with the number of rows.
        unsafe {
            match self.input.sends {
                CombineRows::EachExpert => {
                    for (k, row) in rows {
                        let out = slot_at(k);
                        self.put(self.input_row(row), out);
                        self.put_weight(out, k, row);
                    }
                }
                CombineRows::Row => {
                    let out = slot_at(one_slot());
                    self.put(self.input_row(at), out);
                    if let Some(weights) = self.input.weights {
                        let to = out.add(self.row.weights_at()).cast::<f32>();
                        to.copy_from_nonoverlapping(
                            weights.add(at * self.row.weights),
                            self.row.weights,
                        );
                    }
                }
                CombineRows::SumOfExperts => {
                    let out = slot_at(one_slot());
                    if self.input.weights.is_some() {
                        out.add(self.row.weights_at())
                            .cast::<f32>()
                            .write_bytes(0, self.row.weights);
                    }
                    let mut terms = SumRows::new();
                    for (k, row) in rows {
                        terms.push(self.input_row(row));
                        self.put_weight(out, k, row);
                    }
                    sum::plain(&terms, rounded);
                    self.put(rounded, out);
                }
            }
        }
    }

    /// A row that goes back.
    ///
    /// # Safety
    /// There is such a row.
    unsafe fn input_row(&self, row: usize) -> &[u16] {
        // SAFETY: the caller guarantees it; `check` saw that rows are aligned.
        unsafe {
            slice::from_raw_parts(
                self.input.rows.add(row * self.input.stride).cast(),
                self.input.hidden,
            )
        }
    }

    /// # Safety
    /// `out` has room for a row.
    unsafe fn put(&self, row: &[u16], out: *mut u8) {
        // SAFETY: the caller guarantees it.
        unsafe {
            if let Some(block) = &self.block {
                return out.cast::<u64>().write(block.offset_of(row.as_ptr().cast()));
            }
            match self.input.is_packed {
                true => _ = logfmt::encode(row, slice::from_raw_parts_mut(out, self.row.values)),
                false => out.copy_from_nonoverlapping(row.as_ptr().cast(), 2 * row.len()),
            }
        }
    }

    /// # Safety
    /// `out` has room for a row, and `row` is one that has a weight.
    unsafe fn put_weight(&self, out: *mut u8, k: usize, row: usize) {
        let Some(weights) = self.input.weights else { return };
        // SAFETY: the caller guarantees it.
        unsafe {
            out.add(self.row.weights_at()).cast::<f32>().add(k).write(weights.add(row).read())
        };
    }

    /// Whether rows for this rank's own tokens are read in place, and not copied to its place.
    fn sums_own_in_place(&self) -> bool {
        let CombineInput { sends, weights, is_packed, is_stable, .. } = self.input;
        is_stable && !is_packed && weights.is_none() && sends != CombineRows::SumOfExperts
    }

    /// The row of a term of this rank.
    fn own_row(&self, token: usize, term: &Term) -> Option<usize> {
        let me = self.group().rank();
        let nth = self.handle.routing.tokens_to(me).binary_search(&(token as u32)).ok()?;
        let at = self.handle.counts.rows_from(me).start + nth;
        match self.input.sends {
            CombineRows::Row => Some(at),
            CombineRows::EachExpert | CombineRows::SumOfExperts => {
                usize::try_from(self.handle.table[at * self.handle.width() + 2 + term.slot]).ok()
            }
        }
    }

    /// Values that a token needs on the way to its sum: unpacked rows, or the sum of this node.
    fn scratch_len(&self) -> usize {
        let rows = if self.input.is_packed { self.row.slots } else { 1 };
        rows * self.input.hidden
    }

    /// Makes a token's sum.
    ///
    /// # Errors
    /// A peer names a row outside its block.
    ///
    /// # Safety
    /// `combined` has memory for it.
    unsafe fn sum(
        &self,
        (call, peer_blocks): (&Call, &PeerBlocks),
        token: usize,
        combined: &CombineOutput,
        unpacked: &mut [u16],
    ) -> Result<()> {
        let (hidden, top_k) = (self.input.hidden, self.handle.routing.top_k());
        let terms = self.terms(call, token, combined.sums);
        let mut rows = SumRows::new();
        for bias in combined.bias.iter().flatten() {
            // SAFETY: a bias has a row for each token.
            rows.push(unsafe { slice::from_raw_parts(bias.add(token * hidden), hidden) });
        }
        let mut free = unpacked;
        let (me, in_place) = (self.group().rank(), self.sums_own_in_place());
        for term in &terms {
            if term.rank == me && in_place {
                let row = self.own_row(token, term);
                // SAFETY: `check` saw that the table's rows are there; they do not change until the
                // combine has ended.
                rows.extend(row.map(|row| unsafe { self.input_row(row) }));
                continue;
            }
            let row = self.row_of(call, token, term);
            if self.input.is_packed {
                let (own, rest) = std::mem::take(&mut free).split_at_mut(hidden);
                free = rest;
                // SAFETY: the row was written before its rank's mark, and no rank writes to it
                // until the call has ended.
                logfmt::decode(unsafe { slice::from_raw_parts(row, self.row.values) }, own);
                rows.push(own);
            } else {
                // SAFETY: as above; rows are aligned, and those in blocks stay until the call has
                // ended here.
                rows.push(unsafe {
                    slice::from_raw_parts(peer_blocks.row(self, term.rank, row)?.cast(), hidden)
                });
            }
        }
        // SAFETY: there is a row for each token.
        let out = unsafe { slice::from_raw_parts_mut(combined.rows.add(token * hidden), hidden) };
        match combined.sums {
            SumOrder::ByRank | SumOrder::ByChoice => sum::plain(&rows, out),
            SumOrder::Weighted(weights) => {
                // SAFETY: there is a weight for each choice of each token.
                let of = |term: &Term| unsafe { weights.add(token * top_k + term.choice).read() };
                let begins = |nth: usize| nth == 0 || terms[nth].rank != terms[nth - 1].rank;
                let weights: SmallVec<[(f32, bool); MAX_TOP_K]> =
                    terms.iter().enumerate().map(|(nth, term)| (of(term), begins(nth))).collect();
                sum::weighted(&rows, &weights, out);
            }
        }
        if let Some(weights) = combined.weights {
            // SAFETY: there is a weight for each choice of each token.
            let out = unsafe { slice::from_raw_parts_mut(weights.add(token * top_k), top_k) };
            self.sum_weights(call, token, combined.sums, &terms, out);
        }
        Ok(())
    }

    /// The offset in a pool of a slot's row, for a token of the round.
    fn row_at(&self, call: &Call, slot: usize, token: usize) -> usize {
        call.place().offset + self.row.at(self.tokens_per_round, slot, token)
    }

    /// The row of a term, in this rank's place.
    fn row_of(&self, call: &Call, token: usize, term: &Term) -> *mut u8 {
        let at = self.row_at(call, term.slot, token % self.tokens_per_round);
        self.group().window().own().pool(at, self.row.stride())
    }

    /// Sums the weights returned for a token.
    fn sum_weights(
        &self,
        call: &Call,
        token: usize,
        sums: SumOrder,
        terms: &[Term],
        out: &mut [f32],
    ) {
        out.fill(0.0);
        let routing = &self.handle.routing;
        let choices = routing.choices(token);
        for term in terms {
            // A row of one expert has one weight.
            let has_it = |k| self.input.sends != CombineRows::EachExpert || k == term.choice;
            let is_its =
                |k: usize| routing.owner(choices[k]).is_some_and(|(rank, _)| rank == term.rank);
            let row = self.row_of(call, token, term);
            // SAFETY: a rank has written its row before its mark.
            let weights = unsafe { self.weights_of(row) };
            match sums {
                SumOrder::ByRank => add(weights, has_it, out),
                _ => put(weights, |k| has_it(k) && is_its(k), out),
            }
        }
    }

    /// The weights that came with a row; none if rows have none.
    ///
    /// # Safety
    /// `row` is one that was written.
    unsafe fn weights_of<'a>(&self, row: *mut u8) -> &'a [f32] {
        let Row { weights, .. } = self.row;
        // SAFETY: the row's weights were written with it.
        unsafe { slice::from_raw_parts(row.add(self.row.weights_at()).cast::<f32>(), weights) }
    }

    /// A token's terms, in the order of its sum. Slots of ranks that take no part in this call have
    /// data of earlier calls, and are skipped.
    fn terms(&self, call: &Call, token: usize, sums: SumOrder) -> SmallVec<[Term; MAX_TOP_K]> {
        let (group, routing) = (self.group(), &self.handle.routing);
        let is_there = |rank: &usize| call.is_there(*rank);
        let mut terms = SmallVec::<[Term; MAX_TOP_K]>::new();
        let choices = routing.choices(token);
        if self.input.sends == CombineRows::EachExpert {
            let first = token * routing.top_k();
            for (k, choice) in choices.iter().enumerate() {
                // SAFETY: there is a number for each choice, as `leave_out` demands.
                if self.given_choices.is_some_and(|given| unsafe { given.is_none(first + k) }) {
                    continue;
                }
                let rank = routing.owner(*choice).map(|(rank, _)| rank);
                // A repeated choice of an expert has no row of its own. Its weight adds to that row
                // only in weighted sums.
                let slot = first_of(choices, k);
                let counts = slot == k || matches!(sums, SumOrder::Weighted(_));
                if let Some(rank) = rank.filter(is_there).filter(|_| counts) {
                    terms.push(Term { rank, slot, choice: k });
                }
            }
        } else {
            for rank in (0..group.ranks()).filter(is_there) {
                let last = match choices {
                    [] => {
                        routing.tokens_to(rank).binary_search(&(token as u32)).is_ok().then_some(0)
                    }
                    _ => routing.last_choice(rank, choices),
                };
                if let Some(choice) = last {
                    let slot = slot_of_one(rank, group.ranks(), routing.top_k(), choice);
                    terms.push(Term { rank, slot, choice });
                }
            }
        }
        match sums {
            SumOrder::ByRank => terms.sort_by_key(|term| term.rank),
            SumOrder::ByChoice => terms.sort_by_key(|term| term.choice),
            SumOrder::Weighted(_) => {
                terms.sort_by_key(|term| term.choice);
                gather_ranks(&mut terms);
            }
        }
        terms
    }
}

/// Moves terms, which are in the order of their choices, behind the first one of their rank.
fn gather_ranks(terms: &mut [Term]) {
    for at in 1..terms.len() {
        let rank = terms[at].rank;
        if let Some(last) = terms[..at].iter().rposition(|term| term.rank == rank) {
            terms[last + 1..=at].rotate_right(1);
        }
    }
}

/// Slots of a token for one row from each of so many ranks or nodes; or one for each choice, if
/// these are fewer.
fn one_of(count: usize, top_k: usize) -> usize {
    if top_k == 0 { count } else { count.min(top_k) }
}

/// The slot of one of them. `last` is the last of the token's choices that it has.
fn slot_of_one(nth: usize, count: usize, top_k: usize, last: usize) -> usize {
    if one_of(count, top_k) == count { nth } else { last }
}

/// Adds the weights that `counts` selects.
fn add(weights: &[f32], counts: impl Fn(usize) -> bool, out: &mut [f32]) {
    let all = out.iter_mut().zip(weights).enumerate();
    all.filter(|(k, _)| counts(*k)).for_each(|(_, (out, weight))| *out += weight);
}

/// Copies the weights that `counts` selects.
fn put(weights: &[f32], counts: impl Fn(usize) -> bool, out: &mut [f32]) {
    let all = out.iter_mut().zip(weights).enumerate();
    all.filter(|(k, _)| counts(*k)).for_each(|(_, (out, weight))| *out = *weight);
}

/// A function that takes a round out.
type TakeRound<'a> = dyn FnMut(&CombineContext, &Call, u16) -> Result<()> + 'a;

/// One row of a token's sum.
#[derive(Clone, Copy, Default)]
struct Term {
    rank: usize,
    slot: usize,
    choice: usize,
}

/// The rows of a token's sum: its biases, and one for each choice or rank.
type SumRows<'a> = SmallVec<[&'a [u16]; MAX_TOP_K + 2]>;

fn check(handle: &Handle, input: &CombineInput) -> Result<()> {
    let CombineInput { rows, len, stride, hidden, sends, is_packed, .. } = *input;
    if !rows.addr().is_multiple_of(2) || !stride.is_multiple_of(2) {
        return Err(Error::invalid("rows of bf16 are aligned to 2 bytes"));
    }
    if is_packed && !hidden.is_multiple_of(GROUP) {
        return Err(Error::invalid(format!(
            "rows to pack have a multiple of {GROUP} values, not {hidden}"
        )));
    }
    let last = match sends {
        CombineRows::Row => handle.counts.total(),
        CombineRows::EachExpert | CombineRows::SumOfExperts => {
            let rows = handle.table.chunks_exact(handle.width()).flat_map(|entry| &entry[2..]);
            rows.max().map_or(0, |last| (last + 1) as usize)
        }
    };
    match last <= len {
        true => Ok(()),
        false => {
            Err(Error::invalid(format!("{len} rows are given, and the handle tells of {last}")))
        }
    }
}
