//! The table: a line for each group of flows of a simulation.

use uccl_sim::{GroupReport, Report};

const COLUMNS: [(&str, usize); 14] = [
    ("algorithms", 34),
    ("paths", 5),
    ("seed", 4),
    ("p50 us", 8),
    ("p99 us", 8),
    ("p99.9 us", 8),
    ("p99/ideal", 9),
    ("GB/s", 7),
    ("fair", 5),
    ("repeats", 7),
    ("lost", 6),
    ("full", 6),
    ("queue KiB", 9),
    ("p99 KiB", 7),
];

pub(super) fn header() -> String {
    let titles = COLUMNS.map(|(title, _)| title.to_owned());
    let rule = COLUMNS.map(|(_, width)| "-".repeat(width));
    format!("{}\n{}", line(&titles), line(&rule))
}

pub(super) fn lines(paths: u16, report: &Report) -> Vec<String> {
    let mut lines: Vec<_> =
        report.groups.iter().map(|group| line(&cells(paths, report, group))).collect();
    if report.unfinished > 0 {
        lines.push(format!("   {} messages had not come at the end", report.unfinished));
    }
    lines
}

fn cells(paths: u16, report: &Report, group: &GroupReport) -> [String; COLUMNS.len()] {
    let kib = |bytes: u64| number(bytes as f64 / 1024.0);
    let slowdown = uccl_sim::percentile(&group.slowdowns, 0.99);
    [
        group.name.clone(),
        paths.to_string(),
        report.seed.to_string(),
        number(group.times.p50_us),
        number(group.times.p99_us),
        number(group.times.p999_us),
        number(slowdown),
        number(group.goodput_gb_per_s),
        format!("{:.3}", group.fairness),
        group.repeats.to_string(),
        report.drops.lost.to_string(),
        report.drops.full.to_string(),
        kib(report.queue_max_bytes),
        kib(report.queue_p99_bytes),
    ]
}

fn line(cells: &[String; COLUMNS.len()]) -> String {
    let padded = COLUMNS.iter().zip(cells).enumerate().map(|(at, ((_, width), cell))| match at {
        0 => format!("{cell:<width$}"),
        _ => format!("{cell:>width$}"),
    });
    padded.collect::<Vec<_>>().join("  ").trim_end().to_owned()
}

/// About three digits.
fn number(value: f64) -> String {
    match value {
        v if v >= 100.0 => format!("{v:.0}"),
        v if v >= 10.0 => format!("{v:.1}"),
        v => format!("{v:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use uccl_sim::{Scenario, Simulation};

    use super::*;

    #[test]
    fn every_line_is_as_wide_as_the_header() {
        let scenario = Scenario { message_bytes: 10_000, ..Scenario::default() };
        let simulation = Simulation::named(&scenario, "round-robin", "time", "fixed");
        let report = simulation.expect("a scenario").run(|_| ());
        let (header, lines) = (header(), lines(16, &report));
        let widths: Vec<_> = header.lines().map(str::len).collect();
        assert_eq!(widths, [lines[0].len(); 2]);
        assert!(lines[0].starts_with("fixed, round-robin, time "), "{}", lines[0]);
    }
}
