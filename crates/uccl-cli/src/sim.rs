//! `uccl sim`: algorithms of the transport on networks in virtual time.

mod args;
mod picture;
mod speed;
mod table;

use std::{
    fs,
    io::{IsTerminal, stderr},
    path::Path,
};

use anyhow::{Context, Result};
pub(crate) use args::SimArgs;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use uccl_sim::{Report, Scenario, Simulation};

/// The names of a flow's techniques: path choice, loss detection, congestion control.
type Names = (String, String, String);

/// A simulation of the command's, and its result.
#[derive(Serialize)]
struct Run {
    /// Paths of each flow.
    paths: u16,
    #[serde(flatten)]
    report: Report,
}

#[derive(Serialize)]
struct Output<'a> {
    version: &'static str,
    /// The command's arguments, which repeat it.
    command: String,
    runs: &'a [Run],
}

/// Simulates all that the arguments ask for.
pub(crate) fn run(args: &SimArgs) -> Result<()> {
    if args.bench {
        return speed::run();
    }
    let is_stdout_taken = args.json.as_deref() == Some(Path::new("-"));
    let say = |line: &str| match is_stdout_taken {
        true => eprintln!("{line}"),
        false => println!("{line}"),
    };
    say(&table::header());
    let mut runs = Vec::new();
    for (scenario, names) in args.simulations()? {
        let report = simulate(&scenario, &names)?;
        for line in table::lines(scenario.paths, &report) {
            say(&line);
        }
        runs.push(Run { paths: scenario.paths, report });
    }
    write_files(args, &runs)
}

/// Runs one simulation behind a progress bar.
fn simulate(scenario: &Scenario, names: &[Names]) -> Result<Report> {
    let simulation = Simulation::of_names(scenario, names)?;
    let target = match stderr().is_terminal() {
        true => ProgressDrawTarget::stderr(),
        false => ProgressDrawTarget::hidden(),
    };
    let bar = ProgressBar::with_draw_target(Some(1), target);
    let template = "{bar:32} {pos}/{len} messages, {msg} of virtual time, {eta} left";
    let style = ProgressStyle::with_template(template);
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let report = simulation.run(|progress| {
        bar.set_length(progress.messages as u64);
        bar.set_position(progress.completions as u64);
        bar.set_message(format!("{:.0} us", progress.now_ns as f64 / 1e3));
    });
    bar.finish_and_clear();
    Ok(report)
}

fn write_files(args: &SimArgs, runs: &[Run]) -> Result<()> {
    if let Some(path) = &args.json {
        let command = std::env::args().collect::<Vec<_>>().join(" ");
        let output = Output { version: env!("CARGO_PKG_VERSION"), command, runs };
        let text = serde_json::to_string_pretty(&output)? + "\n";
        match path.as_os_str() == "-" {
            true => print!("{text}"),
            false => write_file(path, &text)?,
        }
    }
    if let Some(path) = &args.plot {
        write_file(path, &picture::svg(runs, &args.title())?)?;
    }
    Ok(())
}

fn write_file(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}
