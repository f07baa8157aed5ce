//! The layout of tokens in a place: bytes that ranks share.
//!
//! ```text
//! dispatch:  an area for each rank that sends:  records of the round | counts of the receiver's experts | records
//!            an inbox for each other node, if tokens are relayed:
//!                                               of each rank of this node: tokens, counts of its experts | destinations of each | records
//!            a record:                          payload | scales | choices | weights | token
//! combine:   rows: slot by slot, token by token
//!            a row:                             values | weights
//! ```
//!
//! Parts begin at multiples of 32 bytes, except choices, weights and token, which follow each
//! other.

use crate::shared::nodes::Nodes;

const ALIGN: usize = 32;

fn align(len: usize) -> usize {
    len.next_multiple_of(ALIGN)
}

/// A token on its way to a rank with its experts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Record {
    /// Bytes of the payload.
    pub payload: usize,
    /// Words of four bytes that scale it.
    pub scales: usize,
    /// Choices of a token; each has a weight.
    pub top_k: usize,
}

impl Record {
    /// The offset of the scales.
    #[must_use]
    pub fn scales_at(&self) -> usize {
        align(self.payload)
    }

    /// The offset of the choices: an i32 each.
    #[must_use]
    pub fn choices_at(&self) -> usize {
        self.scales_at() + align(4 * self.scales)
    }

    /// The offset of the weights: an f32 each.
    #[must_use]
    pub fn weights_at(&self) -> usize {
        self.choices_at() + 4 * self.top_k
    }

    /// The offset of the token's number: a u32.
    #[must_use]
    pub fn token_at(&self) -> usize {
        self.weights_at() + 4 * self.top_k
    }

    /// Bytes from one record to the next.
    #[must_use]
    pub fn stride(&self) -> usize {
        align(self.token_at() + 4)
    }

    /// The offset of an area's records, behind the number of them in this round and the counts of
    /// `local_experts` (u32).
    #[must_use]
    pub fn first_at(local_experts: usize) -> usize {
        (4 * (1 + local_experts)).next_multiple_of(64)
    }

    /// Bytes of an area with `slots` records.
    #[must_use]
    pub fn area(&self, local_experts: usize, slots: usize) -> usize {
        Self::first_at(local_experts) + (slots * self.stride()).next_multiple_of(64)
    }

    /// The number of records in an area of `len` bytes.
    #[must_use]
    pub fn slots_in(&self, local_experts: usize, len: usize) -> usize {
        (len.saturating_sub(Self::first_at(local_experts)) & !63) / self.stride()
    }

    /// The length, in records, of an area with `slots` of them, where areas are a whole number of
    /// records: then the records of all areas together are rows with one stride.
    #[must_use]
    pub fn spread(&self, local_experts: usize, slots: usize) -> usize {
        slots + self.records_before(local_experts)
    }

    /// The number of records in such an area of `len` bytes.
    #[must_use]
    pub fn slots_spread_in(&self, local_experts: usize, len: usize) -> usize {
        (len / self.stride()).saturating_sub(self.records_before(local_experts))
    }

    fn records_before(&self, local_experts: usize) -> usize {
        Self::first_at(local_experts).div_ceil(self.stride())
    }
}

/// The layout of a dispatch's place: an area for each rank, and, where tokens are relayed, an inbox
/// for each other node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Areas {
    /// The layout of a record.
    pub record: Record,
    /// Experts of each rank.
    pub local_experts: usize,
    /// The nodes that tokens are relayed on; one if they are not.
    pub nodes: Nodes,
}

impl Areas {
    /// Bytes of a place with `slots` records in each area.
    #[must_use]
    pub fn place(&self, slots: usize) -> usize {
        self.inbox_at(slots, self.nodes.count - 1)
    }

    /// The number of records in each area of a place of `len` bytes.
    #[must_use]
    pub fn slots_in(&self, len: usize) -> usize {
        let Self { record, local_experts, nodes } = self;
        let (ranks, inboxes) = (nodes.all_ranks(), nodes.count - 1);
        if inboxes == 0 {
            return record.slots_in(*local_experts, (len / ranks) & !63);
        }
        // Records, and the words of their destinations, are rounded up to 64 bytes.
        let fixed = ranks * (Record::first_at(*local_experts) + 63)
            + inboxes * (self.destinations_at() + 2 * 63);
        let of_slot = ranks * record.stride() + inboxes * (record.stride() + 8);
        len.saturating_sub(fixed) / of_slot
    }

    /// The offset of a rank's area.
    #[must_use]
    pub fn area_at(&self, slots: usize, rank: usize) -> usize {
        rank * self.record.area(self.local_experts, slots)
    }

    /// The offset of the inbox of the `nth` other node.
    #[must_use]
    pub fn inbox_at(&self, slots: usize, nth: usize) -> usize {
        self.area_at(slots, self.nodes.all_ranks()) + nth * self.inbox(slots)
    }

    /// Bytes of an inbox.
    #[must_use]
    pub fn inbox(&self, slots: usize) -> usize {
        self.first_of_inbox(slots) + (slots * self.record.stride()).next_multiple_of(64)
    }

    /// The offset, in an inbox, of the counts for a rank of the node: its tokens, and those of each
    /// of its experts (u32).
    #[must_use]
    pub fn counts_at(&self, local: usize) -> usize {
        4 * local * (1 + self.local_experts)
    }

    /// The offset, in an inbox, of the destinations of each record: a bit for each rank of the node
    /// (u64).
    #[must_use]
    pub fn destinations_at(&self) -> usize {
        self.counts_at(self.nodes.ranks).next_multiple_of(64)
    }

    /// The offset of an inbox's records.
    #[must_use]
    pub fn first_of_inbox(&self, slots: usize) -> usize {
        self.destinations_at() + (8 * slots).next_multiple_of(64)
    }
}

/// A row on its way back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Row {
    /// The most bytes of its values.
    pub values: usize,
    /// Weights that go with it: one for each choice of the token, or none.
    pub weights: usize,
    /// Rows of a token: one for each choice, or for each rank.
    pub slots: usize,
}

impl Row {
    /// The offset of the weights.
    #[must_use]
    pub fn weights_at(&self) -> usize {
        align(self.values)
    }

    /// Bytes from one row to the next.
    #[must_use]
    pub fn stride(&self) -> usize {
        self.weights_at() + align(4 * self.weights)
    }

    /// Bytes of a place with rows for `tokens`.
    #[must_use]
    pub fn place(&self, tokens: usize) -> usize {
        (tokens * self.slots * self.stride()).next_multiple_of(64)
    }

    /// The offset of the row in a token's slot, in a place for `tokens`.
    #[must_use]
    pub fn at(&self, tokens: usize, slot: usize, token: usize) -> usize {
        (slot * tokens + token) * self.stride()
    }

    /// The number of tokens with rows in a place of `len` bytes.
    #[must_use]
    pub fn tokens_in(&self, len: usize) -> usize {
        (len & !63) / (self.slots * self.stride())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_record_is_no_longer_than_its_parts() {
        let bf16 = Record { payload: 14_336, scales: 0, top_k: 8 };
        let fp8 = Record { payload: 7_168, scales: 56, top_k: 8 };
        assert_eq!((bf16.stride(), fp8.stride()), (14_432, 7_488));
        assert_eq!((fp8.scales_at(), fp8.choices_at(), fp8.token_at()), (7_168, 7_392, 7_456));
        assert_eq!(Row { values: 14_336, weights: 8, slots: 2 }.stride(), 14_368);
    }

    proptest! {
        #[test]
        fn records_that_fit_in_a_length_take_no_more_than_it(
            payload in 1usize..20_000, scales in 0usize..200, top_k in 0usize..=32, len in 0usize..1 << 22,
            local in 0usize..300,
        ) {
            let record = Record { payload, scales, top_k };
            let slots = record.slots_in(local, len);
            prop_assert!(slots == 0 || record.area(local, slots) <= len);
            prop_assert!(record.area(local, slots + 1) > len & !63);
            for nodes in [Nodes::one(3), Nodes { count: 3, ranks: 2 }] {
                let areas = Areas { record, local_experts: local, nodes };
                let slots = areas.slots_in(len);
                prop_assert!(slots == 0 || areas.place(slots) <= len);
            }
            let row = Row { values: payload, weights: top_k, slots: top_k.max(1) };
            let tokens = row.tokens_in(len);
            prop_assert!(tokens == 0 || row.place(tokens) <= len);
            prop_assert!(row.place(tokens + 1) > len & !63);
        }
    }
}
