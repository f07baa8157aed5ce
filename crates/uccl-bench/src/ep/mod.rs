//! `uccl bench ep`: dispatch and combine between ranks of this host, on one node or kept apart as
//! if on several, each beside a copy of the same bytes.

mod kind;
mod ranks;
mod report;
mod shape;
mod task;
mod work;

use anyhow::{Context, Result};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use uccl_device::Topology;

pub use self::ranks::{RANK_SUBCOMMAND, serve_rank};
use self::{report::Report, shape::Shape, task::Ranks};
use super::report::{Machine, Sink};

/// Measure dispatch and combine of expert parallelism between ranks of this host.
///
/// All ranks make the same calls; a time is the slowest rank's, from entry to usable output. Bytes
/// are those of rows that experts read or write: a token counts once for each of its experts (in
/// normal mode for each of their ranks), and the table says how many of them are other ranks', and
/// how many bytes of rows cross to other nodes. With --nodes ranks reach those of other nodes over
/// TCP, or over the transport that UCCL_P2P_TRANSPORT names. Beside each call every rank copies as
/// many bytes in its own memory. Every call's result is checked once.
#[derive(Args, Debug)]
pub(crate) struct EpArgs {
    #[command(flatten)]
    shape: Shape,
    /// Rounds that are timed; three more go before them.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Make each rank a thread of this process instead of a process.
    #[arg(long)]
    threads: bool,
    /// Write the result as JSON to a file, or - for standard output.
    #[arg(long, value_parser = Sink::parse)]
    json: Option<Sink>,
}

/// Runs the benchmark of the arguments. An error if a result is wrong.
pub(crate) fn run(args: &EpArgs) -> Result<()> {
    args.shape.check()?;
    let progress = ProgressBar::new_spinner();
    progress.set_style(ProgressStyle::with_template("{spinner} {msg}")?);
    progress.set_message(format!("{} ranks, {} rounds", args.shape.ranks, args.rounds));
    progress.enable_steady_tick(std::time::Duration::from_millis(200));
    let ranks = Ranks { shape: args.shape, rounds: args.rounds };
    let all = if args.threads { ranks.as_threads() } else { ranks.as_processes() };
    progress.finish_and_clear();
    let all = all.context("expert parallelism was not measured")?;
    let topology = Topology::of_this_machine()?;
    let report = Report::of(args.shape, Machine::of(&topology), &all)?;
    match &args.json {
        Some(Sink::Stdout) => eprintln!("{report}"),
        _ => println!("{report}"),
    }
    match &args.json {
        Some(sink) => sink.write(&report.json()?),
        None => Ok(()),
    }
}
