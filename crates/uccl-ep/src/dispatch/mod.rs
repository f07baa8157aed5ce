//! Tokens go to the ranks of their experts.

mod handle;
mod memory;
mod sink;

use std::{slice, sync::Arc, time::Duration};

use self::sink::Sink;
pub use self::{
    handle::{Counts, Handle},
    memory::{Choices, Layout, Outputs, Payload, Room, ScalesIn, ScalesOut, Tokens},
};
use crate::{
    error::{Error, Phase, Result},
    group::{Group, Interrupted, Until, Wait},
    header::Header,
    numerics::{
        nvfp4,
        quantise::{self, Scales},
    },
    protocol::{Call, Step, Takes},
    record::Record,
    routing::Routing,
    waits::Waits,
    window::View,
};

/// A dispatch under way.
pub struct Dispatch {
    part: Part,
    call: Call,
    waits: Waits,
    counts: Option<Counts>,
}

/// What this rank sends, and how a place is divided.
struct Part {
    group: Arc<Group>,
    routing: Arc<Routing>,
    room: Room,
    record: Record,
    slots: usize,
    area: usize,
    tokens: Tokens,
    quantised: Quantised,
}

/// Rows that were quantised: payloads and scales.
#[derive(Default)]
struct Quantised {
    payloads: Vec<u8>,
    scales: Vec<u32>,
}

// SAFETY: what its pointers lead to may be used by any thread, as `Dispatch::begin` demands.
unsafe impl Send for Part {}

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
            Room::Tokens(slots) if slots > MAX_TOKENS => {
                let why = format!("room for {MAX_TOKENS} tokens of each rank at most, not {slots}");
                return Err(Error::invalid(why));
            }
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
        // SAFETY: as the caller has it.
        let quantised = unsafe { quantised(&tokens, record, routing.tokens()) };
        let group = Arc::clone(group);
        let part = Part { group, routing, room, record, slots, area, tokens, quantised };
        let mut dispatch = Self { part, call, waits: Waits::new(ranks), counts: None };
        if matches!(room, Room::Tokens(_)) {
            dispatch.drive(Until::SentAll, is_interrupted, None)?;
        }
        Ok(dispatch)
    }

    /// How much arrives; waits until every rank has said so.
    ///
    /// # Errors
    /// A peer is late, or makes another call.
    pub fn counts(&mut self, is_interrupted: &mut Interrupted<'_>) -> Result<&Counts> {
        let counts = match self.counts.take() {
            Some(counts) => counts,
            None => {
                self.drive(Until::HeardAll, is_interrupted, None)?;
                let give_up = |_: &Error| self.part.group.window().set_fault(self.call.number());
                self.part.heard(&self.call).inspect_err(give_up)?
            }
        };
        Ok(self.counts.insert(counts))
    }

    /// By rank, how long [`counts`](Self::counts) waited for it. Data that was there before took none of that time.
    #[must_use]
    pub fn waited(&self) -> Vec<Duration> {
        self.waits.waited()
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
        let mut sink = Sink::new(outputs, layout, &counts, self.part.routing.top_k())?;
        self.drive(Until::Over, is_interrupted, Some((&mut sink, &counts)))?;
        let Part { group, routing, room, .. } = self.part;
        let Sink { table, masters, .. } = sink;
        Ok(Handle { group, routing, room, counts, table, masters })
    }

    fn drive(
        &mut self,
        until: Until,
        is_interrupted: &mut Interrupted<'_>,
        mut sink: Option<(&mut Sink<'_>, &Counts)>,
    ) -> Result<()> {
        let Self { part, call, waits, .. } = self;
        let waits = (until != Until::SentAll).then_some(waits);
        let mut wait = Wait { phase: Phase::Dispatch, is_interrupted, waits };
        part.group.drive(call, until, &mut wait, |call, step| {
            match (step, &mut sink) {
                (Step::Send { to, mark }, _) => part.send(call, to, mark.round),
                (Step::Take { from: Some(from), round }, Some((sink, counts))) => {
                    part.take(call, from, round, counts, sink);
                }
                _ => {}
            }
            Ok(())
        })
    }
}

impl Part {
    /// Reads the headers, and compares them with what this rank would write.
    fn heard(&self, call: &Call) -> Result<Counts> {
        let (ranks, local) = (self.group.ranks(), self.routing.local_experts());
        let mut counts = Counts {
            from: vec![0; ranks],
            per_expert: vec![0; ranks * local],
            tokens_of: vec![0; ranks],
        };
        for from in (0..ranks).filter(|rank| !self.group.is_masked(*rank)) {
            let window = self.group.window();
            let theirs = window.header(from, call.number());
            let [theirs, tokens] = self.header(0).told_by(self.group.rank(), from, theirs)?;
            let tokens = tokens.min(MAX_TOKENS as u64);
            let ours = match self.room {
                Room::Tokens(slots) => tokens.min(slots as u64),
                Room::Bytes(_) => tokens,
            };
            if theirs > ours {
                let (phase, rank) = (Phase::Dispatch, self.group.rank());
                let what = "tokens for this rank";
                return Err(Error::Disagree { phase, rank, peer: from, what, theirs, ours });
            }
            counts.from[from] = theirs as u32;
            counts.tokens_of[from] = tokens as u32;
            let area = self.area(window.own(), call, from);
            // SAFETY: the area begins with counts, which the sender has written before its mark.
            let words = unsafe { slice::from_raw_parts(area.cast::<u32>(), local) };
            counts.per_expert[from * local..][..local].copy_from_slice(words);
        }
        Ok(counts)
    }

    fn header(&self, to: usize) -> Header<5, 2> {
        let Record { payload, scales, top_k } = self.record;
        let agreed = [
            ("bytes of payload", payload),
            ("words of scales", scales),
            ("top-k", top_k),
            ("experts", self.routing.num_experts()),
            ("slots", self.slots),
        ];
        let told = [self.routing.to(to).len(), self.routing.tokens()];
        Header { phase: Phase::Dispatch, agreed, told }
    }

    /// The area of a rank's data in a window.
    fn area(&self, view: &View, call: &Call, from: usize) -> *mut u8 {
        view.pool(call.place().offset + from * self.area, self.area)
    }

    /// Where an area's record is, from the area's start.
    fn record_at(&self, slot: usize) -> usize {
        Record::first_at(self.routing.local_experts()) + slot * self.record.stride()
    }

    /// Writes a round to a rank's place.
    fn send(&self, call: &Call, to: usize, round: u16) {
        let window = self.group.window();
        let Some(view) = window.of(to) else { return };
        let area = self.area(view, call, self.group.rank());
        if round == 0 {
            window.set_header(to, call.number(), self.header(to).to_words());
            let counts = self.routing.per_expert_of(to);
            // SAFETY: an area begins with counts, and is ours to write until the mark.
            unsafe { area.cast::<u32>().copy_from_nonoverlapping(counts.as_ptr(), counts.len()) };
        }
        let tokens =
            self.routing.to(to).iter().skip(usize::from(round) * self.slots).take(self.slots);
        for (slot, token) in tokens.enumerate() {
            // SAFETY: an area has `slots` records behind its first; they are ours to write until the mark.
            unsafe { self.write(area.add(self.record_at(slot)), *token as usize) };
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
                Payload::Quantised(..) | Payload::Nvfp4(..) => {
                    let len = record.payload;
                    let payload = &self.quantised.payloads[token * len..][..len];
                    out.copy_from_nonoverlapping(payload.as_ptr(), len);
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
    fn take(&self, call: &Call, from: usize, round: u16, counts: &Counts, sink: &mut Sink<'_>) {
        let area = self.area(self.group.window().own(), call, from);
        let before = usize::from(round) * self.slots;
        let rows = counts.rows_from(from);
        for slot in 0..rows.len().saturating_sub(before).min(self.slots) {
            // SAFETY: an area has `slots` records, which the sender has written before its mark.
            unsafe {
                sink.put(self, from, rows.start + before + slot, area.add(self.record_at(slot)))
            };
        }
    }
}

/// More tokens than any rank has. Bytes for as many do not overflow.
const MAX_TOKENS: usize = 1 << 28;

/// What is quantised of a rank's tokens.
///
/// # Safety
/// There are so many tokens, and they may be read.
unsafe fn quantised(tokens: &Tokens, record: Record, count: usize) -> Quantised {
    let (Payload::Quantised(hidden, _) | Payload::Nvfp4(hidden, _)) = tokens.payload else {
        return Quantised::default();
    };
    let mut payloads = vec![0; count * record.payload];
    let mut scales = vec![0; count * record.scales];
    let rows =
        payloads.chunks_exact_mut(record.payload).zip(scales.chunks_exact_mut(record.scales));
    for (token, (payload, scales)) in rows.enumerate() {
        // SAFETY: the row of this token, of `hidden` bf16; `record_of` has seen that it is aligned.
        let row = unsafe {
            slice::from_raw_parts(tokens.rows.add(token * tokens.stride).cast::<u16>(), hidden)
        };
        match tokens.payload {
            Payload::Bytes(_) => {}
            Payload::Quantised(_, how) => quantise::row(row, how, payload, scales),
            Payload::Nvfp4(_, global_scale) => nvfp4::row(row, global_scale, payload, scales),
        }
    }
    Quantised { payloads, scales }
}

fn record_of(tokens: &Tokens, routing: &Routing) -> Result<Record> {
    let top_k = routing.top_k();
    let given = tokens.scales.map_or(0, |scales| scales.count);
    match tokens.payload {
        Payload::Bytes(payload) => Ok(Record { payload, scales: given, top_k }),
        Payload::Quantised(hidden, how) => {
            let unit = if how == Scales::Exponent { 4 * quantise::GROUP } else { quantise::GROUP };
            check_rows(tokens, hidden, unit)?;
            Ok(Record { payload: hidden, scales: how.words(hidden), top_k })
        }
        Payload::Nvfp4(hidden, global_scale) => {
            check_rows(tokens, hidden, nvfp4::UNIT)?;
            if !(global_scale > 0.0 && global_scale.is_finite()) {
                let why = format!("a global scale is finite and more than 0, not {global_scale}");
                return Err(Error::invalid(why));
            }
            Ok(Record { payload: hidden / 2, scales: hidden / nvfp4::UNIT, top_k })
        }
    }
}

/// Refuses rows of `hidden` bf16 that cannot be quantised, because they are not aligned or have no multiple of `unit`.
fn check_rows(tokens: &Tokens, hidden: usize, unit: usize) -> Result<()> {
    let is_aligned = tokens.rows.addr().is_multiple_of(2) && tokens.stride.is_multiple_of(2);
    if hidden > 0 && hidden.is_multiple_of(unit) && is_aligned {
        return Ok(());
    }
    Err(Error::invalid(format!("rows to quantise have a multiple of {unit} bf16, not {hidden}")))
}
