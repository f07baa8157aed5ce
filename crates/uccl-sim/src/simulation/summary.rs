//! The report of a simulation.

use super::Simulation;
use crate::report::{Completions, GroupReport, Report, fairness, percentile};

impl Simulation {
    pub(super) fn report(self, messages: usize) -> Report {
        let groups = (0..self.groups.len()).map(|group| self.group(group)).collect();
        Report {
            seed: self.scenario.seed,
            groups,
            completions: self.completions,
            unfinished: messages - self.completions,
            elapsed_us: self.now_ns as f64 / 1e3,
            queue_max_bytes: self.depths.most,
            queue_p99_bytes: self.depths.p99(),
            queue_timeline: self.depths.timeline(self.now_ns),
            marked: self.marked,
            drops: self.drops,
            packets: self.sent,
            events: self.events,
        }
    }

    fn group(&self, group: usize) -> GroupReport {
        let flows: Vec<_> = self.flows.iter().filter(|flow| flow.group == group).collect();
        let mut times: Vec<f64> = Vec::new();
        let (mut slowdowns, mut speeds) = (Vec::new(), Vec::new());
        let (mut bytes, mut last_ns, mut ideal_us) = (0.0, 0u64, 0f64);
        for flow in &flows {
            let ideal_ns = self.scenario.ideal_ns(flow.plan.sharers);
            ideal_us = ideal_us.max(ideal_ns / 1e3);
            times.extend(flow.times_ns.iter().map(|ns| *ns as f64 / 1e3));
            slowdowns.extend(flow.times_ns.iter().map(|ns| *ns as f64 / ideal_ns));
            let own = flow.times_ns.len() as f64 * self.scenario.message_bytes as f64;
            let begun_ns = flow.begun_ns.first().copied().unwrap_or(0);
            speeds.push(own / flow.last_ns.saturating_sub(begun_ns).max(1) as f64);
            bytes += own;
            last_ns = last_ns.max(flow.last_ns);
        }
        times.sort_by(f64::total_cmp);
        slowdowns.sort_by(f64::total_cmp);
        let sum = |count: fn(&crate::host::Flow) -> u64| flows.iter().map(|flow| count(flow)).sum();
        GroupReport {
            name: self.groups[group].clone(),
            flows: flows.len(),
            completions: times.len(),
            times: Completions {
                p50_us: percentile(&times, 0.5),
                p99_us: percentile(&times, 0.99),
                p999_us: percentile(&times, 0.999),
                max_us: times.last().copied().unwrap_or(0.0),
            },
            ideal_us,
            goodput_gb_per_s: bytes / last_ns.max(1) as f64,
            fairness: fairness(&speeds),
            chunks: sum(|flow| flow.chunks),
            repeats: sum(|flow| flow.sender.repeats()),
            undone: sum(|flow| flow.sender.undone()),
            slowdowns,
        }
    }
}
