//! Checks NCCL plugins without NCCL and without a GPU: `uccl nccl-check LIBRARY`.
//!
//! Each behaviour runs in processes of its own, its *ranks*, which load the library as NCCL does
//! and call its tables as NCCL's proxy does. A plugin that crashes or hangs fails that behaviour
//! alone.
//!
//! ```text
//!   library.rs   dlopen, tables     net.rs     one way to call all versions   log.rs   the logger
//!   launch.rs    starts ranks       rank.rs    a rank's means                 memory.rs   guarded memory
//!   behaviours/  the list           report.rs  table and JSON            hosts.rs    namespaces
//!   bench.rs     collectives' messages, with their times             threads.rs   threads that run
//!   rma.rs, rma_table.rs   the same for one-sided tables   group.rs   a rank's one-sided means
//! ```

mod behaviours;
mod bench;
mod group;
mod hosts;
mod launch;
mod library;
mod log;
mod memory;
mod message;
mod net;
mod rank;
mod report;
mod rma;
mod rma_table;
mod serve;
mod threads;

use std::{env, path::PathBuf, process::ExitCode, time::Duration};

use anyhow::{Context as _, Result, bail};
use clap::Args;

use crate::{
    behaviours::{BEHAVIOURS, Behaviour, Over},
    launch::Launch,
    library::Library,
    message::Outcome,
    report::{Report, Row},
};

/// The subcommand by which a check starts its ranks; see [`serve_parent`].
pub const SUBCOMMAND: &str = "nccl-check-rank";

/// Check an NCCL network, tuner or one-sided plugin: layout and behaviour, without a GPU
///
/// The plugin is loaded as NCCL loads it, by two and more processes. The exit status is 0 unless a
/// check fails. Variables of the environment, as NCCL_SOCKET_IFNAME, reach the plugin.
#[derive(Args, Clone, Debug)]
pub struct CheckArgs {
    /// The plugin's library, as for NCCL_NET_PLUGIN
    library: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Only the tables of these versions
    #[arg(long, value_delimiter = ',', value_name = "N")]
    versions: Vec<u32>,
    /// Only these checks
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    only: Vec<String>,
    /// All checks but these
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    except: Vec<String>,
    /// List the checks
    #[arg(long)]
    list: bool,
    /// Measure the messages of collectives instead, with the newest table: NCCL's sizes and order,
    /// two ranks, GPUs that cost no time
    #[arg(long, conflicts_with_all = ["only", "except", "list"])]
    bench: bool,
    /// The length of one of the bench's measurements
    #[arg(long, default_value_t = 60, value_name = "MS")]
    batch_ms: u64,
    /// The longest time of one check
    #[arg(long, default_value_t = 120, value_name = "SECONDS")]
    limit_s: u64,
    /// The longest time of a call that must return at once
    #[arg(long, default_value_t = 1000, value_name = "MS")]
    call_limit_ms: u64,
    /// The longest time until an error tells of a peer that was stopped
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    silence_s: u64,
}

/// Runs the command.
pub fn run(args: &CheckArgs) -> Result<ExitCode> {
    if args.list {
        for behaviour in BEHAVIOURS {
            println!("{:<16} {}", behaviour.name, behaviour.about);
        }
        return Ok(ExitCode::SUCCESS);
    }
    for name in args.only.iter().chain(&args.except) {
        if !BEHAVIOURS.iter().any(|behaviour| behaviour.name == name) {
            bail!("there is no check {name}: --list names them");
        }
    }
    if args.bench {
        return bench(args);
    }
    let report = check(args)?;
    match args.json {
        true => println!("{}", serde_json::to_string_pretty(&report)?),
        false => print!("{}", report.text()),
    }
    Ok(if report.is_well() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Is a rank of the check that started this process.
pub fn serve_parent() -> Result<()> {
    serve::serve()
}

/// Measures with the newest table of those that are wanted.
fn bench(args: &CheckArgs) -> Result<ExitCode> {
    let path = library(args)?;
    let mut nets = versions(&path)?.nets;
    nets.retain(|version| args.versions.is_empty() || args.versions.contains(version));
    let version = nets.pop().context("it has no network table of these versions")?;
    let rows = match launch(args, path)?.run(&bench::BENCH, version)? {
        Outcome::Passed(rows) => rows,
        Outcome::Failed(reason) | Outcome::Skipped(reason) => bail!("{reason}"),
    };
    match args.json {
        true => println!("{rows}"),
        false => print!("{}", bench::text(&serde_json::from_str::<Vec<bench::Row>>(&rows)?)),
    }
    Ok(ExitCode::SUCCESS)
}

fn library(args: &CheckArgs) -> Result<PathBuf> {
    args.library.canonicalize().with_context(|| args.library.display().to_string())
}

fn launch(args: &CheckArgs, library: PathBuf) -> Result<Launch> {
    Ok(Launch {
        program: env::current_exe().context("where this program is")?,
        library,
        limit: Duration::from_secs(args.limit_s),
        call_limit_ms: args.call_limit_ms,
        silence_s: args.silence_s,
        batch_ms: args.batch_ms,
    })
}

fn check(args: &CheckArgs) -> Result<Report> {
    let path = library(args)?;
    let Versions { nets, tuners, rmas } = versions(&path)?;
    let wanted = |version: &u32| args.versions.is_empty() || args.versions.contains(version);
    let all = nets.clone();
    let nets: Vec<u32> = nets.into_iter().filter(wanted).collect();
    let chosen_rmas: Vec<u32> = rmas.iter().copied().filter(wanted).collect();
    let launch = launch(args, path.clone())?;
    let mut report = Report::new(path, [all, tuners.clone(), rmas]);
    let chosen = |behaviour: &&Behaviour| {
        let is_named = |names: &[String]| names.iter().any(|name| name == behaviour.name);
        (args.only.is_empty() || is_named(&args.only)) && !is_named(&args.except)
    };
    for behaviour in BEHAVIOURS.iter().filter(chosen) {
        let versions = match behaviour.over {
            Over::Library => vec![0],
            Over::Nets if nets.is_empty() => continue,
            Over::Nets => nets.clone(),
            Over::Tuners => tuners.clone(),
            Over::Rmas => chosen_rmas.clone(),
        };
        for version in versions {
            let outcome = launch.run(behaviour, version)?;
            if !args.json {
                eprintln!("{}", report::line(behaviour.name, version, &outcome));
            }
            report.rows.push(Row { check: behaviour.name.into(), version, outcome });
        }
    }
    if report.rows.iter().all(|row| matches!(row.outcome, Outcome::Skipped(_))) {
        bail!("nothing of {} was checked", args.library.display());
    }
    Ok(report)
}

/// The versions of a library's tables.
struct Versions {
    nets: Vec<u32>,
    tuners: Vec<u32>,
    rmas: Vec<u32>,
}

fn versions(path: &std::path::Path) -> Result<Versions> {
    let library = Library::open(path)?;
    let nets: Vec<u32> = library.nets().iter().map(|table| table.version()).collect();
    let tuners: Vec<u32> = library.tuners().iter().map(|table| table.version()).collect();
    let rmas: Vec<u32> = library.rmas().iter().map(|table| table.version()).collect();
    // SAFETY: only numbers are left of the tables.
    unsafe { library.close() }?;
    if nets.is_empty() && tuners.is_empty() && rmas.is_empty() {
        bail!(
            "it exports neither ncclNetPlugin_v8 to v12 nor ncclTunerPlugin_v4 or v5 nor \
             ncclRmaPlugin_v13 to v16"
        );
    }
    Ok(Versions { nets, tuners, rmas })
}
