//! Tokens go to the ranks of their experts.

mod handle;
mod memory;
mod sink;

use std::{slice, sync::Arc};

use self::sink::Sink;
pub use self::{
    handle::{Counts, Handle},
    memory::{Choices, Layout, Outputs, Payload, Room, ScalesIn, ScalesOut, Tokens},
};
use crate::{
    error::{Error, Phase, Result},
    group::{Group, Interrupted, Until, Wait},
    header::Header,
    numerics::quantise::{self, Scales},
    placing::Place,
    protocol::{Call, Mark, Step, Takes},
    record::Record,
    routing::Routing,
};

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
            let window = self.group.window();
            let theirs = window.header(from, self.call.number());
            let [theirs, tokens] = self.header(0).told_by(self.group.rank(), from, theirs)?;
            let most = tokens.min(MAX_TOKENS);
            let slots = if matches!(self.room, Room::Tokens(_)) { self.slots as u64 } else { most };
            if theirs > most.min(slots) {
                let (phase, rank, what) =
                    (Phase::Dispatch, self.group.rank(), "tokens for this rank");
                let ours = most.min(slots);
                return Err(Error::Disagree { phase, rank, peer: from, what, theirs, ours });
            }
            counts.from[from] = theirs as u32;
            counts.tokens_of[from] = most as u32;
            let area = window.own().pool(self.area_at(from), self.area);
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
        let mut sink = Sink::new(outputs, layout, &counts, self.routing.top_k())?;
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
                (Step::Send { to, mark }, _) => self.send(offset, to, mark),
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
    fn send(&self, offset: usize, to: usize, mark: Mark) {
        let (window, round) = (self.group.window(), mark.round);
        let Some(view) = window.of(to) else { return };
        let area = view.pool(offset + self.group.rank() * self.area, self.area);
        let local = self.routing.local_experts();
        if round == 0 {
            window.set_header(to, mark.call, self.header(to).to_words());
            let counts = self.routing.per_expert_of(to);
            // SAFETY: an area begins with counts, and is ours to write until the mark.
            unsafe { area.cast::<u32>().copy_from_nonoverlapping(counts.as_ptr(), counts.len()) };
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
            // SAFETY: as above.
            unsafe { sink.put(self, from, first + slot, record) };
        }
    }
}

/// More tokens than any rank has: a header that says more is none.
const MAX_TOKENS: u64 = 1 << 28;

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
