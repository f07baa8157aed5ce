//! Dispatch: tokens go to the ranks of their experts.

mod handle;
mod memory;
mod quantised;
mod relay;
mod sink;

use std::{slice, sync::Arc, time::Duration};

pub(crate) use self::memory::TILE;
pub use self::{
    handle::{Handle, ReceiveCounts, RelayedTokens},
    memory::{
        ChoicesOut, DispatchInput, DispatchOutput, Payload, Room, RowLayout, ScalesIn, ScalesOut,
    },
};
use self::{
    quantised::QuantisedRows,
    sink::{ReceivedToken, Sink},
};
use crate::{
    host::{
        group::{CallGuard, Group, InterruptCheck, Milestone, WaitContext},
        wait_times::WaitTimes,
        window::PeerWriter,
    },
    shared::{
        error::{Error, Phase, Result},
        header::Header,
        nodes::Nodes,
        protocol::{Call, Mark, ReceiveMode, Step, Stream},
        record::{Areas, Record},
        routing::Routing,
        streaming,
    },
};

/// A dispatch in flight. A drop before its end gives the call up, and tells the peers that wait for
/// it.
pub struct Dispatch {
    context: DispatchContext,
    call: Call,
    guard: CallGuard,
    wait_times: WaitTimes,
    counts: Option<ReceiveCounts>,
    /// By node.
    relayed: Vec<RelayedTokens>,
}

/// The tokens that this rank sends, and the layout of a place.
struct DispatchContext {
    group: Arc<Group>,
    routing: Arc<Routing>,
    room: Room,
    areas: Areas,
    slots: usize,
    tokens: DispatchInput,
    /// `None` if rows are sent unchanged.
    quantised: Option<QuantisedRows>,
}

// SAFETY: any thread may use the memory behind its pointers, as `Dispatch::begin` demands.
unsafe impl Send for DispatchContext {}

impl Dispatch {
    /// Begins to send a rank's tokens. Where all fit at once ([`Room::Tokens`]), they have been
    /// sent when this returns.
    ///
    /// # Errors
    /// Arguments are wrong, or a peer is late.
    ///
    /// # Safety
    /// `tokens` describes memory with a row (and weights, and scales) for each token of `routing`,
    /// which any thread may read, until this returns or, in rounds and with `is_stable`, until the
    /// dispatch is over or dropped.
    pub unsafe fn begin(
        group: &Arc<Group>,
        routing: Arc<Routing>,
        tokens: DispatchInput,
        room: Room,
        is_interrupted: &mut InterruptCheck<'_>,
    ) -> Result<Self> {
        group.check_is_last(Phase::Dispatch)?;
        let mut areas = areas_of(group, &tokens, &routing)?;
        let slots = match room {
            Room::Tokens(slots) if slots > MAX_TOKENS => {
                let why = format!("room for {MAX_TOKENS} tokens of each rank at most, not {slots}");
                return Err(Error::invalid(why));
            }
            Room::Tokens(slots) => slots,
            Room::Bytes(len) => areas.slots_in(len),
        };
        if matches!(room, Room::Tokens(_)) && areas.place(slots) > group.pool_len() {
            // Without inboxes a place is smaller. All ranks come to the same result.
            areas.nodes = Nodes::one(group.ranks());
        }
        let participants = group.participants(areas.nodes);
        let over =
            |stream: &Stream| relay::tokens_over(&routing, areas.nodes, group.rank(), stream).len();
        let most = participants.streams.own.iter().map(over).max().unwrap_or(0);
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
        let place = group.place(areas.place(slots))?;
        let rounds = |stream: &Stream| over(stream).div_ceil(slots.max(1)) as u16;
        let call = Call::new(place, ReceiveMode::PerStream, participants, rounds);
        let guard = CallGuard::new(group, &call);
        // SAFETY: the caller guarantees it.
        let quantised =
            unsafe { QuantisedRows::of(group, &tokens, areas.record, routing.tokens()) };
        let relayed = vec![RelayedTokens::default(); areas.nodes.count];
        let group = Arc::clone(group);
        let wait_times = WaitTimes::new(group.ranks());
        let context = DispatchContext { group, routing, room, areas, slots, tokens, quantised };
        let mut dispatch = Self { context, call, guard, wait_times, counts: None, relayed };
        if matches!(room, Room::Tokens(_)) {
            dispatch.drive(Milestone::AllSent, is_interrupted, None)?;
        }
        Ok(dispatch)
    }

    /// Counts of the tokens that arrive. Waits until every rank has sent its own.
    ///
    /// # Errors
    /// A peer is late, or makes another call.
    pub fn counts(&mut self, is_interrupted: &mut InterruptCheck<'_>) -> Result<&ReceiveCounts> {
        let counts = match self.counts.take() {
            Some(counts) => counts,
            None => {
                self.drive(Milestone::FirstRounds, is_interrupted, None)?;
                let give_up = |_: &Error| self.context.group.window().set_fault(self.call.number());
                self.context.read_counts(&self.call).inspect_err(give_up)?
            }
        };
        Ok(self.counts.insert(counts))
    }

    /// By rank, the time that [`counts`](Self::counts) waited for it; zero for data that was there
    /// before.
    #[must_use]
    pub fn waited(&self) -> Vec<Duration> {
        self.wait_times.waited()
    }

    /// Takes out the received tokens, and ends the call. Counted rows of a rank that was lost after
    /// its first round are zeros without a choice.
    ///
    /// # Errors
    /// A peer is late.
    ///
    /// # Safety
    /// `outputs` has memory for every row of `layout`, which only this call uses.
    pub unsafe fn receive(
        mut self,
        outputs: DispatchOutput,
        layout: &RowLayout,
        is_interrupted: &mut InterruptCheck<'_>,
    ) -> Result<Handle> {
        let counts = self.counts(is_interrupted)?.clone();
        let mut sink = Sink::new(outputs, layout, &counts, self.context.areas.record)?;
        self.drive(Milestone::Over, is_interrupted, Some((&mut sink, &counts)))?;
        self.guard.has_ended = true;
        // SAFETY: the caller guarantees it.
        unsafe {
            sink.write_scales(self.context.areas.record.scales);
            sink.blank_missing(&counts, self.context.areas.record);
        }
        let DispatchContext { group, routing, room, .. } = self.context;
        let Sink { table, last_choices, .. } = sink;
        let sent_to = (0..group.ranks()).map(|rank| self.call.is_there(rank)).collect();
        let relayed = self.relayed;
        Ok(Handle { group, routing, room, sent_to, counts, table, last_choices, relayed })
    }

    fn drive(
        &mut self,
        until: Milestone,
        is_interrupted: &mut InterruptCheck<'_>,
        mut sink: Option<(&mut Sink<'_>, &ReceiveCounts)>,
    ) -> Result<()> {
        let Self { context, call, wait_times, relayed, .. } = self;
        let wait_times = (until != Milestone::AllSent).then_some(wait_times);
        let mut wait = WaitContext { phase: Phase::Dispatch, is_interrupted, wait_times };
        context.group.drive(call, until, &mut wait, |call, step| {
            match (step, &mut sink) {
                (Step::Send { stream, mark }, _) => match context.crosses_nodes(&stream) {
                    true => context.send_to_relay(call, &stream, mark),
                    false => context.send(call, &stream, mark),
                },
                (Step::Relay { stream, mark }, _) => {
                    let node = context.areas.nodes.node_of(stream.owner);
                    context.relay(call, &stream, mark, &mut relayed[node])?;
                }
                (Step::Take { stream: Some(stream), .. }, Some((sink, counts))) => {
                    context.take(call, stream.owner, counts, sink);
                }
                _ => {}
            }
            Ok(())
        })
    }
}

impl DispatchContext {
    /// Reads the headers and counts, and compares the headers with this rank's.
    fn read_counts(&self, call: &Call) -> Result<ReceiveCounts> {
        let (ranks, local) = (self.group.ranks(), self.routing.local_experts());
        let mut counts = ReceiveCounts {
            per_rank: vec![0; ranks],
            per_expert: vec![0; ranks * local],
            tokens_of: vec![0; ranks],
        };
        for stream in call.arriving() {
            let [theirs, tokens] = self.counts_over(call, stream)?;
            let from = stream.owner;
            let ours = match self.room {
                Room::Tokens(slots) => tokens.min(slots as u64),
                Room::Bytes(_) => tokens,
            };
            if theirs > ours {
                let (phase, rank) = (Phase::Dispatch, self.group.rank());
                let what = "tokens for this rank";
                return Err(Error::Disagree { phase, rank, peer: from, what, theirs, ours });
            }
            counts.per_rank[from] = theirs as u32;
            counts.tokens_of[from] = tokens as u32;
            let area = self.area(call, from);
            // SAFETY: behind its first word, the area begins with counts, which the sender has
            // written before its mark.
            let words = unsafe { slice::from_raw_parts(area.cast::<u32>().add(1), local) };
            counts.per_expert[from * local..][..local].copy_from_slice(words);
        }
        Ok(counts)
    }

    /// The counts in a stream's header, if its sender agrees with this rank: tokens over this
    /// stream, and all of the rank's.
    fn counts_over(&self, call: &Call, stream: &Stream) -> Result<[u64; 2]> {
        let theirs = self.group.window().header(stream, call.number());
        let counts = self.header([0; 2]).values_of(self.group.rank(), stream.owner, theirs)?;
        let [over, tokens] = counts;
        Ok([over, tokens.min(MAX_TOKENS as u64)])
    }

    fn header(&self, counts: [usize; 2]) -> Header<5, 2> {
        let Record { payload, scales, top_k } = self.areas.record;
        let agreed = [
            ("bytes of payload", payload),
            ("words of scales", scales),
            ("top-k", top_k),
            ("experts", self.routing.num_experts()),
            ("slots", self.slots),
        ];
        Header { phase: Phase::Dispatch, agreed, values: counts }
    }

    /// The offset in a pool of the area for a rank's data.
    fn area_at(&self, call: &Call, from: usize) -> usize {
        call.place().offset + self.areas.area_at(self.slots, from)
    }

    /// The area of a rank's data in this rank's window.
    fn area(&self, call: &Call, from: usize) -> *mut u8 {
        let len = self.areas.record.area(self.areas.local_experts, self.slots);
        self.group.window().own().pool(self.area_at(call, from), len)
    }

    /// The offset of a record in its area.
    fn record_at(&self, slot: usize) -> usize {
        Record::first_at(self.areas.local_experts) + slot * self.areas.record.stride()
    }

    /// Writes a round to the place of a rank of this node, or, where tokens are not relayed, of any
    /// rank.
    fn send(&self, call: &Call, stream: &Stream, mark: Mark) {
        let Some(mut writer) = self.group.window().writer(stream) else { return };
        let tokens = self.routing.tokens_to(stream.peer);
        let round = self.round_of(tokens.len(), mark.round);
        let area_counts = AreaCounts {
            counts: [tokens.len(), self.routing.tokens()],
            in_round: round.len(),
            per_expert: self.routing.per_expert_of(stream.peer),
        };
        self.write_counts(call, stream, &mut writer, &area_counts, mark);
        let area = self.area_at(call, stream.owner);
        let reads_in_place = stream.peer == self.group.rank() && self.reads_own_in_place();
        for (slot, token) in tokens[round].iter().enumerate() {
            let out = writer.memory_at(area + self.record_at(slot), self.areas.record.stride());
            // SAFETY: an area has `slots` records, which only this rank uses until the mark.
            unsafe {
                match reads_in_place {
                    true => self.write_rest(out, *token),
                    false => self.write(out, *token),
                }
            }
        }
    }

    /// Whether payloads of this rank's tokens do not change until the dispatch is over. Those for
    /// itself then stay out of its window.
    fn reads_own_in_place(&self) -> bool {
        // In rounds rows do not change either: see `begin`.
        self.quantised.is_some() || self.tokens.is_stable || matches!(self.room, Room::Bytes(_))
    }

    /// A token's payload.
    fn payload(&self, token: u32) -> *const u8 {
        let token = token as usize;
        match &self.quantised {
            Some(quantised) => quantised.payload(token).as_ptr(),
            None => self.tokens.rows.wrapping_add(token * self.tokens.stride),
        }
    }

    /// The tokens, of so many, that go in a round.
    fn round_of(&self, tokens: usize, round: u16) -> std::ops::Range<usize> {
        let first = tokens.min(usize::from(round) * self.slots);
        first..tokens.min(first + self.slots)
    }

    /// Writes the number of records in the receiver's area, and, in the first round, the header and
    /// the counts by expert.
    fn write_counts(
        &self,
        call: &Call,
        stream: &Stream,
        writer: &mut PeerWriter<'_>,
        area_counts: &AreaCounts<'_>,
        mark: Mark,
    ) {
        let area = self.area_at(call, stream.owner);
        let counts = if mark.round == 0 { area_counts.per_expert } else { &[] };
        if mark.round == 0 {
            writer.write_header(call.number(), self.header(area_counts.counts).to_words());
        }
        let out = writer.memory_at(area, 4 * (1 + counts.len())).cast::<u32>();
        // SAFETY: an area begins with a count and those of the receiver's experts, and only this
        // rank uses it until the mark.
        unsafe {
            out.write(area_counts.in_round as u32);
            out.add(1).copy_from_nonoverlapping(counts.as_ptr(), counts.len());
        }
    }

    /// Writes a token's record.
    ///
    /// # Safety
    /// There is room for one.
    unsafe fn write(&self, out: *mut u8, token: u32) {
        // SAFETY: the caller guarantees it, and the payload may be read, as `begin` demands.
        unsafe {
            out.copy_from_nonoverlapping(self.payload(token), self.areas.record.payload);
            self.write_rest(out, token);
        }
    }

    /// Writes a token's record without its payload.
    ///
    /// # Safety
    /// There is room for one.
    unsafe fn write_rest(&self, out: *mut u8, token: u32) {
        let Self { areas: Areas { record, .. }, tokens, routing, quantised, .. } = self;
        let token = token as usize;
        // SAFETY: `out` has room for a record, with its parts, which are aligned, where `record`
        // says; the token's scales and weights may be read, as `begin` demands. The caller's scales
        // are read unaligned.
        unsafe {
            if let Some(quantised) = quantised {
                let scales = quantised.scales(token);
                out.add(record.scales_at())
                    .cast::<u32>()
                    .copy_from_nonoverlapping(scales.as_ptr(), scales.len());
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

    /// Takes out a round of a rank's tokens.
    fn take(&self, call: &Call, from: usize, counts: &ReceiveCounts, sink: &mut Sink<'_>) {
        let area = self.area(call, from);
        // SAFETY: an area begins with a count, which was written before its mark.
        let in_round = unsafe { area.cast::<u32>().read() } as usize;
        let rows = counts.rows_from(from);
        let reads_in_place = from == self.group.rank() && self.reads_own_in_place();
        let own = self.routing.tokens_to(self.group.rank());
        for slot in 0..in_round.min(self.slots) {
            let at = rows.start + sink.taken[from];
            // Bounds the tokens of a peer with rounds that have more than it announced.
            if at >= rows.end {
                break;
            }
            let own = own.get(sink.taken[from]).filter(|_| reads_in_place);
            sink.taken[from] += 1;
            // SAFETY: an area has `slots` records, which the sender has written before its mark.
            unsafe {
                let record = area.add(self.record_at(slot));
                let payload = own.map_or(record.cast_const(), |token| self.payload(*token));
                sink.put(self, ReceivedToken { from, at, record, payload });
            }
        }
        streaming::fence();
    }
}

/// The counts for a receiver of an area.
struct AreaCounts<'a> {
    /// Tokens for it, and all tokens of the rank.
    counts: [usize; 2],
    in_round: usize,
    per_expert: &'a [u32],
}

/// More tokens than any rank has. The bytes for so many do not overflow.
const MAX_TOKENS: usize = 1 << 28;

/// The layout of a place for these tokens.
fn areas_of(group: &Group, tokens: &DispatchInput, routing: &Routing) -> Result<Areas> {
    let (record, ranks, nodes) = (record_of(tokens, routing)?, group.ranks(), routing.nodes());
    if routing.ranks() != ranks {
        let why = format!("the routing is for {} ranks of {ranks}", routing.ranks());
        return Err(Error::invalid(why));
    }
    if nodes.count > 1 && group.relays() != Some(nodes) {
        let why = format!(
            "the routing relays on {} nodes of {} ranks, and this group does not",
            nodes.count, nodes.ranks
        );
        return Err(Error::invalid(why));
    }
    Ok(Areas { record, local_experts: routing.local_experts(), nodes })
}

fn record_of(tokens: &DispatchInput, routing: &Routing) -> Result<Record> {
    let record = tokens.payload.record(routing.top_k())?;
    if matches!(tokens.payload, Payload::Bytes(_)) {
        return Ok(Record { scales: tokens.scales.map_or(0, |scales| scales.count), ..record });
    }
    if tokens.rows.addr().is_multiple_of(2) && tokens.stride.is_multiple_of(2) {
        return Ok(record);
    }
    Err(Error::invalid("rows to quantise are aligned to 2 bytes"))
}
