//! Tokens go to the ranks of their experts.

use std::{slice, sync::Arc};

use crate::{
    error::{Error, Phase, Result},
    group::{Group, Interrupted, Until, Wait},
    numerics::quantise::{self, Scales},
    placing::Place,
    protocol::{Call, Step, Takes},
    record::{HEADER, Record},
    routing::Routing,
};

/// How a token's payload is made of its row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Payload {
    /// As it is: so many bytes.
    Bytes(usize),
    /// Rows of this many bf16, quantised here.
    Quantised(usize, Scales),
}

/// A rank's tokens in memory. Strides of scales are in words of four bytes.
#[derive(Clone, Copy, Debug)]
pub struct Tokens {
    /// The first row.
    pub rows: *const u8,
    /// Bytes from one row to the next.
    pub stride: usize,
    /// What is made of a row.
    pub payload: Payload,
    /// Scales that come with the rows: opaque words.
    pub scales: Option<ScalesIn>,
    /// A weight for each choice, if there are any.
    pub weights: Option<*const f32>,
}

/// Scales of tokens: word `w` of token `t` is at `t * token_stride + w * word_stride`.
#[derive(Clone, Copy, Debug)]
pub struct ScalesIn {
    /// The first word.
    pub words: *const u32,
    /// Words of a token.
    pub count: usize,
    /// From one token to the next.
    pub token_stride: usize,
    /// From one word to the next.
    pub word_stride: usize,
}

/// How much of the window a call uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Room {
    /// Slots for this many tokens of each rank, which no rank exceeds.
    Tokens(usize),
    /// This many bytes; what does not fit at once goes in rounds.
    Bytes(usize),
}

/// Where what arrives is put.
#[derive(Clone, Debug)]
pub enum Layout {
    /// A row for each token, those of rank 0 first, in the order of their rank.
    Rows,
    /// A row for each token and local expert; the rows of expert `e` begin at `starts[e]`.
    Experts(Vec<usize>),
}

/// Memory for what arrives. There is a row for each that [`Layout`] has.
#[derive(Clone, Copy, Debug)]
pub struct Outputs {
    /// How many rows there are.
    pub len: usize,
    /// Payloads: the first row.
    pub rows: *mut u8,
    /// Bytes from one row to the next.
    pub stride: usize,
    /// Scales.
    pub scales: Option<ScalesOut>,
    /// The choices of each row, as numbers of this rank's experts, -1 for others ([`Layout::Rows`]).
    pub choices: Option<Choices>,
    /// Weights: one for each choice of each row, or, by experts, one for each row.
    pub weights: Option<*mut f32>,
    /// Whether weights of other ranks' experts become 0.
    pub zeroes_foreign_weights: bool,
}

/// Where scales go: word `w` of a row is at `row * row_stride + expert * expert_stride + w * word_stride`.
#[derive(Clone, Copy, Debug)]
pub struct ScalesOut {
    /// The first word.
    pub words: *mut u32,
    /// From one row to the next.
    pub row_stride: usize,
    /// Added for each expert before the row's.
    pub expert_stride: usize,
    /// From one word to the next.
    pub word_stride: usize,
}

/// Integers of either size.
#[derive(Clone, Copy, Debug)]
pub enum Choices {
    /// Of 32 bits.
    I32(*mut i32),
    /// Of 64 bits.
    I64(*mut i64),
}

impl Choices {
    /// # Safety
    /// There is an integer `at`.
    unsafe fn put(self, at: usize, value: i32) {
        // SAFETY: as the caller has it.
        unsafe {
            match self {
                Self::I32(all) => all.add(at).write(value),
                Self::I64(all) => all.add(at).write(i64::from(value)),
            }
        }
    }
}

/// How much arrives.
#[derive(Clone, Debug)]
pub struct Counts {
    /// Tokens that each rank sends to this one.
    pub from: Vec<u32>,
    /// How many of them chose each of this rank's experts, rank by rank.
    pub per_expert: Vec<u32>,
    /// Tokens that each rank has.
    pub tokens_of: Vec<u32>,
}

impl Counts {
    /// Tokens that arrive.
    #[must_use]
    pub fn total(&self) -> usize {
        self.from.iter().map(|count| *count as usize).sum()
    }

    /// Rows of each of this rank's experts.
    #[must_use]
    pub fn of_experts(&self) -> Vec<u32> {
        let local = self.per_expert.len() / self.from.len();
        let of = |expert| self.per_expert.iter().skip(expert).step_by(local).sum();
        (0..local).map(of).collect()
    }
}

/// What a combine needs to know of the dispatch before it.
#[derive(Clone)]
pub struct Handle {
    /// Where the ranks are.
    pub group: Arc<Group>,
    /// Where this rank's own tokens went.
    pub routing: Arc<Routing>,
    /// How much of the window the dispatch used.
    pub room: Room,
    /// What arrived.
    pub counts: Counts,
    /// For each token that arrived: its number at its rank, its rank, and, for each choice, the row that it has by experts, or -1.
    pub table: Vec<i32>,
    /// For each token that arrived: the last of its choices that is this rank's.
    pub masters: Vec<u8>,
}

impl Handle {
    /// Integers of a row of the table.
    #[must_use]
    pub fn width(&self) -> usize {
        2 + self.routing.top_k()
    }

    /// Tokens of the table that came from a rank.
    #[must_use]
    pub(crate) fn rows_from(&self, rank: usize) -> std::ops::Range<usize> {
        let start = self.counts.from[..rank].iter().sum::<u32>() as usize;
        start..start + self.counts.from[rank] as usize
    }
}

/// A dispatch under way.
pub struct Dispatch {
    group: Arc<Group>,
    routing: Arc<Routing>,
    room: Room,
    record: Record,
    slots: usize,
    area: usize,
    tokens: Tokens,
    quantised: Quantised,
    call: Call,
    counts: Option<Counts>,
}

/// Rows that were quantised: payloads and scales.
#[derive(Default)]
struct Quantised {
    payloads: Vec<u8>,
    scales: Vec<u32>,
}

// SAFETY: what its pointers lead to may be used by any thread, as `Dispatch::begin` demands.
unsafe impl Send for Dispatch {}

impl Dispatch {
    /// Begins to send a rank's tokens. Where all fit at once ([`Room::Tokens`]) they have been sent when this returns.
    ///
    /// # Errors
    /// Arguments are wrong, or a peer is late.
    ///
    /// # Safety
    /// `tokens` describes memory with a row (and weights, and scales) for each token of `routing`, which any thread may
    /// read, until this returns or, in rounds, until the dispatch is over or dropped.
    pub unsafe fn begin(
        group: &Arc<Group>,
        routing: Arc<Routing>,
        tokens: Tokens,
        room: Room,
        is_interrupted: &mut Interrupted<'_>,
    ) -> Result<Self> {
        let record = record_of(&tokens, &routing)?;
        let ranks = group.ranks();
        if routing.ranks() != ranks {
            return Err(Error::invalid(format!(
                "the routing is for {} ranks of {ranks}",
                routing.ranks()
            )));
        }
        let local = routing.local_experts();
        let slots = match room {
            Room::Tokens(slots) => slots,
            Room::Bytes(len) => record.slots_in(local, (len / ranks) & !63),
        };
        let most = (0..ranks).map(|rank| routing.to(rank).len()).max().unwrap_or(0);
        if matches!(room, Room::Tokens(_)) && most.max(routing.tokens()) > slots {
            let why = format!("{} tokens, and room for {slots} of each rank", routing.tokens());
            return Err(Error::invalid(why));
        }
        let rounds = most.div_ceil(slots.max(1));
        if slots == 0 && most > 0 || u16::try_from(rounds).is_err() {
            let why = format!(
                "{most} tokens for one rank do not fit in {room:?}; make the buffer larger"
            );
            return Err(Error::invalid(why));
        }
        let area = record.area(local, slots);
        let place = group.place(area * ranks)?;
        let rounds = group.rounds(|to| routing.to(to).len().div_ceil(slots.max(1)) as u16);
        let call = Call::new(place, Takes::EachAlone, &rounds);
        let (group, counts) = (Arc::clone(group), None);
        let quantised = Quantised::default();
        let mut dispatch =
            Self { group, routing, room, record, slots, area, tokens, quantised, call, counts };
        // SAFETY: as the caller has it.
        unsafe { dispatch.quantise() };
        if matches!(room, Room::Tokens(_)) {
            dispatch.drive(Until::SentAll, is_interrupted, None)?;
        }
        Ok(dispatch)
    }

    /// # Safety
    /// The tokens' memory may be read.
    unsafe fn quantise(&mut self) {
        let Payload::Quantised(hidden, how) = self.tokens.payload else { return };
        let (tokens, words) = (self.routing.tokens(), how.words(hidden));
        let mut quantised =
            Quantised { payloads: vec![0; tokens * hidden], scales: vec![0; tokens * words] };
        let rows = quantised
            .payloads
            .chunks_exact_mut(hidden)
            .zip(quantised.scales.chunks_exact_mut(words));
        for (token, (payload, scales)) in rows.enumerate() {
            // SAFETY: the row of this token, of `hidden` bf16; read as bytes' worth of u16 wherever it is aligned, which
            // `record_of` has checked.
            let row = unsafe {
                slice::from_raw_parts(
                    self.tokens.rows.add(token * self.tokens.stride).cast::<u16>(),
                    hidden,
                )
            };
            quantise::row(row, how, payload, scales);
        }
        self.quantised = quantised;
    }

    /// How much arrives; waits until every rank has said so.
    ///
    /// # Errors
    /// A peer is late, or makes another call.
    pub fn counts(&mut self, is_interrupted: &mut Interrupted<'_>) -> Result<&Counts> {
        if self.counts.is_none() {
            self.drive(Until::HeardAll, is_interrupted, None)?;
            let counts =
                self.heard().inspect_err(|_| self.group.window().set_fault(self.call.number()))?;
            self.counts = Some(counts);
        }
        self.counts.as_ref().ok_or_else(|| Error::invalid("no counts"))
    }

    /// Reads the headers, and compares them with what this rank would write.
    fn heard(&self) -> Result<Counts> {
        let (ranks, local) = (self.group.ranks(), self.routing.local_experts());
        let mut counts = Counts {
            from: vec![0; ranks],
            per_expert: vec![0; ranks * local],
            tokens_of: vec![0; ranks],
        };
        for from in (0..ranks).filter(|rank| !self.group.is_masked(*rank)) {
            let area = self.group.window().own().pool(self.area_at(from), self.area);
            // SAFETY: the area begins with a header and counts, which the sender has written before its mark.
            let words = unsafe { slice::from_raw_parts(area.cast::<u32>(), HEADER / 4 + local) };
            let names = [
                "",
                "",
                "bytes of payload",
                "words of scales",
                "top-k",
                "experts",
                "slots",
                "kind of call",
            ];
            let ours = self.header(0);
            for at in 2..names.len() {
                if words[at] != ours[at] {
                    let [theirs, ours] = [words[at], ours[at]].map(u64::from);
                    let (phase, rank) = (Phase::Dispatch, self.group.rank());
                    return Err(Error::Disagree {
                        phase,
                        rank,
                        peer: from,
                        what: names[at],
                        theirs,
                        ours,
                    });
                }
            }
            counts.from[from] = words[0];
            counts.tokens_of[from] = words[1];
            counts.per_expert[from * local..][..local].copy_from_slice(&words[HEADER / 4..]);
        }
        Ok(counts)
    }

    fn header(&self, to: usize) -> [u32; HEADER / 4] {
        let Record { payload, scales, top_k } = self.record;
        let [tokens, count] = [self.routing.tokens(), self.routing.to(to).len()];
        let experts = self.routing.num_experts();
        let mut header = [0; HEADER / 4];
        let values = [count, tokens, payload, scales, top_k, experts, self.slots, KIND];
        header[..values.len()].copy_from_slice(&values.map(|value| value as u32));
        header
    }

    /// Where a rank's area is in the pool.
    fn area_at(&self, from: usize) -> usize {
        self.call.place().offset + from * self.area
    }

    /// Takes out what arrives, and ends the call.
    ///
    /// # Errors
    /// A peer is late.
    ///
    /// # Safety
    /// `outputs` has memory for every row of `layout`, which only this call uses.
    pub unsafe fn receive(
        mut self,
        outputs: Outputs,
        layout: &Layout,
        is_interrupted: &mut Interrupted<'_>,
    ) -> Result<Handle> {
        let counts = self.counts(is_interrupted)?.clone();
        let table = vec![-1; counts.total() * (2 + self.routing.top_k())];
        let (next, last) = match layout {
            Layout::Rows => (Vec::new(), counts.total()),
            Layout::Experts(starts) => first_rows(&counts, starts),
        };
        if last > outputs.len {
            let why = format!("{last} rows arrive, and there is room for {}", outputs.len);
            return Err(Error::invalid(why));
        }
        let masters = vec![0; counts.total()];
        let mut sink = Sink { outputs, layout, next, table, masters };
        self.drive(Until::Over, is_interrupted, Some(&mut sink))?;
        let (group, routing) = (self.group, self.routing);
        let Sink { table, masters, .. } = sink;
        Ok(Handle { group, routing, room: self.room, counts, table, masters })
    }

    fn drive(
        &mut self,
        until: Until,
        is_interrupted: &mut Interrupted<'_>,
        mut sink: Option<&mut Sink<'_>>,
    ) -> Result<()> {
        let group = Arc::clone(&self.group);
        let mut wait = Wait { phase: Phase::Dispatch, is_interrupted: &mut || is_interrupted() };
        // The call is driven while what it sends is read from the rest.
        let nothing = Call::new(
            Place { call: 0, offset: 0, after: Default::default() },
            Takes::EachAlone,
            &[],
        );
        let mut call = std::mem::replace(&mut self.call, nothing);
        let offset = call.place().offset;
        let driven = group.drive(&mut call, until, &mut wait, |_, step| {
            match (step, &mut sink) {
                (Step::Send { to, mark }, _) => self.send(offset, to, mark.round),
                (Step::Take { from: Some(from), round }, Some(sink)) => {
                    self.take(offset, from, round, sink)
                }
                _ => {}
            }
            Ok(())
        });
        self.call = call;
        driven
    }

    /// Writes a round to a rank's place.
    fn send(&self, offset: usize, to: usize, round: u16) {
        let Some(view) = self.group.window().of(to) else { return };
        let area = view.pool(offset + self.group.rank() * self.area, self.area);
        let local = self.routing.local_experts();
        if round == 0 {
            let header = self.header(to);
            // SAFETY: an area begins with a header and counts, and is ours to write until the mark.
            unsafe {
                area.cast::<u32>().copy_from_nonoverlapping(header.as_ptr(), header.len());
                let counts = self.routing.per_expert_of(to);
                area.add(HEADER)
                    .cast::<u32>()
                    .copy_from_nonoverlapping(counts.as_ptr(), counts.len());
            }
        }
        let tokens =
            self.routing.to(to).iter().skip(usize::from(round) * self.slots).take(self.slots);
        for (slot, token) in tokens.enumerate() {
            // SAFETY: an area has `slots` records behind its first; they are ours to write until the mark.
            unsafe {
                self.write(
                    area.add(Record::first_at(local) + slot * self.record.stride()),
                    *token as usize,
                )
            };
        }
    }

    /// Writes a token's record.
    ///
    /// # Safety
    /// There is room for one.
    unsafe fn write(&self, out: *mut u8, token: usize) {
        let Self { record, tokens, routing, .. } = self;
        // SAFETY: `out` has room for a record, whose parts are where `record` says; the token's row, scales and weights
        // may be read, as `begin` demands. Numbers are written unaligned.
        unsafe {
            match tokens.payload {
                Payload::Bytes(len) => {
                    out.copy_from_nonoverlapping(tokens.rows.add(token * tokens.stride), len)
                }
                Payload::Quantised(hidden, _) => {
                    let payload = &self.quantised.payloads[token * hidden..][..hidden];
                    out.copy_from_nonoverlapping(payload.as_ptr(), hidden);
                    let scales = &self.quantised.scales[token * record.scales..][..record.scales];
                    out.add(record.scales_at())
                        .cast::<u32>()
                        .copy_from_nonoverlapping(scales.as_ptr(), scales.len());
                }
            }
            if let Some(scales) = &tokens.scales {
                let own = scales.words.add(token * scales.token_stride);
                let to = out.add(record.scales_at()).cast::<u32>();
                for word in 0..scales.count {
                    to.add(word).write(own.add(word * scales.word_stride).read_unaligned());
                }
            }
            if record.top_k > 0 {
                let choices = routing.choices(token);
                out.add(record.choices_at())
                    .cast::<i32>()
                    .copy_from_nonoverlapping(choices.as_ptr(), record.top_k);
                let to = out.add(record.weights_at()).cast::<f32>();
                match tokens.weights {
                    Some(weights) => {
                        to.copy_from_nonoverlapping(weights.add(token * record.top_k), record.top_k)
                    }
                    None => to.write_bytes(0, record.top_k),
                }
            }
            out.add(record.token_at()).cast::<u32>().write(token as u32);
        }
    }

    /// Takes a rank's round out.
    fn take(&self, offset: usize, from: usize, round: u16, sink: &mut Sink<'_>) {
        let view = self.group.window().own();
        let area = view.pool(offset + from * self.area, self.area);
        let local = self.routing.local_experts();
        let before = usize::from(round) * self.slots;
        let Some(counts) = &self.counts else { return };
        let first = counts.from[..from].iter().sum::<u32>() as usize + before;
        let count = counts.from[from] as usize;
        for slot in 0..count.saturating_sub(before).min(self.slots) {
            // SAFETY: an area has `slots` records, which the sender has written before its mark.
            let record = unsafe { area.add(Record::first_at(local) + slot * self.record.stride()) };
            sink.put(self, from, first + slot, record);
        }
    }
}

/// Tells a dispatch's header from a combine's.
const KIND: usize = 1;

fn record_of(tokens: &Tokens, routing: &Routing) -> Result<Record> {
    let top_k = routing.top_k();
    let given = tokens.scales.map_or(0, |scales| scales.count);
    match tokens.payload {
        Payload::Bytes(payload) => Ok(Record { payload, scales: given, top_k }),
        Payload::Quantised(hidden, how) => {
            let unit = if how == Scales::Exponent { 4 * quantise::GROUP } else { quantise::GROUP };
            if !hidden.is_multiple_of(unit)
                || !tokens.rows.addr().is_multiple_of(2)
                || !tokens.stride.is_multiple_of(2)
            {
                return Err(Error::invalid(format!(
                    "rows to quantise have a multiple of {unit} bf16, not {hidden}"
                )));
            }
            Ok(Record { payload: hidden, scales: how.words(hidden), top_k })
        }
    }
}

/// By rank and expert, the row of the first token; and how many rows there must be.
fn first_rows(counts: &Counts, starts: &[usize]) -> (Vec<usize>, usize) {
    let local = starts.len();
    let mut next = starts.to_vec();
    let mut first = Vec::with_capacity(counts.per_expert.len());
    for of_rank in counts.per_expert.chunks_exact(local.max(1)) {
        first.extend_from_slice(&next);
        for (next, count) in next.iter_mut().zip(of_rank) {
            *next += *count as usize;
        }
    }
    (first, next.into_iter().max().unwrap_or(0))
}

/// Where tokens that arrive go.
struct Sink<'a> {
    outputs: Outputs,
    layout: &'a Layout,
    /// By rank and expert, the row of its next token ([`Layout::Experts`]).
    next: Vec<usize>,
    table: Vec<i32>,
    masters: Vec<u8>,
}

impl Sink<'_> {
    /// Puts a record, the `at`th that arrives, where it belongs.
    fn put(&mut self, dispatch: &Dispatch, from: usize, at: usize, record: *const u8) {
        let layout = &dispatch.record;
        let (top_k, local) = (layout.top_k, dispatch.routing.local_experts());
        let mut choices = [0; crate::routing::MAX_TOP_K];
        let mut weights = [0.0; crate::routing::MAX_TOP_K];
        // SAFETY: a record is all there, and its numbers are aligned, as its parts are.
        let token = unsafe {
            record
                .add(layout.choices_at())
                .cast::<i32>()
                .copy_to_nonoverlapping(choices.as_mut_ptr(), top_k);
            record
                .add(layout.weights_at())
                .cast::<f32>()
                .copy_to_nonoverlapping(weights.as_mut_ptr(), top_k);
            record.add(layout.token_at()).cast::<u32>().read()
        };
        let first = dispatch.group.rank() * local;
        let local_of =
            |choice: i32| usize::try_from(choice).ok()?.checked_sub(first).filter(|e| *e < local);
        let width = 2 + top_k;
        let table = &mut self.table[at * width..][..width];
        (table[0], table[1]) = (token as i32, from as i32);
        let own = choices[..top_k].iter().rposition(|choice| local_of(*choice).is_some());
        self.masters[at] = own.unwrap_or(0) as u8;
        match self.layout {
            Layout::Rows => {
                self.copy(layout, record, at, 0);
                for k in 0..top_k {
                    let local = local_of(choices[k]);
                    let is_foreign = local.is_none() && self.outputs.zeroes_foreign_weights;
                    // SAFETY: there are `top_k` choices and weights for each row, as `receive` demands.
                    unsafe {
                        if let Some(out) = self.outputs.choices {
                            out.put(at * top_k + k, local.map_or(-1, |local| local as i32));
                        }
                        if let Some(out) = self.outputs.weights {
                            out.add(at * top_k + k).write(if is_foreign {
                                0.0
                            } else {
                                weights[k]
                            });
                        }
                    }
                }
            }
            Layout::Experts(_) => {
                for k in 0..top_k {
                    let Some(expert) = local_of(choices[k]) else { continue };
                    let next = &mut self.next[from * local + expert];
                    let row = *next;
                    // A peer whose counts are not those of its records gets no further than this.
                    if row >= self.outputs.len {
                        continue;
                    }
                    *next += 1;
                    self.table[at * width + 2 + k] = row as i32;
                    self.copy(layout, record, row, expert);
                    if let Some(out) = self.outputs.weights {
                        // SAFETY: there is a weight for each row, as `receive` demands.
                        unsafe { out.add(row).write(weights[k]) };
                    }
                }
            }
        }
    }

    /// Copies a record's payload and scales to a row.
    fn copy(&self, layout: &Record, record: *const u8, row: usize, expert: usize) {
        let Outputs { rows, stride, scales, .. } = self.outputs;
        // SAFETY: the record is all there, and there is room for each row, as `receive` demands.
        unsafe {
            rows.add(row * stride).copy_from_nonoverlapping(record, layout.payload);
            if let Some(out) = scales {
                let words = record.add(layout.scales_at()).cast::<u32>();
                let to = out.words.add(row * out.row_stride + expert * out.expert_stride);
                for word in 0..layout.scales {
                    to.add(word * out.word_stride).write(words.add(word).read());
                }
            }
        }
    }
}
