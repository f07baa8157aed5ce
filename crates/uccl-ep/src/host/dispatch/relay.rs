//! Relays of a dispatch: a token for another node goes once to the relay there, which passes it on.

use std::slice;

use super::{AreaCounts, DispatchContext, RelayedTokens};
use crate::shared::{
    error::Result,
    nodes::Nodes,
    protocol::{Call, Mark, Stream},
    routing::{MAX_TOP_K, Routing},
};

/// The tokens that leave this rank over one of its own streams.
pub(super) fn tokens_over<'a>(
    routing: &'a Routing,
    nodes: Nodes,
    me: usize,
    stream: &Stream,
) -> &'a [u32] {
    let node = nodes.node_of(stream.peer);
    match node == nodes.node_of(me) {
        true => routing.tokens_to(stream.peer),
        false => &routing.node_tokens(node).tokens,
    }
}

impl DispatchContext {
    /// Whether a stream goes to a relay on another node.
    pub(super) fn crosses_nodes(&self, stream: &Stream) -> bool {
        let nodes = self.areas.nodes;
        nodes.node_of(stream.peer) != nodes.node_of(self.group.rank())
    }

    /// The offset of a node's inbox in the pool of a rank on another node.
    fn inbox_at(&self, call: &Call, rank: usize, node: usize) -> usize {
        let own = self.areas.nodes.node_of(rank);
        call.place().offset + self.areas.inbox_at(self.slots, node - usize::from(node > own))
    }

    /// Writes a round to the relay on another node.
    pub(super) fn send_to_relay(&self, call: &Call, stream: &Stream, mark: Mark) {
        let Some(mut writer) = self.group.window().writer(stream) else { return };
        let Self { areas, routing, slots, .. } = self;
        let (nodes, me) = (areas.nodes, self.group.rank());
        let to = routing.node_tokens(nodes.node_of(stream.peer));
        let round = self.round_of(to.tokens.len(), mark.round);
        let inbox = self.inbox_at(call, stream.peer, nodes.node_of(me));
        if mark.round == 0 {
            let counts = [to.tokens.len(), routing.tokens()];
            writer.write_header(call.number(), self.header(counts).to_words());
            let out = writer.memory_at(inbox, areas.destinations_at());
            for (local, rank) in nodes.ranks_of(nodes.node_of(stream.peer)).enumerate() {
                let counts = routing.per_expert_of(rank);
                // SAFETY: there is room for the counts of all ranks, which only this rank
                // uses until the mark.
                unsafe {
                    let out = out.add(areas.counts_at(local)).cast::<u32>();
                    out.write(routing.tokens_to(rank).len() as u32);
                    out.add(1).copy_from_nonoverlapping(counts.as_ptr(), counts.len());
                }
            }
        }
        let destinations = &to.destinations[round.clone()];
        let out =
            writer.memory_at(inbox + areas.destinations_at(), 8 * destinations.len()).cast::<u64>();
        // SAFETY: there is room for a word for each of `slots` records.
        unsafe { out.copy_from_nonoverlapping(destinations.as_ptr(), destinations.len()) };
        let (first, stride) = (inbox + areas.first_of_inbox(*slots), areas.record.stride());
        for (slot, token) in to.tokens[round].iter().enumerate() {
            // SAFETY: there is room for `slots` records.
            unsafe { self.write(writer.memory_at(first + slot * stride, stride), *token) };
        }
    }

    /// Passes a round from another node on to a rank of this node: the tokens for that rank. The
    /// round for this rank itself is also remembered for the combine.
    pub(super) fn relay(
        &self,
        call: &Call,
        stream: &Stream,
        mark: Mark,
        relayed: &mut RelayedTokens,
    ) -> Result<()> {
        let Self { areas, group, slots, .. } = self;
        let (window, me) = (group.window(), group.rank());
        let mut counts = [0; 2];
        for input in call.inputs_of(stream.owner) {
            counts = self.counts_over(call, input)?;
        }
        let [tokens, all] = counts.map(|count| usize::try_from(count).unwrap_or(usize::MAX));
        let inbox = self.inbox_at(call, me, areas.nodes.node_of(stream.owner));
        let inbox = window.own().pool(inbox, areas.inbox(*slots));
        let in_round = self.round_of(tokens, mark.round).len();
        // SAFETY: the inbox is so long, with its parts where `areas` says; the sender has written
        // them before its mark, and writes again only when this round has been passed on.
        let (for_rank, destinations, records) = unsafe {
            let counts = inbox.add(areas.counts_at(areas.nodes.local_of(stream.peer)));
            (
                slice::from_raw_parts(counts.cast::<u32>(), 1 + areas.local_experts),
                slice::from_raw_parts(inbox.add(areas.destinations_at()).cast::<u64>(), in_round),
                inbox.add(areas.first_of_inbox(*slots)),
            )
        };
        if stream.peer == me {
            // SAFETY: there are as many records.
            unsafe { self.remember(destinations, records, relayed) };
        }
        let Some(mut writer) = window.writer(stream) else { return Ok(()) };
        let bit = areas.nodes.local_of(stream.peer);
        let its = destinations.iter().enumerate().filter(|(_, ranks)| *ranks >> bit & 1 == 1);
        let area_counts = AreaCounts {
            counts: [for_rank[0] as usize, all],
            in_round: its.clone().count(),
            per_expert: &for_rank[1..],
        };
        self.write_counts(call, stream, &mut writer, &area_counts, mark);
        let (area, stride) = (self.area_at(call, stream.owner), areas.record.stride());
        for (slot, (nth, _)) in its.enumerate() {
            let out = writer.memory_at(area + self.record_at(slot), stride);
            // SAFETY: the inbox and the area have `slots` records each.
            unsafe { out.copy_from_nonoverlapping(records.add(nth * stride), stride) };
        }
        Ok(())
    }

    /// Remembers a round's tokens for the combine.
    ///
    /// # Safety
    /// There are as many records.
    unsafe fn remember(
        &self,
        destinations: &[u64],
        records: *const u8,
        relayed: &mut RelayedTokens,
    ) {
        let record = self.areas.record;
        let mut choices = [0; MAX_TOP_K];
        relayed.destinations.extend_from_slice(destinations);
        for nth in 0..destinations.len() {
            // SAFETY: the caller guarantees it; numbers are aligned, as the parts of a record are.
            unsafe {
                let record_at = records.add(nth * record.stride());
                let from = record_at.add(record.choices_at()).cast::<i32>();
                from.copy_to_nonoverlapping(choices.as_mut_ptr(), record.top_k);
                relayed.tokens.push(record_at.add(record.token_at()).cast::<u32>().read());
            }
            relayed.choices.extend_from_slice(&choices[..record.top_k]);
        }
    }
}
