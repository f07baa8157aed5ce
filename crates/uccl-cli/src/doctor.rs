//! `uccl doctor`: the faults of this machine, their cost and their remedies.

mod frameworks;
mod gpus;
mod host;
mod nccl;
mod network;
mod rdma;
#[cfg(test)]
mod tests;

use std::{borrow::Cow, fmt::Write, net::TcpListener, process::ExitCode};

use anyhow::Result;
use clap::Args;
use rustix::process::{Resource, getrlimit};
use serde::{Deserialize, Serialize};
use uccl_device::Topology;
use uccl_p2p::{Config, Transport};

use crate::{
    gpus::Gpus,
    paths::Probes,
    probe::{self, Cubic},
};

/// Name the causes of slow transfers on this machine, and a remedy for each.
///
/// The last lines say what each framework of the Python that `python3` starts would use of this
/// project. The exit status is 0 unless something keeps transfers from working at all.
#[derive(Args)]
pub(crate) struct DoctorArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The severity of a finding.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Level {
    /// The setting is as it should be.
    Fine,
    /// A part is missing, and perhaps not wanted.
    Note,
    /// Transfers work, but cost speed.
    Slow,
    /// Transfers do not work.
    Broken,
}

/// The result of one examination: its subject, its level and the observation.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct Finding {
    about: Cow<'static, str>,
    level: Level,
    seen: String,
    /// The cost of a fault; empty without one.
    #[serde(default)]
    cost: String,
    /// The remedy; empty if none is needed.
    remedy: String,
}

impl Finding {
    fn fine(about: &'static str, seen: impl Into<String>) -> Self {
        Self {
            about: about.into(),
            level: Level::Fine,
            seen: seen.into(),
            cost: String::new(),
            remedy: String::new(),
        }
    }

    fn new(about: &'static str, level: Level, seen: impl Into<String>) -> Self {
        Self { level, ..Self::fine(about, seen) }
    }

    fn cost(mut self, cost: impl Into<String>) -> Self {
        self.cost = cost.into();
        self
    }

    fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = remedy.into();
        self
    }
}

/// The input of all checks.
struct Facts {
    topology: Topology,
    probes: Probes,
    loopback: Result<Cubic, String>,
    any_interface: Result<(), String>,
    /// Open files that this process may have; none for no limit.
    open_files: Option<u64>,
    rdma: rdma::Facts,
    gpus: Gpus,
    settings: Result<Config, String>,
    frameworks: Vec<Finding>,
    /// The variable that selects NCCL's interfaces, and its text.
    nccl_selection: Option<(&'static str, String)>,
    /// The speed of NCCL's device in Mbit/s, as a variable tells it.
    nccl_mbps: Option<u32>,
}

impl Facts {
    fn gather() -> Result<Self> {
        Ok(Self {
            topology: Topology::of_this_machine()?,
            probes: Probes::run(),
            loopback: probe::loopback().map_err(|error| error.to_string()),
            any_interface: TcpListener::bind("0.0.0.0:0").map(|_| ()).map_err(|e| e.to_string()),
            open_files: getrlimit(Resource::Nofile).current,
            rdma: rdma::Facts::gather(),
            gpus: Gpus::look(),
            settings: Config::from_env().map_err(|error| error.to_string()),
            frameworks: frameworks::gather(),
            nccl_selection: nccl::selection(),
            nccl_mbps: nccl::told_mbps(),
        })
    }
}

pub(crate) fn run(args: &DoctorArgs) -> Result<ExitCode> {
    let findings = examine(&Facts::gather()?);
    match args.json {
        true => println!("{}", serde_json::to_string_pretty(&findings)?),
        false => print!("{}", text(&findings)),
    }
    let broken = findings.iter().any(|finding| finding.level == Level::Broken);
    Ok(if broken { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn text(findings: &[Finding]) -> String {
    let mut out = String::new();
    for Finding { about, level, seen, cost, remedy } in findings {
        let mark = match level {
            Level::Fine => "ok    ",
            Level::Note => "note  ",
            Level::Slow => "slow  ",
            Level::Broken => "BROKEN",
        };
        let _ = writeln!(out, "{mark}  {about}: {seen}");
        for (what, line) in [("cost", cost), ("remedy", remedy)] {
            if !line.is_empty() {
                let _ = writeln!(out, "        {what}: {line}");
            }
        }
    }
    let count = |level| findings.iter().filter(|finding| finding.level == level).count();
    let (broken, slow) = (count(Level::Broken), count(Level::Slow));
    let _ = match (broken, slow) {
        (0, 0) => writeln!(out, "\nnothing holds this machine back"),
        _ => writeln!(out, "\n{broken} broken, {slow} slow"),
    };
    out
}

fn examine(facts: &Facts) -> Vec<Finding> {
    let mut findings = vec![
        settings(facts),
        network::sockets(facts),
        host::process_memory(facts),
        host::shared_memory(facts),
        network::congestion(facts),
        network::socket_buffers(facts),
        network::network(facts),
        nccl::interfaces(
            &facts.topology.interfaces,
            facts.nccl_selection.as_ref(),
            facts.nccl_mbps,
        ),
        host::cpus(facts),
        host::numa(facts),
        host::huge_pages(facts),
        host::open_files(facts),
    ];
    findings.extend(rdma::examine(&facts.topology, &facts.rdma));
    findings.extend(gpus::examine(&facts.topology, &facts.gpus));
    findings.extend_from_slice(&facts.frameworks);
    findings
}

fn settings(facts: &Facts) -> Finding {
    const ABOUT: &str = "settings";
    match &facts.settings {
        Err(error) => Finding::new(ABOUT, Level::Broken, error)
            .cost("no endpoint can start")
            .remedy("correct the environment variable, or unset it"),
        Ok(config) if !config.cma => {
            Finding::new(ABOUT, Level::Slow, "UCCL_P2P_DISABLE_CMA is set")
                .cost(SHARED_RING)
                .remedy("unset it")
        }
        Ok(config) if config.transport == Transport::Tcp => {
            Finding::new(ABOUT, Level::Slow, "UCCL_P2P_TRANSPORT=tcp")
                .cost("same-host transfers go over TCP")
                .remedy("unset it, or set it to auto")
        }
        Ok(_) => Finding::fine(ABOUT, "the environment is understood"),
    }
}

/// The cost where the kernel refuses copies between processes.
const SHARED_RING: &str = "same-host transfers go through a shared ring: two copies for one";
