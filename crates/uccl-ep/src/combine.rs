//! What experts made of tokens comes back, and is summed.

mod reading;

use std::{slice, sync::Arc};

use smallvec::SmallVec;

use self::reading::{Sources, block_of};
use crate::{
    blocks::Block,
    dispatch::{Handle, Room},
    error::{Error, Phase, Result},
    group::{Group, Interrupted, Until, Wait},
    header::Header,
    numerics::{logfmt, quantise::GROUP, sum},
    protocol::{Call, Step, Takes},
    record::Row,
    routing::MAX_TOP_K,
    window::View,
};

/// What a rank sends back for each token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sends {
    /// The token's one row.
    Row,
    /// Its row of each expert.
    EachExpert,
    /// The sum of its rows of all experts of this rank, in order of choice, rounded to bf16.
    SumOfExperts,
}

/// How a token's sum is made of the rows that come back. Each sum is made in f32 and rounded once.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Sums {
    /// Rank by rank, ascending. Weights are summed too.
    ByRank,
    /// Choice by choice. A rank's one row counts as the last of its choices. Weights are those of the choice's rank.
    ByChoice,
    /// Choice by choice, each multiplied by its weight: one for each choice of each token.
    Weighted(*const f32),
}

/// Rows of bf16 that go back.
#[derive(Clone, Copy, Debug)]
pub struct Results {
    /// The first row.
    pub rows: *const u8,
    /// How many rows there are.
    pub len: usize,
    /// Bytes from one row to the next.
    pub stride: usize,
    /// Values of a row.
    pub hidden: usize,
    /// What is sent of them.
    pub sends: Sends,
    /// Weights that go back too: one for each choice of each row, or, by experts, one for each row.
    pub weights: Option<*const f32>,
    /// Whether rows are packed as LogFMT-10 on their way.
    pub is_packed: bool,
    /// Whether rows stay as they are until the combine has ended: this rank's own tokens are then summed from them, and
    /// peers read rows that are in a [`Block`] where they are.
    pub stays: bool,
}

/// Memory for the sums.
#[derive(Clone, Copy, Debug)]
pub struct Combined {
    /// The first row of bf16; as long as one another.
    pub rows: *mut u16,
    /// How they are made.
    pub sums: Sums,
    /// Up to two rows for each token that each sum begins with.
    pub bias: [Option<*const u16>; 2],
    /// Weights: one for each choice of each token.
    pub weights: Option<*mut f32>,
}

/// A combine under way.
pub struct Combine {
    part: Part,
    call: Call,
    /// Whether the end waits for those that read this rank's block.
    waits_for_readers: bool,
}

/// What this rank sends back, and how a place is divided.
struct Part {
    handle: Arc<Handle>,
    results: Results,
    row: Row,
    /// What peers read rows from.
    block: Option<Arc<Block>>,
    /// Tokens of each rank that have rows in its place at once.
    at_once: usize,
}

// SAFETY: what its pointers lead to may be used by any thread, as `Combine::begin` demands.
unsafe impl Send for Part {}

impl Combine {
    /// Begins to send rows back to where their tokens came from. Where all fit at once ([`Room::Tokens`]) they have been
    /// sent when this returns.
    ///
    /// # Errors
    /// Arguments are wrong, or a peer is late.
    ///
    /// # Safety
    /// `results` describes memory with those rows and weights that `handle` tells of, which any thread may read, until
    /// this returns or, in rounds and with `stays`, until the combine is over or dropped.
    pub unsafe fn begin(
        handle: &Arc<Handle>,
        results: Results,
        is_interrupted: &mut Interrupted<'_>,
    ) -> Result<Self> {
        let (group, routing) = (&handle.group, &handle.routing);
        check(handle, &results)?;
        let (ranks, top_k) = (group.ranks(), routing.top_k());
        let Results { hidden, sends, weights, is_packed, .. } = results;
        let slots = match sends {
            Sends::EachExpert => top_k,
            Sends::Row | Sends::SumOfExperts if top_k == 0 => ranks,
            Sends::Row | Sends::SumOfExperts => ranks.min(top_k),
        };
        let values = if is_packed { logfmt::max_len(hidden) } else { 2 * hidden };
        let row = Row { values, weights: weights.map_or(0, |_| top_k), slots };
        let (at_once, len) = match handle.room {
            Room::Tokens(tokens) => (tokens, row.place(tokens)),
            Room::Bytes(len) => (row.tokens_in(len), len),
        };
        let rounds_of = |tokens: usize| tokens.div_ceil(at_once.max(1));
        let most = handle.counts.tokens_of.iter().max().map_or(0, |most| *most as usize);
        if at_once == 0 && most > 0 || u16::try_from(rounds_of(most)).is_err() {
            let why = format!(
                "{most} tokens do not come back in {:?}; make the buffer larger",
                handle.room
            );
            return Err(Error::invalid(why));
        }
        let place = group.place(len)?;
        let rounds = group.rounds(|to| rounds_of(handle.counts.tokens_of[to] as usize) as u16);
        let call = Call::new(place, Takes::AllTogether, &rounds);
        let block = block_of(group, &results);
        if let Some(block) = &block {
            group.note_reading(block, call.number());
        }
        let part = Part { handle: Arc::clone(handle), results, row, block, at_once };
        let mut combine = Self { part, call, waits_for_readers: true };
        if matches!(handle.room, Room::Tokens(_)) {
            combine.drive(Until::SentAll, is_interrupted, &mut |_, _, _| Ok(()))?;
        }
        Ok(combine)
    }

    /// Lets the end of the call not wait for peers that read this rank's rows in a block: whoever writes there next
    /// waits for [`Group::is_read`].
    pub fn leave_rows(&mut self) {
        self.waits_for_readers = false;
    }

    /// Sums what comes back, and ends the call. Then nobody reads this rank's rows any more, unless they were left.
    ///
    /// # Errors
    /// A peer is late, or combines something else.
    ///
    /// # Safety
    /// `combined` has memory for each of this rank's tokens, which only this call uses.
    pub unsafe fn finish(
        mut self,
        combined: Combined,
        is_interrupted: &mut Interrupted<'_>,
    ) -> Result<()> {
        let mut unpacked = vec![0; self.part.unpacked_len()];
        if self.part.block.is_some() && self.waits_for_readers {
            self.call.wait_for_readers();
        }
        self.drive(Until::Over, is_interrupted, &mut |part, call, round| {
            let sources = Sources::of(part, call)?;
            let tokens = part.handle.routing.tokens();
            let first = usize::from(round) * part.at_once;
            for token in first..tokens.min(first + part.at_once) {
                // SAFETY: as the caller has it.
                unsafe { part.sum((call, &sources), token, &combined, &mut unpacked) }?;
            }
            Ok(())
        })
    }

    fn drive(
        &mut self,
        until: Until,
        is_interrupted: &mut Interrupted<'_>,
        take: &mut Take<'_>,
    ) -> Result<()> {
        let Self { part, call, .. } = self;
        let mut wait = Wait { phase: Phase::Combine, is_interrupted };
        part.group().drive(call, until, &mut wait, |call, step| match step {
            Step::Send { to, mark } => {
                part.send(call, to, mark.round);
                Ok(())
            }
            Step::Take { round, .. } => take(part, call, round),
            Step::Tell { .. } => Ok(()),
        })
    }
}

impl Part {
    fn group(&self) -> &Group {
        &self.handle.group
    }

    fn header(&self) -> Header<5, 1> {
        let Row { values, weights, slots } = self.row;
        let agreed = [
            ("bytes of a row", values),
            ("weights of a row", weights),
            ("rows of a token", slots),
            ("slots", self.at_once),
            ("packed rows", usize::from(self.results.is_packed)),
        ];
        let told = [self.block.as_ref().map_or(0, |block| block.word() as usize)];
        Header { phase: Phase::Combine, agreed, told }
    }

    /// Which of a token's slots a rank's one row has. `last` is the last of the token's choices that is this rank's.
    fn slot_of(&self, rank: usize, last: usize) -> usize {
        let top_k = self.handle.routing.top_k();
        if top_k == 0 || self.group().ranks() <= top_k { rank } else { last }
    }

    /// Writes the rows of a round to a rank's place.
    fn send(&self, call: &Call, to: usize, round: u16) {
        let window = self.group().window();
        let Some(view) = window.of(to) else { return };
        if round == 0 {
            window.set_header(to, call.number(), self.header().to_words());
        }
        if to == self.group().rank() && self.sums_own_in_place() {
            return;
        }
        let width = self.handle.width();
        let first = usize::from(round) * self.at_once;
        let mut rounded = vec![0; self.results.hidden];
        for at in self.handle.counts.rows_from(to) {
            let entry = &self.handle.table[at * width..][..width];
            let token = entry[0] as usize;
            if token < first || token >= first + self.at_once {
                continue;
            }
            let slot_at = |slot| self.row_in(view, call, slot, token - first);
            // SAFETY: rows and weights may be read, as `begin` demands; each slot that is written is this rank's until
            // the mark, and has room for a row.
            unsafe { self.send_token(entry, at, &slot_at, &mut rounded) };
        }
    }

    /// Writes what goes back for one token.
    ///
    /// # Safety
    /// `slot_at` gives memory for a row of a slot.
    unsafe fn send_token(
        &self,
        entry: &[i32],
        at: usize,
        slot_at: &dyn Fn(usize) -> *mut u8,
        rounded: &mut [u16],
    ) {
        let rows = entry[2..].iter().enumerate();
        let rows = rows.filter_map(|(k, row)| Some((k, usize::try_from(*row).ok()?)));
        let one_slot =
            || slot_at(self.slot_of(self.group().rank(), self.handle.masters[at].into()));
        // SAFETY: as the caller has it; each row was compared with the number of rows in `check`.
        unsafe {
            match self.results.sends {
                Sends::EachExpert => {
                    for (k, row) in rows {
                        let out = slot_at(k);
                        self.put(self.result(row), out);
                        self.put_weight(out, k, row);
                    }
                }
                Sends::Row => {
                    let out = one_slot();
                    self.put(self.result(at), out);
                    if let Some(weights) = self.results.weights {
                        let to = out.add(self.row.weights_at()).cast::<f32>();
                        to.copy_from_nonoverlapping(
                            weights.add(at * self.row.weights),
                            self.row.weights,
                        );
                    }
                }
                Sends::SumOfExperts => {
                    let out = one_slot();
                    if self.results.weights.is_some() {
                        out.add(self.row.weights_at())
                            .cast::<f32>()
                            .write_bytes(0, self.row.weights);
                    }
                    let mut terms = Rows::new();
                    for (k, row) in rows {
                        terms.push(self.result(row));
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
    unsafe fn result(&self, row: usize) -> &[u16] {
        // SAFETY: as the caller has it; `check` saw that rows are aligned.
        unsafe {
            slice::from_raw_parts(
                self.results.rows.add(row * self.results.stride).cast(),
                self.results.hidden,
            )
        }
    }

    /// # Safety
    /// `out` has room for a row.
    unsafe fn put(&self, row: &[u16], out: *mut u8) {
        // SAFETY: as the caller has it.
        unsafe {
            if let Some(block) = &self.block {
                return out.cast::<u64>().write(block.offset_of(row.as_ptr().cast()));
            }
            match self.results.is_packed {
                true => _ = logfmt::encode(row, slice::from_raw_parts_mut(out, self.row.values)),
                false => out.copy_from_nonoverlapping(row.as_ptr().cast(), 2 * row.len()),
            }
        }
    }

    /// # Safety
    /// `out` has room for a row, and `row` is one that has a weight.
    unsafe fn put_weight(&self, out: *mut u8, k: usize, row: usize) {
        let Some(weights) = self.results.weights else { return };
        // SAFETY: as the caller has it.
        unsafe {
            out.add(self.row.weights_at()).cast::<f32>().add(k).write(weights.add(row).read())
        };
    }

    /// Whether rows for this rank's own tokens are read where they are, and not copied to its place.
    fn sums_own_in_place(&self) -> bool {
        let Results { sends, weights, is_packed, stays, .. } = self.results;
        stays && !is_packed && weights.is_none() && sends != Sends::SumOfExperts
    }

    /// The row of a term that is this rank's own.
    fn own_row(&self, token: usize, term: &Term) -> Option<usize> {
        let me = self.group().rank();
        let nth = self.handle.routing.to(me).binary_search(&(token as u32)).ok()?;
        let at = self.handle.counts.rows_from(me).start + nth;
        match self.results.sends {
            Sends::Row => Some(at),
            Sends::EachExpert | Sends::SumOfExperts => {
                usize::try_from(self.handle.table[at * self.handle.width() + 2 + term.choice]).ok()
            }
        }
    }

    /// How many values the rows of a token have that have to be unpacked.
    fn unpacked_len(&self) -> usize {
        if self.results.is_packed { self.row.slots * self.results.hidden } else { 0 }
    }

    /// Makes a token's sum.
    ///
    /// # Errors
    /// A peer tells of a row where none is.
    ///
    /// # Safety
    /// `combined` has memory for it.
    unsafe fn sum(
        &self,
        (call, sources): (&Call, &Sources),
        token: usize,
        combined: &Combined,
        unpacked: &mut [u16],
    ) -> Result<()> {
        let (hidden, top_k) = (self.results.hidden, self.handle.routing.top_k());
        let terms = self.terms(token, combined.sums);
        let mut rows = Rows::new();
        for bias in combined.bias.iter().flatten() {
            // SAFETY: a bias has a row for each token.
            rows.push(unsafe { slice::from_raw_parts(bias.add(token * hidden), hidden) });
        }
        let mut free = unpacked;
        let (me, in_place) = (self.group().rank(), self.sums_own_in_place());
        for term in &terms {
            if term.rank == me && in_place {
                let row = self.own_row(token, term);
                // SAFETY: the table's rows are there (`check`), and stay as they are until the combine has ended.
                rows.extend(row.map(|row| unsafe { self.result(row) }));
                continue;
            }
            let row = self.row_of(call, token, term);
            if self.results.is_packed {
                let (own, rest) = std::mem::take(&mut free).split_at_mut(hidden);
                free = rest;
                // SAFETY: the row was written before its rank's mark, and nobody writes to it until the call has ended.
                logfmt::decode(unsafe { slice::from_raw_parts(row, self.row.values) }, own);
                rows.push(own);
            } else {
                // SAFETY: as above; rows are aligned, and those in blocks stay until the call has ended here.
                rows.push(unsafe {
                    slice::from_raw_parts(sources.row(self, term.rank, row)?.cast(), hidden)
                });
            }
        }
        // SAFETY: there is a row for each token.
        let out = unsafe { slice::from_raw_parts_mut(combined.rows.add(token * hidden), hidden) };
        match combined.sums {
            Sums::ByRank | Sums::ByChoice => sum::plain(&rows, out),
            Sums::Weighted(weights) => {
                // SAFETY: there is a weight for each choice of each token.
                let of = |term: &Term| unsafe { weights.add(token * top_k + term.choice).read() };
                let weights: SmallVec<[f32; MAX_TOP_K]> = terms.iter().map(of).collect();
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

    /// A slot's row of a token of the round, in a window.
    fn row_in(&self, view: &View, call: &Call, slot: usize, token: usize) -> *mut u8 {
        let at = self.row.at(self.at_once, slot, token);
        view.pool(call.place().offset + at, self.row.stride())
    }

    /// The row of a term, in this rank's place.
    fn row_of(&self, call: &Call, token: usize, term: &Term) -> *mut u8 {
        self.row_in(self.group().window().own(), call, term.slot, token % self.at_once)
    }

    /// What comes back of a token's weights.
    fn sum_weights(&self, call: &Call, token: usize, sums: Sums, terms: &[Term], out: &mut [f32]) {
        out.fill(0.0);
        if self.row.weights == 0 {
            return;
        }
        let routing = &self.handle.routing;
        let choices = routing.choices(token);
        let rank_of = |choice| routing.owner(choice).map(|(rank, _)| rank);
        for term in terms {
            let row = self.row_of(call, token, term);
            // SAFETY: the row's weights were written with it.
            let weights = unsafe {
                slice::from_raw_parts(row.add(self.row.weights_at()).cast::<f32>(), out.len())
            };
            for (k, (out, weight)) in out.iter_mut().zip(weights).enumerate() {
                // The row of one expert has one weight.
                let has_it = self.results.sends != Sends::EachExpert || k == term.choice;
                match sums {
                    _ if !has_it => {}
                    Sums::ByRank => *out += weight,
                    _ if rank_of(choices[k]) == Some(term.rank) => *out = *weight,
                    _ => {}
                }
            }
        }
    }

    /// A token's terms, in the order of its sum.
    fn terms(&self, token: usize, sums: Sums) -> SmallVec<[Term; MAX_TOP_K]> {
        let (group, routing) = (self.group(), &self.handle.routing);
        let is_there = |rank: &usize| !group.is_masked(*rank);
        let mut terms = SmallVec::<[Term; MAX_TOP_K]>::new();
        let choices = routing.choices(token);
        if self.results.sends == Sends::EachExpert {
            for (k, choice) in choices.iter().enumerate() {
                let rank = routing.owner(*choice).map(|(rank, _)| rank);
                if let Some(rank) = rank.filter(is_there) {
                    terms.push(Term { rank, slot: k, choice: k });
                }
            }
        } else {
            for rank in (0..group.ranks()).filter(is_there) {
                let last = match choices {
                    [] => routing.to(rank).binary_search(&(token as u32)).is_ok().then_some(0),
                    _ => routing.last_choice(rank, choices),
                };
                if let Some(choice) = last {
                    terms.push(Term { rank, slot: self.slot_of(rank, choice), choice });
                }
            }
        }
        match sums {
            Sums::ByRank => terms.sort_by_key(|term| term.rank),
            Sums::ByChoice | Sums::Weighted(_) => terms.sort_by_key(|term| term.choice),
        }
        terms
    }
}

/// Takes a round out.
type Take<'a> = dyn FnMut(&Part, &Call, u16) -> Result<()> + 'a;

/// One row of a token's sum.
#[derive(Clone, Copy, Default)]
struct Term {
    rank: usize,
    slot: usize,
    choice: usize,
}

/// The rows of a token's sum: its biases, and one for each choice or rank.
type Rows<'a> = SmallVec<[&'a [u16]; MAX_TOP_K + 2]>;

fn check(handle: &Handle, results: &Results) -> Result<()> {
    let Results { rows, len, stride, hidden, sends, is_packed, .. } = *results;
    if !rows.addr().is_multiple_of(2) || !stride.is_multiple_of(2) {
        return Err(Error::invalid("rows of bf16 are aligned to 2 bytes"));
    }
    if is_packed && !hidden.is_multiple_of(GROUP) {
        return Err(Error::invalid(format!(
            "rows to pack have a multiple of {GROUP} values, not {hidden}"
        )));
    }
    let last = match sends {
        Sends::Row => handle.counts.total(),
        Sends::EachExpert | Sends::SumOfExperts => {
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
