//! Relays of a combine: they sum a node's rows of a token, and only the sum crosses to the token's
//! node.

use std::slice;

use smallvec::SmallVec;

use super::{
    CombineContext, CombineInput, CombineOutput, CombineRows, Order, SumOrder, SumRows, Term, add,
    one_of, put, slot_of_one,
};
use crate::{
    host::dispatch::Handle,
    numerics::sum,
    shared::{
        error::{Error, Result},
        nodes::Nodes,
        protocol::{Call, Mark, Stream},
        routing::MAX_TOP_K,
    },
};

/// The layout of a place with relays: for tokens of each node, rows of this node's ranks; and for
/// this rank's own tokens, a row of each other node.
pub(super) struct RelayLayout {
    pub(super) nodes: Nodes,
    order: Order,
    top_k: usize,
}

/// Rows of a token in a combine's place, where each rank sends one: to the token's rank, or, on
/// several nodes, to a relay, which sends one row of its node.
#[must_use]
pub fn slots_of(nodes: Nodes, top_k: usize) -> usize {
    let of_node = one_of(nodes.ranks, top_k);
    match nodes.count {
        1 => of_node,
        count => count * of_node + one_of(count, top_k),
    }
}

impl RelayLayout {
    /// `None` if rows are not relayed.
    pub(super) fn of(handle: &Handle, input: &CombineInput) -> Result<Option<Self>> {
        let (nodes, top_k) = (handle.routing.nodes(), handle.routing.top_k());
        let Some(order) = input.relays.filter(|_| handle.group.relays() == Some(nodes)) else {
            return Ok(None);
        };
        if input.sends == CombineRows::EachExpert || input.is_packed {
            return Err(Error::invalid("a relay sums one row of each rank, which is not packed"));
        }
        Ok(Some(Self { nodes, order, top_k }).filter(|_| handle.relayed.len() == nodes.count))
    }

    /// Rows of a token.
    pub(super) fn slots(&self) -> usize {
        slots_of(self.nodes, self.top_k)
    }

    /// Rows of a token from a node's ranks.
    fn of_node(&self) -> usize {
        one_of(self.nodes.ranks, self.top_k)
    }

    /// The slot of a rank of this node, for a token of rank `owner`.
    pub(super) fn near(&self, owner: usize, rank: usize, last: usize) -> usize {
        let (nodes, local) = (self.nodes, self.nodes.local_of(rank));
        nodes.node_of(owner) * self.of_node() + slot_of_one(local, nodes.ranks, self.top_k, last)
    }

    /// The slot of another node.
    fn far(&self, node: usize, last: usize) -> usize {
        let count = self.nodes.count;
        count * self.of_node() + slot_of_one(node, count, self.top_k, last)
    }
}

/// A token at a node: the ranks there that it went to, and its choices.
struct TokenAtNode<'a> {
    owner: usize,
    destinations: u64,
    choices: &'a [i32],
}

/// A node's part of a token's sum.
struct NodeTerm {
    node: usize,
    destinations: u64,
    last: usize,
}

impl CombineContext {
    /// Checks that the sums have the order of the relays' sums.
    pub(super) fn check_order(&self, sums: SumOrder) -> Result<()> {
        let Some(relay_layout) = &self.relay_layout else { return Ok(()) };
        let is_same = match relay_layout.order {
            Order::ByRank => sums == SumOrder::ByRank,
            Order::ByChoice => sums == SumOrder::ByChoice,
        };
        let why = || {
            Error::invalid(format!("relays sum {:?}, and sums are {sums:?}", relay_layout.order))
        };
        is_same.then_some(()).ok_or_else(why)
    }

    /// Sums the rows that this node's ranks return for tokens of a rank on another node, and sends
    /// the sums there.
    pub(super) fn relay(&self, call: &Call, stream: &Stream, mark: Mark) -> Result<()> {
        call.inputs_of(stream.owner)
            .try_for_each(|input| self.peer_block(call, input).map(drop))?;
        let Some(relay_layout) = &self.relay_layout else { return Ok(()) };
        let Some(mut writer) = self.group().window().writer(stream) else { return Ok(()) };
        if mark.round == 0 {
            writer.write_header(call.number(), self.header().to_words());
        }
        let node = relay_layout.nodes.node_of(self.group().rank());
        let relayed = &self.handle.relayed[relay_layout.nodes.node_of(stream.owner)];
        let first = usize::from(mark.round) * self.tokens_per_round;
        let from = relayed.tokens.partition_point(|token| (*token as usize) < first);
        let mut weights = [0.0; MAX_TOP_K];
        for (nth, token) in relayed.tokens.iter().enumerate().skip(from) {
            let token = *token as usize - first;
            if token >= self.tokens_per_round {
                break;
            }
            let choices = &relayed.choices[nth * relay_layout.top_k..][..relay_layout.top_k];
            let at = TokenAtNode {
                owner: stream.owner,
                destinations: relayed.destinations[nth],
                choices,
            };
            let last = self.handle.routing.last_choice_of_node(node, choices).unwrap_or(0);
            let out = writer.memory_at(
                self.row_at(call, relay_layout.far(node, last), token),
                self.row.stride(),
            );
            // SAFETY: the ranks have written their rows before their marks; there is room for a
            // row, with its parts where `row` says.
            unsafe {
                let sum = slice::from_raw_parts_mut(out.cast(), self.input.hidden);
                let weights = &mut weights[..self.row.weights];
                self.sum_node(relay_layout, call, token, &at, (sum, weights));
                let to = out.add(self.row.weights_at()).cast::<f32>();
                to.copy_from_nonoverlapping(weights.as_ptr(), weights.len());
            }
        }
        Ok(())
    }

    /// Sums the rows that this node's ranks return for a token, and their weights.
    ///
    /// # Safety
    /// The ranks have written them.
    unsafe fn sum_node(
        &self,
        relay_layout: &RelayLayout,
        call: &Call,
        token: usize,
        at: &TokenAtNode<'_>,
        (out, weights): (&mut [u16], &mut [f32]),
    ) {
        let (me, routing) = (self.group().rank(), &self.handle.routing);
        let is_own = |rank: usize| rank == me && at.owner == me && self.sums_own_in_place();
        let terms = self.terms_of_node(relay_layout, at);
        weights.fill(0.0);
        let rows = terms.iter().filter_map(|term| {
            if is_own(term.rank) {
                let row = self.own_row(token, term)?;
                // SAFETY: `check` saw that the table's rows are there; they do not change until the
                // combine has ended.
                return Some(unsafe { self.input_row(row) });
            }
            let row = self.row_of(call, token, term);
            // SAFETY: the caller guarantees it; rows are aligned.
            let given = unsafe { self.weights_of(row) };
            let is_its =
                |k: usize| routing.owner(at.choices[k]).is_some_and(|(rank, _)| rank == term.rank);
            match relay_layout.order {
                Order::ByRank => add(given, |_| true, weights),
                Order::ByChoice => put(given, is_its, weights),
            }
            // SAFETY: as above.
            Some(unsafe { slice::from_raw_parts(row.cast(), self.input.hidden) })
        });
        sum::plain(&rows.collect::<SumRows<'_>>(), out);
    }

    /// The ranks of this node that a token went to, in the order of their sum.
    fn terms_of_node(
        &self,
        relay_layout: &RelayLayout,
        at: &TokenAtNode<'_>,
    ) -> SmallVec<[Term; MAX_TOP_K]> {
        let nodes = relay_layout.nodes;
        let ranks = nodes.ranks_of(nodes.node_of(self.group().rank())).enumerate();
        let ranks = ranks.filter(|(local, _)| at.destinations >> local & 1 == 1);
        let term = |(_, rank)| {
            let choice = self.handle.routing.last_choice(rank, at.choices).unwrap_or(0);
            Term { rank, slot: relay_layout.near(at.owner, rank, choice), choice }
        };
        let mut terms: SmallVec<_> = ranks.map(term).collect();
        if relay_layout.order == Order::ByChoice {
            terms.sort_by_key(|term: &Term| term.choice);
        }
        terms
    }

    /// Makes a token's sum of the sums of nodes.
    ///
    /// # Safety
    /// `combined` has memory for it, and all rows of the sum were written. `own` is for the sum of
    /// this node's rows.
    pub(super) unsafe fn sum_nodes(
        &self,
        relay_layout: &RelayLayout,
        call: &Call,
        token: usize,
        combined: &CombineOutput,
        own: &mut [u16],
    ) {
        let (hidden, me, top_k) = (self.input.hidden, self.group().rank(), relay_layout.top_k);
        let (routing, own_node) = (&self.handle.routing, relay_layout.nodes.node_of(me));
        let choices = routing.choices(token);
        let mut own_weights = [0.0; MAX_TOP_K];
        let own_weights = &mut own_weights[..self.row.weights];
        let terms = self.node_terms(relay_layout, token);
        for term in terms.iter().filter(|term| term.node == own_node) {
            let at = TokenAtNode { owner: me, destinations: term.destinations, choices };
            // SAFETY: the caller guarantees it.
            unsafe {
                self.sum_node(relay_layout, call, token, &at, (&mut *own, &mut *own_weights))
            };
        }
        let mut rows = SumRows::new();
        for bias in combined.bias.iter().flatten() {
            // SAFETY: a bias has a row for each token.
            rows.push(unsafe { slice::from_raw_parts(bias.add(token * hidden), hidden) });
        }
        let mut summed = [0.0; MAX_TOP_K];
        for term in &terms {
            let (row, weights): (&[u16], &[f32]) = match term.node == own_node {
                true => (own, own_weights),
                false => {
                    let at = self.row_at(
                        call,
                        relay_layout.far(term.node, term.last),
                        token % self.tokens_per_round,
                    );
                    let row = self.group().window().own().pool(at, self.row.stride());
                    // SAFETY: the relay has written its row before its mark; rows are aligned.
                    unsafe { (slice::from_raw_parts(row.cast(), hidden), self.weights_of(row)) }
                }
            };
            rows.push(row);
            let is_its = |k: usize| {
                let owner = routing.owner(choices[k]);
                owner.is_some_and(|(rank, _)| relay_layout.nodes.node_of(rank) == term.node)
            };
            match relay_layout.order {
                Order::ByRank => add(weights, |_| true, &mut summed),
                Order::ByChoice => put(weights, is_its, &mut summed),
            }
        }
        // SAFETY: there is a row for each token, and a weight for each choice of each.
        unsafe {
            sum::plain(&rows, slice::from_raw_parts_mut(combined.rows.add(token * hidden), hidden));
            if let Some(weights) = combined.weights {
                weights.add(token * top_k).copy_from_nonoverlapping(summed.as_ptr(), top_k);
            }
        }
    }

    /// The nodes that one of this rank's tokens went to, in the order of its sum.
    fn node_terms(
        &self,
        relay_layout: &RelayLayout,
        token: usize,
    ) -> SmallVec<[NodeTerm; MAX_TOP_K]> {
        let routing = &self.handle.routing;
        let term = |node| {
            let to = routing.node_tokens(node);
            let nth = to.tokens.binary_search(&(token as u32)).ok()?;
            let last = routing.last_choice_of_node(node, routing.choices(token)).unwrap_or(0);
            Some(NodeTerm { node, destinations: to.destinations[nth], last })
        };
        let mut terms: SmallVec<_> = (0..relay_layout.nodes.count).filter_map(term).collect();
        if relay_layout.order == Order::ByChoice {
            terms.sort_by_key(|term: &NodeTerm| term.last);
        }
        terms
    }
}
