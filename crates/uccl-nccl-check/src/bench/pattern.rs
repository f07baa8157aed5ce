//! Messages of a collective of two ranks, as NCCL's proxy passes them on.

use serde::{Deserialize, Serialize};
use uccl_nccl_abi::plan::{Plan, SIMPLE_THREADS, ll_channels, simple_channels};

/// Bytes of data of a step with LL, which sends twice as many.
const LL_CHUNK: usize = 32 << 10;
/// Bytes of a step of a ring with Simple, and of its shortest slice but the last.
const SIMPLE_CHUNK: usize = 2 << 20;
const SIMPLE_SLICE: usize = 32 << 10;
/// Bytes of a message between two ranks.
const P2P_CHUNK: usize = 128 << 10;
/// Channels of messages between two ranks.
const P2P_CHANNELS: usize = 2;
/// Messages in flight: the steps of a buffer, and half as many slices of two steps.
const STEPS: usize = 8;
const SLICES: usize = 4;

/// NCCL's protocols that networks without GPU memory see.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum Protocol {
    LL,
    Simple,
}

/// A message. The other rank sends the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Message {
    pub(crate) bytes: usize,
    /// The receives that must have ended before it is sent.
    pub(crate) receives: usize,
}

/// All messages of a collective.
#[derive(Clone, Debug)]
pub(crate) struct Pattern {
    pub(crate) messages: Vec<Vec<Message>>,
    /// The most messages in flight of a channel and direction.
    pub(crate) depth: usize,
    /// Bytes of a posted receive.
    pub(crate) room: usize,
}

impl Pattern {
    /// The ring all-reduce of so many bytes.
    pub(crate) fn all_reduce(bytes: usize, protocol: Protocol, channels: usize) -> Self {
        let share = bytes.div_ceil(channels).next_multiple_of(16);
        let shares = (0..channels).map(|at| share.min(bytes.saturating_sub(at * share)));
        let messages = shares.filter(|share| *share > 0).map(|share| ring(share, protocol));
        let (depth, room) = match protocol {
            Protocol::LL => (STEPS, 2 * LL_CHUNK),
            Protocol::Simple => (SLICES, SIMPLE_CHUNK / 2),
        };
        Self { messages: messages.collect(), depth, room }
    }

    /// The all-to-all, of which half of the bytes stay.
    pub(crate) fn all_to_all(bytes: usize) -> Self {
        let share = (bytes / 2).div_ceil(P2P_CHANNELS).max(1);
        let cut = |share: usize| {
            let chunks = (0..share).step_by(P2P_CHUNK);
            chunks.map(|at| Message { bytes: P2P_CHUNK.min(share - at), receives: 0 }).collect()
        };
        let messages = (0..P2P_CHANNELS).map(|_| cut(share)).collect();
        Self { messages, depth: STEPS, room: P2P_CHUNK.min(share) }
    }
}

/// The messages of one channel.
fn ring(share: usize, protocol: Protocol) -> Vec<Message> {
    let mut messages = Vec::new();
    let longest = if protocol == Protocol::LL { LL_CHUNK } else { SIMPLE_CHUNK };
    let mut left = share;
    while left > 0 {
        let chunk = longest.min(left.div_ceil(2).next_multiple_of(16));
        let first = messages.len();
        let halves = [chunk.min(left), chunk.min(left.saturating_sub(chunk))];
        for (step, bytes) in halves.into_iter().enumerate() {
            for part in slices(bytes, protocol) {
                // The second step passes on the sum with the data that came in the first.
                let receives = if step == 0 { 0 } else { messages.len() - first_len(protocol) + 1 };
                messages.push(Message { bytes: part, receives });
            }
        }
        debug_assert_eq!(messages.len() - first, 2 * first_len(protocol));
        left -= halves[0] + halves[1];
    }
    messages
}

/// Messages of one step.
fn first_len(protocol: Protocol) -> usize {
    if protocol == Protocol::LL { 1 } else { 2 }
}

fn slices(bytes: usize, protocol: Protocol) -> Vec<usize> {
    if protocol == Protocol::LL {
        return vec![2 * bytes];
    }
    let slice = bytes.div_ceil(2).next_multiple_of(16).max(SIMPLE_SLICE).min(bytes);
    vec![slice, bytes - slice]
}

/// The channels that NCCL gives an all-reduce of two ranks, of those that it has.
pub(crate) fn channels(bytes: usize, protocol: Protocol, plan: Plan) -> usize {
    let wanted = match protocol {
        Protocol::LL => ll_channels(bytes, 2),
        Protocol::Simple => simple_channels(bytes, SIMPLE_THREADS[0]),
    };
    wanted.min(plan.channels as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(bytes: usize, protocol: Protocol, channels: usize) -> Vec<(usize, usize)> {
        let pattern = Pattern::all_reduce(bytes, protocol, channels);
        assert!(pattern.messages.len() <= channels);
        pattern.messages[0].iter().map(|one| (one.bytes, one.receives)).collect()
    }

    #[test]
    fn rings_pass_on_sums() {
        const K: usize = 1 << 10;
        assert_eq!(of(64 * K, Protocol::LL, 2), [(32 * K, 0), (32 * K, 1)]);
        assert_eq!(of(64 * K, Protocol::Simple, 2), [(16 * K, 0), (0, 0), (16 * K, 1), (0, 2)]);
        let slices = [(128 * K, 0), (128 * K, 0), (128 * K, 1), (128 * K, 2)];
        assert_eq!(of(1 << 20, Protocol::Simple, 2), slices);
        let long = of(256 * K, Protocol::LL, 2);
        assert_eq!(long, [(64 * K, 0), (64 * K, 1), (64 * K, 0), (64 * K, 3)]);
    }

    #[test]
    fn no_byte_is_lost() {
        for bytes in [1, 8, 1000, 70_001, 1 << 20, 9_000_000] {
            for channels in [1, 2, 8] {
                let simple = Pattern::all_reduce(bytes, Protocol::Simple, channels);
                let sum: usize = simple.messages.iter().flatten().map(|one| one.bytes).sum();
                assert_eq!(sum, bytes);
            }
        }
        let pattern = Pattern::all_to_all(1 << 20);
        assert_eq!(pattern.messages, vec![vec![Message { bytes: 128 << 10, receives: 0 }; 2]; 2]);
    }
}
