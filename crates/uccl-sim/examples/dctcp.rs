//! An algorithm in a day: DCTCP (Alizadeh et al., "Data Center TCP (DCTCP)", SIGCOMM 2010), on a
//! queue that two senders share.
//!
//! `cargo run -p uccl-sim --example dctcp`

use uccl_sim::{FlowContext, Pattern, Report, Scenario, ScenarioError, Simulation};
use uccl_tran::{
    control::{AckSample, CongestionControl, FixedWindow, LinkFacts},
    multipath::Techniques,
};

/// The part of a new sample in the estimate of marks (`g`, section 3.1).
const GAIN: f64 = 1.0 / 16.0;

/// The window follows the part of the bytes that queues mark.
#[derive(Debug)]
pub(crate) struct Dctcp {
    chunk_len: f64,
    window: f64,
    threshold: f64,
    /// The estimate of the part that is marked (`alpha`).
    alpha: f64,
    /// Bytes acknowledged and marked in this round trip, and when it ends.
    acked: f64,
    marked: f64,
    round_ends_ns: u64,
}

impl Dctcp {
    /// Begins in slow start, with ten chunks.
    pub(crate) fn new(link: &LinkFacts) -> Self {
        let chunk_len = link.chunk_len as f64;
        Self {
            chunk_len,
            window: 10.0 * chunk_len,
            threshold: f64::INFINITY,
            alpha: 0.0,
            acked: 0.0,
            marked: 0.0,
            round_ends_ns: 0,
        }
    }

    /// Once for each round trip: the estimate, and the decrease that it asks for.
    fn end_round(&mut self, now_ns: u64, rtt_ns: u64) {
        let part = if self.acked > 0.0 { self.marked / self.acked } else { 0.0 };
        self.alpha += GAIN * (part - self.alpha);
        if self.marked > 0.0 {
            self.window = (self.window * (1.0 - self.alpha / 2.0)).max(2.0 * self.chunk_len);
            self.threshold = self.window;
        }
        (self.acked, self.marked, self.round_ends_ns) = (0.0, 0.0, now_ns + rtt_ns);
    }
}

impl CongestionControl for Dctcp {
    fn on_ack(&mut self, ack: &AckSample) {
        let bytes = ack.bytes as f64;
        self.acked += bytes;
        self.marked += ack.marked_bytes as f64;
        if ack.marked_bytes > 0 && self.threshold.is_infinite() {
            // Slow start ends with the first mark.
            (self.threshold, self.alpha) = (self.window, 1.0);
        }
        self.window += match self.window < self.threshold {
            true => bytes,
            false => self.chunk_len * bytes / self.window,
        };
        if ack.now_ns >= self.round_ends_ns {
            self.end_round(ack.now_ns, ack.rtt_ns.unwrap_or(ack.least_rtt_ns));
        }
    }

    fn on_loss(&mut self, _now_ns: u64, _bytes: u64) {
        self.window = (self.window / 2.0).max(2.0 * self.chunk_len);
        self.threshold = self.window;
    }

    fn window_bytes(&self) -> u64 {
        self.window as u64
    }
}

/// Two senders to one receiver, over one path each. Every packet is marked behind `mark_bytes`.
pub(crate) fn scenario(mark_bytes: u64) -> Scenario {
    let mut scenario = Scenario {
        pattern: Pattern::Incast { senders: 2 },
        message_bytes: 32 << 20,
        paths: 1,
        ..Scenario::default()
    };
    scenario.links.mark = Some((mark_bytes, mark_bytes));
    scenario
}

/// Runs both senders with an algorithm.
pub(crate) fn simulate(
    scenario: &Scenario,
    name: &str,
    make: impl Fn(&LinkFacts) -> Box<dyn CongestionControl>,
) -> Result<Report, ScenarioError> {
    let mut techniques = |context: &FlowContext| Techniques {
        control: make(&context.link),
        ..Techniques::default()
    };
    let simulation = Simulation::new(scenario, &[name.to_owned()], &mut techniques)?;
    Ok(simulation.run(|_| ()))
}

/// Compares DCTCP with a fixed window of 64 chunks.
pub(crate) fn main() -> Result<(), ScenarioError> {
    let scenario = scenario(64 << 10);
    let dctcp = simulate(&scenario, "DCTCP", |link| Box::new(Dctcp::new(link)))?;
    let fixed =
        simulate(&scenario, "fixed", |link| Box::new(FixedWindow::new(64 * link.chunk_len)))?;
    for report in [&dctcp, &fixed] {
        let group = &report.groups[0];
        println!(
            "{:>5}: {:5.2} GB/s, fairness {:.3}, 99 of 100 packets found at most {:3} KiB",
            group.name,
            group.goodput_gb_per_s,
            group.fairness,
            report.queue_p99_bytes / 1024
        );
    }
    Ok(())
}
