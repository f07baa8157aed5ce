//! Times of all ranks, as a table and as JSON.

use std::{fmt, time::Duration};

use anyhow::{Context, Result};
use serde::Serialize;

use super::{shape::Shape, task::CallTimes};
use crate::{
    report::Machine,
    stats::{Latencies, Latency},
};

/// The report of one run.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    version: &'static str,
    machine: Machine,
    shape: Shape,
    rows: Vec<Row>,
}

/// One kind of call.
#[derive(Debug, Serialize)]
struct Row {
    call: String,
    /// Bytes of a rank's rows, the mean of all ranks.
    bytes: f64,
    /// The part of `bytes` that belongs to other ranks.
    foreign_bytes: f64,
    /// Bytes of rows that cross to other nodes.
    across_bytes: f64,
    /// The slowest rank's time.
    latency_us: Latency,
    /// `bytes` divided by the median latency.
    gb_per_s: f64,
    /// The slowest rank's time for a copy of as many bytes.
    copy_us: Latency,
    /// The copy's median divided by the call's.
    of_copy: f64,
}

impl Report {
    /// Makes the report from each rank's measurements.
    pub(crate) fn of(shape: Shape, machine: Machine, all: &[Vec<CallTimes>]) -> Result<Self> {
        let calls = all.first().map_or(0, Vec::len);
        let rows = (0..calls).map(|call| {
            let ranks: Vec<_> = all.iter().filter_map(|timed| timed.get(call)).collect();
            Row::of(&ranks)
        });
        let rows = rows.collect::<Option<_>>().context("ranks measured no rounds")?;
        Ok(Self { version: env!("CARGO_PKG_VERSION"), machine, shape, rows })
    }

    pub(crate) fn json(&self) -> Result<String> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }
}

impl Row {
    fn of(ranks: &[&CallTimes]) -> Option<Self> {
        let mean = |of: fn(&CallTimes) -> u64| {
            ranks.iter().map(|timed| of(timed) as f64).sum::<f64>() / ranks.len() as f64
        };
        let bytes = mean(|timed| timed.bytes);
        let latency_us = slowest(ranks, |timed| &timed.calls)?;
        let copy_us = slowest(ranks, |timed| &timed.copies)?;
        Some(Self {
            call: ranks.first()?.name.clone(),
            bytes,
            foreign_bytes: mean(|timed| timed.foreign),
            across_bytes: mean(|timed| timed.across),
            gb_per_s: bytes / latency_us.p50 / 1e3,
            of_copy: copy_us.p50 / latency_us.p50,
            latency_us,
            copy_us,
        })
    }
}

/// The latency of rounds: each counts with its slowest rank's time.
fn slowest(ranks: &[&CallTimes], of: impl Fn(&CallTimes) -> &[Duration]) -> Option<Latency> {
    let mut latencies = Latencies::new();
    let rounds = ranks.iter().map(|timed| of(timed).len()).min()?;
    for round in 0..rounds {
        latencies.record(ranks.iter().map(|timed| of(timed)[round]).max()?);
    }
    latencies.summary(1)
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shape { ranks, nodes, num_tokens, hidden, num_topk, num_experts } = self.shape;
        writeln!(
            f,
            "{ranks} ranks on {nodes} nodes, {num_tokens} tokens each, hidden {hidden}, top-{num_topk}, {num_experts} experts"
        )?;
        write!(
            f,
            "{:32} {:>8} {:>8} {:>8} {:>9} {:>9} {:>9} {:>7} {:>9} {:>8}",
            "call",
            "MB",
            "foreign",
            "across",
            "p50 us",
            "p99 us",
            "min us",
            "GB/s",
            "copy us",
            "of copy"
        )?;
        for row in &self.rows {
            let Latency { p50, p99, min } = row.latency_us;
            write!(
                f,
                "\n{:32} {:8.2} {:8.2} {:8.2} {p50:9.0} {p99:9.0} {min:9.0} {:7.2} {:9.0} {:8.2}",
                row.call,
                row.bytes / 1e6,
                row.foreign_bytes / 1e6,
                row.across_bytes / 1e6,
                row.gb_per_s,
                row.copy_us.p50,
                row.of_copy,
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timed(calls: [u64; 3], bytes: u64) -> CallTimes {
        let durations = |all: [u64; 3]| all.map(Duration::from_micros).to_vec();
        let copies = durations([10, 10, 10]);
        CallTimes {
            name: "dispatch".into(),
            bytes,
            foreign: 500,
            across: 100,
            calls: durations(calls),
            copies,
        }
    }

    #[test]
    fn a_round_takes_as_long_as_its_slowest_rank() {
        let ranks = [timed([10, 40, 20], 1000), timed([20, 20, 20], 3000)];
        let row = Row::of(&ranks.each_ref()).expect("a row");
        // Percentiles are to three digits.
        let is_near = |have: f64, want: f64| (have / want - 1.0).abs() < 0.01;
        assert!(row.latency_us.min == 20.0 && is_near(row.latency_us.p50, 20.0), "{row:?}");
        assert!(is_near(row.latency_us.p99, 40.0) && is_near(row.of_copy, 0.5), "{row:?}");
        assert_eq!((row.bytes, row.foreign_bytes, row.across_bytes), (2000.0, 500.0, 100.0));
        assert!(is_near(row.gb_per_s, 0.1), "{row:?}");
        assert!(Row::of(&[]).is_none());
    }
}
