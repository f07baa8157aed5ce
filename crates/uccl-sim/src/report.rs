//! The result of a simulation.

use serde::Serialize;

/// Completion times of messages, in microseconds.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Completions {
    /// The median.
    pub p50_us: f64,
    /// 99 of 100 took at most so long.
    pub p99_us: f64,
    /// 999 of 1000 took at most so long.
    pub p999_us: f64,
    /// The longest.
    pub max_us: f64,
}

/// Packets that did not arrive.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug, Serialize)]
pub struct Drops {
    /// They met a full queue.
    pub full: u64,
    /// A link lost them.
    pub lost: u64,
}

/// The flows with the same algorithms.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct GroupReport {
    /// The algorithms.
    pub name: String,
    /// How many flows have them.
    pub flows: usize,
    /// Messages that have come.
    pub completions: usize,
    /// Their times.
    pub times: Completions,
    /// The time of a message at the speed of its share of the links, in microseconds.
    pub ideal_us: f64,
    /// Bytes of messages per second, from the beginning to the last completion, in GB/s.
    pub goodput_gb_per_s: f64,
    /// How even the flows' speeds are, 1 at best (Jain's index).
    pub fairness: f64,
    /// Chunks that were sent.
    pub chunks: u64,
    /// Chunks that were sent again.
    pub repeats: u64,
    /// Chunks that were sent again and had come.
    pub undone: u64,
    /// Each completion time divided by the ideal, the shortest first.
    #[serde(skip)]
    pub slowdowns: Vec<f64>,
}

/// The result of a simulation.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Report {
    /// The seed, by which it can be repeated.
    pub seed: u64,
    /// The flows by their algorithms.
    pub groups: Vec<GroupReport>,
    /// Messages that have come, of all flows.
    pub completions: usize,
    /// Messages that had not come at the end.
    pub unfinished: usize,
    /// The virtual time that has passed, in microseconds.
    pub elapsed_us: f64,
    /// The longest queue of any port of a switch, in bytes.
    pub queue_max_bytes: u64,
    /// The queue that 99 of 100 packets found at most, in bytes.
    pub queue_p99_bytes: u64,
    /// The longest queue in each of equal parts of the time.
    #[serde(skip)]
    pub queue_timeline: Vec<u64>,
    /// Packets with marks that have arrived.
    pub marked: u64,
    /// Packets that have not.
    pub drops: Drops,
    /// Packets that were sent, of all kinds.
    pub packets: u64,
    /// Events of the simulation.
    pub events: u64,
}

/// The value that a part of the sorted values does not exceed.
#[must_use]
pub fn percentile(sorted: &[f64], part: f64) -> f64 {
    let at = (part * sorted.len() as f64).ceil() as usize;
    sorted.get(at.saturating_sub(1).min(sorted.len().saturating_sub(1))).copied().unwrap_or(0.0)
}

/// Jain's index of the values: the square of their mean by the mean of their squares.
pub(crate) fn fairness(values: &[f64]) -> f64 {
    let (sum, squares) = values
        .iter()
        .fold((0.0, 0.0), |(sum, squares), value| (sum + value, squares + value * value));
    if squares > 0.0 { sum * sum / (values.len() as f64 * squares) } else { 1.0 }
}

/// Depths of queues, in steps of 256 bytes.
#[derive(Clone, Debug)]
pub(crate) struct DepthRecord {
    counts: Vec<u64>,
    all: u64,
    pub(crate) most: u64,
    timeline: Vec<u64>,
    /// The time of a part of the timeline, in nanoseconds.
    part_ns: u64,
}

const STEP: u64 = 256;
const STEPS: usize = 1 << 16;
const PARTS: usize = 200;

impl Default for DepthRecord {
    fn default() -> Self {
        Self { counts: vec![0; 64], all: 0, most: 0, timeline: vec![0; PARTS], part_ns: 1_000 }
    }
}

impl DepthRecord {
    pub(crate) fn record(&mut self, now_ns: u64, depth: u64) {
        let at = ((depth / STEP) as usize).min(STEPS);
        if at >= self.counts.len() {
            self.counts.resize((at + 1).next_power_of_two(), 0);
        }
        self.counts[at] += 1;
        self.all += 1;
        self.most = self.most.max(depth);
        while (now_ns / self.part_ns) as usize >= PARTS {
            self.halve();
        }
        let part = &mut self.timeline[(now_ns / self.part_ns) as usize];
        *part = depth.max(*part);
    }

    /// Two parts become one.
    fn halve(&mut self) {
        for at in 0..PARTS {
            let pair = [2 * at, 2 * at + 1].map(|at| self.timeline.get(at).copied().unwrap_or(0));
            self.timeline[at] = pair[0].max(pair[1]);
        }
        self.part_ns *= 2;
    }

    pub(crate) fn p99(&self) -> u64 {
        let mut left = self.all / 100;
        for (at, count) in self.counts.iter().enumerate().rev() {
            if *count > left {
                return (at as u64 * STEP).min(self.most);
            }
            left -= count;
        }
        0
    }

    /// The parts of the timeline until now.
    pub(crate) fn timeline(&self, now_ns: u64) -> Vec<u64> {
        let parts = (now_ns / self.part_ns) as usize + 1;
        self.timeline[..parts.min(PARTS)].to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_and_fairness() {
        let values: Vec<f64> = (1..=1000).map(f64::from).collect();
        let parts = [0.5, 0.99, 0.999, 1.0].map(|part| percentile(&values, part));
        assert_eq!(parts, [500.0, 990.0, 999.0, 1000.0]);
        assert_eq!(percentile(&[], 0.5), 0.0);
        assert_eq!(fairness(&[2.0, 2.0, 2.0]), 1.0);
        assert_eq!(fairness(&[1.0, 0.0]), 0.5);
    }

    #[test]
    fn depths_have_a_percentile_and_a_timeline() {
        let mut record = DepthRecord::default();
        for now_ns in 0..10_000_000u64 / 1000 {
            record.record(now_ns * 1000, if now_ns % 1000 == 500 { 1 << 20 } else { 1024 });
        }
        assert_eq!((record.most, record.p99()), (1 << 20, 1024));
        let timeline = record.timeline(9_999_000);
        assert!(
            timeline.len() > 100 && timeline.iter().filter(|depth| **depth > 1024).count() == 10
        );
    }
}
