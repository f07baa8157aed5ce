//! The tuner's choice for a collective, by its length and NCCL's own costs alone: the same on every
//! rank, since NCCL brings the bandwidth in its costs to the least of all ranks.
//!
//! Over a network that the host's processors carry, a byte and a message cost time of the one
//! thread that drives a communicator's messages. NCCL's model has neither cost:
//!
//! - LL sends every byte twice. It ends at [`LL_MAX_BYTES`], where NCCL's model goes on with it.
//!   Below, NCCL decides: on a slow link it ends LL earlier.
//! - Each channel has messages of its own. A collective gets no more channels than leave messages
//!   of
//!   [`LL_PART`] or [`SIMPLE_PART`] bytes.

use uccl_nccl_abi::{
    plan::{SIMPLE_THREADS, ll_channels, simple_channels},
    tuner::protocol,
};

/// The longest collective of two ranks that LL carries. An all-reduce of two ranks over one TCP
/// stream took 95 us with LL and 116 with Simple at 64 KiB, and 306 and 167 at 256 KiB: lines
/// through these meet at 90 KiB.
const LL_MAX_BYTES: usize = 96 << 10;
/// The least bytes of data of a ring's message with LL. It sends twice as many.
const LL_PART: usize = 16 << 10;
/// The least bytes of a ring's two messages with Simple.
const SIMPLE_PART: usize = 128 << 10;
/// Channels that a collective may have however short its messages are.
const FEW_CHANNELS: usize = 2;
/// From here on NCCL decides: it keeps the number in a few bits.
const MOST_CHANNELS: usize = 32;
/// A cost in microseconds above any that NCCL calculates.
const AVOIDED: f32 = 1e9;

/// The choice for all collectives of a communicator.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Choice {
    pub(crate) ranks: usize,
    /// It chooses channels, too: each host has one rank, so that its channels share one thread.
    pub(crate) has_channels: bool,
}

impl Choice {
    /// The longest collective that LL carries.
    pub(crate) fn ll_max_bytes(self) -> usize {
        // A ring's message has its share of the bytes.
        LL_MAX_BYTES.saturating_mul(self.ranks.max(2)) / 2
    }

    /// Changes the costs of a collective, rows of algorithms with `columns` protocols. Returns the
    /// number of its channels, 0 where NCCL decides.
    pub(crate) fn make(self, bytes: usize, costs: &mut [f32], columns: usize) -> usize {
        if bytes > self.ll_max_bytes() {
            costs.chunks_mut(columns).for_each(avoid_ll);
        }
        if self.has_channels { self.channels(bytes, costs, columns) } else { 0 }
    }

    fn channels(self, bytes: usize, costs: &[f32], columns: usize) -> usize {
        let ranks = self.ranks.max(2);
        match cheapest(costs, columns) {
            Some(protocol::LL) => channels(bytes / ranks / LL_PART, ll_channels(bytes, ranks)),
            Some(protocol::SIMPLE) => channels(
                bytes / ranks / SIMPLE_PART,
                // No more than NCCL takes of either kind.
                simple_channels(bytes, SIMPLE_THREADS[1]),
            ),
            _ => 0,
        }
    }
}

/// As many channels as there are long messages, a few at least, and no more than NCCL takes.
fn channels(long: usize, of_nccl: usize) -> usize {
    let chosen = long.max(FEW_CHANNELS).min(of_nccl);
    if chosen <= MOST_CHANNELS { chosen } else { 0 }
}

/// Raises LL's cost in a row, unless LL is impossible there.
fn avoid_ll(row: &mut [f32]) {
    if let Some(cost) = row.get_mut(protocol::LL)
        && *cost >= 0.0
    {
        *cost = AVOIDED;
    }
}

/// The column of the least cost; costs below 0 are impossible.
fn cheapest(costs: &[f32], columns: usize) -> Option<usize> {
    let possible = costs.iter().enumerate().filter(|(_, cost)| **cost >= 0.0);
    possible.min_by(|one, other| one.1.total_cmp(other.1)).map(|(at, _)| at % columns)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALONE: Choice = Choice { ranks: 2, has_channels: true };

    fn made(choice: Choice, bytes: usize, mut costs: [f32; 6]) -> ([f32; 6], usize) {
        let channels = choice.make(bytes, &mut costs, 3);
        (costs, channels)
    }

    #[test]
    fn ll_ends_early() {
        let costs = [20.0, -1.0, 30.0, 10.0, -1.0, 40.0];
        assert_eq!(made(ALONE, 96 << 10, costs).0, costs, "NCCL decides");
        let longer = made(ALONE, (96 << 10) + 1, costs).0;
        assert_eq!(longer, [AVOIDED, -1.0, 30.0, AVOIDED, -1.0, 40.0]);
        let many = Choice { ranks: 16, has_channels: false };
        assert_eq!(made(many, 512 << 10, costs), (costs, 0));
        assert!(made(many, 1 << 20, costs).0 != costs);
    }

    #[test]
    fn impossible_choices_stay_so() {
        let costs = [-1.0; 6];
        assert_eq!(made(ALONE, 1 << 20, costs), (costs, 0));
        let alone = made(ALONE, 1 << 20, [-1.0, -1.0, -1.0, 5.0, -1.0, -1.0]);
        assert_eq!(alone.0[3], AVOIDED, "the only possible one is taken all the same");
    }

    #[test]
    fn short_collectives_have_few_channels() {
        let (ll, simple) = ([1.0, -1.0, 2.0, -1.0, -1.0, -1.0], [-1.0, -1.0, 2.0, -1.0, -1.0, 9.0]);
        let of = |bytes, costs| made(ALONE, bytes, costs).1;
        assert_eq!([8, 8 << 10, 64 << 10, 96 << 10].map(|bytes| of(bytes, ll)), [1, 1, 2, 3]);
        let lengths = [32 << 10, 256 << 10, 1 << 20, 16 << 20];
        assert_eq!(lengths.map(|bytes| of(bytes, simple)), [1, 2, 4, 0]);
    }

    #[test]
    fn no_collective_gets_more_channels_than_nccl_takes() {
        for bytes in (0..4 << 20).step_by(999) {
            let ll = made(ALONE, bytes, [1.0, -1.0, 2.0, 3.0, -1.0, 4.0]);
            let least = if bytes > ALONE.ll_max_bytes() { 32 << 10 } else { 8 << 10 };
            assert!(ll.1 <= (bytes / least).max(1), "{bytes}");
        }
    }
}
