//! Chaos: links within this process that misbehave on demand. For tests and experiments.
//!
//! [`pair`] makes a byte pipe of in-memory queues that splits, delays, stalls, slows, cuts and
//! corrupts. [`ChaosLane`] wraps any lane: it delays and reorders completions, repeats writes,
//! refuses posts and fails. [`GpuFaults`] makes copies of GPU memory late or makes them fail. A
//! [`RailNetwork`] has devices that move memory one-sidedly and are slow, full, cut and unplugged.
//! All random choices come from a seed: the same calls in the same order meet the same faults.

#![allow(missing_docs, reason = "only this workspace's tests call it")]

mod bell;
mod gate;
mod gpu;
mod lane;
mod patience;
mod pipe;
mod rail;
mod seeds;
mod warnings;

use std::time::Duration;

pub use self::{
    gate::GateHold,
    gpu::GpuFaults,
    lane::{ChaosLane, CopyHold, LaneFaults},
    patience::patiently,
    pipe::{ChaosEnd, ChaosPipe, ChaosRx, ChaosTx, pair, pair_of},
    rail::{ChaosRail, RailFaults, RailNetwork},
    seeds::each_seed,
    warnings::warnings_of,
};

/// Faults of one direction of a [`pair`]. The default has none.
#[derive(Clone, Debug)]
pub struct Faults {
    /// Most bytes under way: beyond it, a sender finds the pipe full. At least 1.
    pub capacity_bytes: usize,
    /// Most bytes that one send or receive moves; each moves a random number of bytes up to this.
    /// At least 1.
    pub split_bytes: usize,
    /// The bytes of a send show after a random number of empty receives, at most this.
    pub delay_polls: u32,
    /// The bytes of a send show after a random time, at most this.
    pub delay: Duration,
    /// Bytes per second; 0 for no limit.
    pub rate_bytes: u64,
    /// The pipe is cut in both directions when this many bytes have been sent in this one.
    pub cut_after: Option<u64>,
    /// The byte at this offset of the stream arrives with another value.
    pub corrupt_at: Option<u64>,
}

impl Default for Faults {
    fn default() -> Self {
        Self {
            capacity_bytes: 256 << 10,
            split_bytes: usize::MAX,
            delay_polls: 0,
            delay: Duration::ZERO,
            rate_bytes: 0,
            cut_after: None,
            corrupt_at: None,
        }
    }
}

#[cfg(test)]
mod tests;
