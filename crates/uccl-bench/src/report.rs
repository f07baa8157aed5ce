//! Rows, and how they leave: JSON, CSV, files.

use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use serde::Serialize;
use uccl_device::Topology;

use super::stats::Latency;

/// Whether the bytes that arrived were checked.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Verification {
    /// Some bytes differ from the sent ones, or bytes beside them were touched.
    No,
    /// The bytes were not checked.
    Skipped,
    /// The bytes are the sent ones, and no others were touched.
    Yes,
}

impl Verification {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::No => "NO",
            Self::Skipped => "-",
            Self::Yes => "yes",
        }
    }
}

/// The measurement of one point.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    /// `write`, `read`, `send`, `notif`, or the name of a limit.
    pub(crate) op: String,
    /// The path of the bytes; `raw` for a limit.
    pub(crate) path: String,
    /// The path's name in the table and the plot, beside others.
    #[serde(skip)]
    pub(crate) path_label: String,
    /// The value of --transport; none for a limit.
    pub(crate) transport: Option<String>,
    /// This side's: `heap`, `alloc`, `pinned:0` or `gpu:0`; none for a limit of host memory.
    pub(crate) memory: Option<String>,
    /// The other side's, likewise.
    pub(crate) peer_memory: Option<String>,
    /// `uni` or `bi`; none for a limit.
    pub(crate) direction: Option<String>,
    /// Bytes of one iov.
    pub(crate) size_bytes: u64,
    /// Iovs of one transfer.
    pub(crate) iovs: u64,
    /// Bytes of one transfer.
    pub(crate) total_bytes: u64,
    /// Transfers outstanding while `gb_per_s` was measured.
    pub(crate) inflight: u64,
    /// Transfers timed.
    pub(crate) count: u64,
    /// Median over batches of bytes (both ways if `bi`) by time, in 1e9 bytes a second.
    pub(crate) gb_per_s: Option<f64>,
    /// Time of one transfer with nothing else outstanding.
    pub(crate) latency_us: Option<Latency>,
    /// Whether the bytes were checked.
    pub(crate) verified: Verification,
    /// Further facts: the congestion control, why a number is missing.
    pub(crate) note: Option<String>,
}

impl Row {
    /// A row without numbers.
    pub(crate) fn limit(op: &str, size_bytes: u64) -> Self {
        Self {
            op: op.to_owned(),
            path: RAW.to_owned(),
            path_label: RAW.to_owned(),
            transport: None,
            memory: None,
            peer_memory: None,
            direction: None,
            size_bytes,
            iovs: 1,
            total_bytes: size_bytes,
            inflight: 1,
            count: 0,
            gb_per_s: None,
            latency_us: None,
            verified: Verification::Skipped,
            note: None,
        }
    }

    pub(crate) fn is_limit(&self) -> bool {
        self.path == RAW
    }

    /// The operation's name in the table and the plot.
    pub(crate) fn op_label(&self) -> String {
        match self.direction.as_deref() {
            Some("bi") => format!("{} bi", self.op),
            _ => self.op.clone(),
        }
    }
}

const RAW: &str = "raw";

/// The report of one run.
#[derive(Debug, Serialize)]
pub(crate) struct Report<'a> {
    /// This program's version.
    pub(crate) version: &'static str,
    /// The machine that measured.
    pub(crate) machine: Machine,
    /// The other one's name, if there is one.
    pub(crate) peer: Option<String>,
    /// The GPUs that take part.
    pub(crate) gpus: GpuNames,
    /// Seconds that each point may take.
    pub(crate) duration_s: f64,
    pub(crate) rows: &'a [Row],
}

/// The names of the two sides' GPUs, where a side has one.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize)]
pub(crate) struct GpuNames {
    pub(crate) this: Option<String>,
    pub(crate) other: Option<String>,
}

/// The properties of a machine that explain its numbers.
#[derive(Debug, Serialize)]
pub(crate) struct Machine {
    hostname: Option<String>,
    kernel: Option<String>,
    cpu: Option<String>,
    cpus: usize,
    congestion_control: Option<String>,
}

impl Machine {
    pub(crate) fn of(topology: &Topology) -> Self {
        Self {
            hostname: topology.host.hostname.clone(),
            kernel: topology.kernel.release.clone(),
            cpu: topology.cpus.model.clone(),
            cpus: topology.cpus.online.len(),
            congestion_control: topology.kernel.congestion.default.clone(),
        }
    }
}

/// A file, or standard output if it is called `-`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Sink {
    File(PathBuf),
    Stdout,
}

impl Sink {
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        match text {
            "" => Err("name a file, or - for standard output".into()),
            "-" => Ok(Self::Stdout),
            path => Ok(Self::File(path.into())),
        }
    }

    pub(crate) fn write(&self, text: &str) -> Result<()> {
        match self {
            Self::File(path) => write_file(path, text),
            Self::Stdout => {
                let mut stdout = io::stdout().lock();
                stdout.write_all(text.as_bytes()).context("cannot write to standard output")
            }
        }
    }
}

pub(crate) fn write_file(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

pub(crate) fn json(report: &Report<'_>) -> Result<String> {
    Ok(serde_json::to_string_pretty(report)? + "\n")
}

const CSV_HEADER: &str = "op,path,transport,memory,peer_memory,direction,size_bytes,iovs,total_bytes,inflight,\
                          count,gb_per_s,p50_us,p99_us,min_us,verified,note";

pub(crate) fn csv(rows: &[Row]) -> Result<String> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    writer.write_record(CSV_HEADER.split(','))?;
    for row in rows {
        let latency = |pick: fn(&Latency) -> f64| number(row.latency_us.as_ref().map(pick));
        let optional = |text: &Option<String>| text.clone().unwrap_or_default();
        writer.write_record([
            row.op.clone(),
            row.path.clone(),
            optional(&row.transport),
            optional(&row.memory),
            optional(&row.peer_memory),
            optional(&row.direction),
            row.size_bytes.to_string(),
            row.iovs.to_string(),
            row.total_bytes.to_string(),
            row.inflight.to_string(),
            row.count.to_string(),
            number(row.gb_per_s),
            latency(|l| l.p50),
            latency(|l| l.p99),
            latency(|l| l.min),
            row.verified.name().to_owned(),
            optional(&row.note),
        ])?;
    }
    Ok(String::from_utf8(writer.into_inner()?)?)
}

fn number(value: Option<f64>) -> String {
    value.map_or_else(String::new, |value| format!("{value:.6}"))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn row(op: &str, path: &str, size_bytes: u64, gb_per_s: f64) -> Row {
        Row {
            path: path.into(),
            path_label: path.into(),
            transport: Some("auto".into()),
            direction: Some("uni".into()),
            gb_per_s: Some(gb_per_s),
            latency_us: Some(Latency { p50: 1.5, p99: 20.25, min: 1.0 }),
            count: 1000,
            verified: Verification::Yes,
            ..Row::limit(op, size_bytes)
        }
    }

    #[test]
    fn csv_has_a_cell_for_each_heading() {
        let mut wordy = row("write", "cma", 64, 1.5);
        wordy.note = Some("slow, \"very\"".into());
        let text = csv(&[wordy, Row::limit("tcp-rtt", 64)]).expect("CSV");
        let lines: Vec<_> = text.lines().collect();
        let headings = CSV_HEADER.split(',').count();
        assert_eq!(lines.len(), 3);
        assert!(lines[1].ends_with(",1.500000,20.250000,1.000000,yes,\"slow, \"\"very\"\"\""));
        assert_eq!(lines[2].split(',').count(), headings);
        assert_eq!(lines[2], "tcp-rtt,raw,,,,,64,1,64,1,0,,,,,-,");
    }

    #[test]
    fn json_has_null_for_a_missing_number() {
        let report = Report {
            version: "0",
            machine: Machine {
                hostname: None,
                kernel: None,
                cpu: None,
                cpus: 2,
                congestion_control: None,
            },
            peer: None,
            gpus: GpuNames::default(),
            duration_s: 0.1,
            rows: &[row("write", "cma", 64, 1.5), Row::limit("tcp-rtt", 64)],
        };
        let value: serde_json::Value =
            serde_json::from_str(&json(&report).expect("JSON")).expect("valid JSON");
        assert_eq!(value["rows"][0]["latency_us"]["p99"], 20.25);
        assert_eq!(value["rows"][0]["verified"], "yes");
        assert!(value["rows"][1]["gb_per_s"].is_null());
        assert_eq!(value["rows"][1]["path"], "raw");
    }

    #[test]
    fn a_dash_is_standard_output() {
        assert_eq!(Sink::parse("-"), Ok(Sink::Stdout));
        assert_eq!(Sink::parse("a.json"), Ok(Sink::File("a.json".into())));
        assert!(Sink::parse("").is_err());
    }
}
