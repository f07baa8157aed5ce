//! The results, as a table and as JSON.

use std::{fmt::Write as _, path::PathBuf};

use serde::Serialize;

use crate::message::Outcome;

/// All results of a library.
#[derive(Serialize)]
pub(crate) struct Report {
    library: PathBuf,
    net_versions: Vec<u32>,
    tuner_versions: Vec<u32>,
    rma_versions: Vec<u32>,
    pub(crate) rows: Vec<Row>,
}

/// The result of one check of one table.
#[derive(Serialize)]
pub(crate) struct Row {
    pub(crate) check: String,
    /// 0: of all tables together.
    pub(crate) version: u32,
    pub(crate) outcome: Outcome,
}

impl Report {
    /// A report without results, of a library with tables of these versions: network, tuner,
    /// one-sided.
    pub(crate) fn new(library: PathBuf, versions: [Vec<u32>; 3]) -> Self {
        let [net_versions, tuner_versions, rma_versions] = versions;
        Self { library, net_versions, tuner_versions, rma_versions, rows: Vec::new() }
    }

    pub(crate) fn is_well(&self) -> bool {
        !self.rows.iter().any(|row| matches!(row.outcome, Outcome::Failed(_)))
    }

    /// The table of outcomes, a column for each version, and below it the reasons.
    pub(crate) fn text(&self) -> String {
        let mut versions: Vec<u32> = self.rows.iter().map(|row| row.version).collect();
        versions.sort_unstable();
        versions.dedup();
        let mut out = format!("\n{:<18}", "check");
        for version in &versions {
            let _ = write!(out, "{:>8}", column(*version));
        }
        out.push('\n');
        let mut names: Vec<&str> = Vec::new();
        for row in &self.rows {
            if names.last() != Some(&row.check.as_str()) {
                names.push(&row.check);
            }
        }
        for name in names {
            let _ = write!(out, "{name:<18}");
            for version in &versions {
                let mut rows = self.rows.iter();
                let row = rows.find(|row| row.check == name && row.version == *version);
                let _ = write!(out, "{:>8}", row.map_or("", |row| mark(&row.outcome)));
            }
            out.push('\n');
        }
        let count =
            |wanted: &str| self.rows.iter().filter(|row| mark(&row.outcome) == wanted).count();
        let (passed, failed, skipped) = (count("ok"), count("FAILED"), count("-"));
        let _ = writeln!(out, "\n{passed} passed, {failed} failed, {skipped} skipped");
        out
    }
}

fn column(version: u32) -> String {
    if version == 0 { "all".into() } else { format!("v{version}") }
}

fn mark(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Passed(_) => "ok",
        Outcome::Failed(_) => "FAILED",
        Outcome::Skipped(_) => "-",
    }
}

/// A line about one result.
pub(crate) fn line(check: &str, version: u32, outcome: &Outcome) -> String {
    let (Outcome::Passed(said) | Outcome::Failed(said) | Outcome::Skipped(said)) = outcome;
    format!("{:<7} {check} {}: {said}", mark(outcome), column(version))
}
