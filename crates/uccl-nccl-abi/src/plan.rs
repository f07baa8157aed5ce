//! NCCL's plan between hosts: the channels and the bandwidth that follow from a device's speed.
//!
//! Before a communicator is connected, NCCL searches for rings from the GPU to the network and
//! back. A ring has one of a few speeds ([`Generation`]). The search begins with the fastest that
//! the device can carry and goes on to slower ones, as long as each is about half of the best one
//! or more, and keeps the rings with the greatest sum. So a device of 10 GB/s gets four rings of
//! 2.4 GB/s instead of one of 6, and each ring is two channels. Networks that cost processor time
//! per message lose by many channels: [`offered_mbps`] is a speed that gives few.
//!
//! The figures are those of NCCL 2.19 to 2.30 for one GPU and one device of each host.

/// Generations of GPUs, which differ in the speeds of a ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Generation {
    /// Compute capability below 9.0.
    BeforeHopper,
    /// Compute capability 9.0 and later. Blackwell differs above 48 GB/s alone.
    Hopper,
}

/// The rings of a communicator between hosts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Plan {
    /// Channels of a collective, at most.
    pub channels: u32,
    /// The bandwidth that NCCL calculates with, over all channels, in MB/s.
    pub mb_per_s: u32,
}

/// The speed in Mbit/s of a device that does not say: NCCL calculates with the same.
pub const UNKNOWN_MBPS: u32 = 10_000;
/// The speed in Mbit/s of loopback: the rate of four TCP streams, a thread each, between two H200s.
pub const LOOPBACK_MBPS: u32 = 65_000;
/// The most rings of a search.
const MOST_RINGS: u32 = 32;
/// A ring of this speed in MB/s or more is split in two.
const SPLIT_MB_PER_S: u32 = 25_000;
/// The time in microseconds that NCCL gives the first byte of an all-reduce of two ranks, by rings
/// with LL and with Simple.
const LL_US: f64 = 16.6;
const SIMPLE_US: f64 = 51.0;

/// Bytes of each rank and channel from which on NCCL takes one more channel for a ring, with LL.
const LL_PART: usize = 4 << 10;
/// Bytes of each thread of a channel from which on it takes one more, with Simple.
const SIMPLE_PART: usize = 64;
/// The threads of a ring's channel with Simple: those of rings that carry 12 GB/s or less, and
/// those of others.
pub const SIMPLE_THREADS: [usize; 2] = [256, 512];

/// The channels that NCCL takes for a ring's collective with LL, if it has as many.
#[must_use]
pub fn ll_channels(bytes: usize, ranks: usize) -> usize {
    (bytes / ranks.max(1) / LL_PART).max(1)
}

/// The channels that NCCL takes for a ring's collective with Simple, if it has as many. A channel
/// has [so many](SIMPLE_THREADS) threads.
#[must_use]
pub fn simple_channels(bytes: usize, threads: usize) -> usize {
    (bytes / threads.max(1) / SIMPLE_PART).max(1)
}

impl Generation {
    /// All generations.
    pub const ALL: [Self; 2] = [Self::BeforeHopper, Self::Hopper];

    /// The speeds of a ring in MB/s, the fastest first.
    fn ring_speeds(self) -> &'static [u32] {
        match self {
            Self::BeforeHopper => &[
                48_000, 30_000, 28_000, 24_000, 20_000, 18_000, 15_000, 12_000, 10_000, 9_000,
                7_000, 6_000, 5_000, 4_000, 3_000, 2_400, 1_200, 240, 120,
            ],
            Self::Hopper => &[
                48_000, 45_000, 42_000, 40_000, 30_000, 24_000, 22_000, 20_000, 17_500, 15_000,
                12_000, 6_000, 3_000, 2_400, 1_200, 240, 120,
            ],
        }
    }

    /// The rings of the search, and the speed of one in MB/s.
    fn rings(self, mbps: u32) -> (u32, u32) {
        let link = (mbps / 8).max(120);
        let mut best: (u32, u32) = (0, 0);
        for speed in self.ring_speeds().iter().copied().filter(|speed| *speed <= link) {
            // A speed below about half of the best one ends the search.
            if best.0 > 0 && f64::from(speed) / f64::from(best.1) <= 0.49 {
                break;
            }
            let count = (link / speed).min(MOST_RINGS);
            if count * speed > best.0 * best.1 {
                best = (count, speed);
            }
        }
        best
    }

    /// NCCL's plan for a device of a speed in Mbit/s.
    #[must_use]
    pub fn plan(self, mbps: u32) -> Plan {
        let (rings, speed) = self.rings(mbps);
        let split = if speed >= SPLIT_MB_PER_S { 2 } else { 1 };
        Plan { channels: 2 * split * rings, mb_per_s: rings * speed }
    }
}

impl Plan {
    /// The longest all-reduce of two ranks, in bytes, for which NCCL takes the protocol LL.
    #[must_use]
    pub fn ll_max_bytes(self) -> u64 {
        ((SIMPLE_US - LL_US) * f64::from(self.mb_per_s)) as u64
    }

    /// The microseconds that NCCL's model gives an all-reduce of two ranks by rings, with LL and
    /// with Simple.
    #[must_use]
    pub fn all_reduce_us(self, bytes: u64) -> [f64; 2] {
        let each = bytes as f64 / f64::from(self.mb_per_s.max(1));
        // LL sends every byte twice.
        [LL_US + 2.0 * each, SIMPLE_US + each]
    }
}

/// The greatest speed in Mbit/s, up to the device's own, for which NCCL's search takes one ring on
/// every generation.
#[must_use]
pub fn offered_mbps(mbps: u32) -> u32 {
    let has_one_ring = |mbps: &u32| Generation::ALL.iter().all(|one| one.rings(*mbps).0 == 1);
    let slower = Generation::Hopper.ring_speeds().iter().map(|speed| speed * 8);
    let mut all = [mbps].into_iter().chain(slower.filter(|slower| *slower < mbps));
    all.find(has_one_ring).unwrap_or(mbps)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn channels(mbps: u32) -> [u32; 2] {
        Generation::ALL.map(|one| one.plan(mbps).channels)
    }

    #[test]
    fn plans_are_those_that_nccl_was_seen_to_make() {
        // NCCL 2.28.9 on H200s.
        assert_eq!(Generation::Hopper.plan(10_000), Plan { channels: 2, mb_per_s: 1_200 });
        assert_eq!(Generation::Hopper.plan(100_000), Plan { channels: 2, mb_per_s: 12_000 });
        assert_eq!(Generation::Hopper.plan(400_000), Plan { channels: 4, mb_per_s: 48_000 });
    }

    #[test]
    fn speeds_between_two_rings_take_many_channels() {
        assert_eq!(Generation::Hopper.plan(80_000), Plan { channels: 8, mb_per_s: 9_600 });
        assert_eq!(channels(80_000), [2, 8]);
        assert_eq!(channels(90_000), [2, 18]);
        assert_eq!(channels(5_000), [10, 10]);
        assert_eq!(channels(40_000), [2, 4]);
    }

    #[test]
    fn offered_speeds_take_one_ring() {
        for (own, offered) in
            [(80_000, 48_000), (90_000, 48_000), (70_000, 48_000), (40_000, 24_000), (5_000, 1_920)]
        {
            assert_eq!(offered_mbps(own), offered);
        }
        for same in [1_000, 2_500, 10_000, 20_000, 25_000, 50_000, 100_000, 200_000, 400_000] {
            assert_eq!(offered_mbps(same), same);
        }
        for mbps in (100..1_000_000).step_by(700) {
            let offered = offered_mbps(mbps);
            assert!(offered <= mbps, "{mbps}");
            assert!(channels(offered).iter().all(|count| *count <= 4), "{mbps}: {offered}");
        }
    }

    #[test]
    fn the_range_of_ll_grows_with_the_speed() {
        let range = |mbps| Generation::Hopper.plan(mbps).ll_max_bytes();
        assert_eq!(range(10_000), 41_280);
        assert_eq!(range(100_000), 412_800);
    }
}
