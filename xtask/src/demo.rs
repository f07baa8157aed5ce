//! `cargo xtask demo`: moves data between two processes and checks every byte.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Result;
use clap::Args;

use crate::{optimized::For, prebuild, shell::Program};

/// The demonstration's transfers: half a minute of them.
const SWEEP: &[&str] = &[
    "bench",
    "--transport=auto,tcp",
    "--op=write,read,notif",
    "--size=64,4K,64K,1M,16M",
    "--duration=200ms",
];

/// The shortest transfers that show that the demonstration works.
const SHORT: &[&str] =
    &["bench", "--transport=auto,tcp", "--op=write,read,notif", "--size=64,1M", "--duration=20ms"];

/// Build the uccl command and move data between two processes of this machine
///
/// Needs no GPU, no NIC, no CUDA and no Python. The table's last column says whether every byte
/// that arrived was the one that was sent; the command fails if one was not.
#[derive(Args)]
pub(crate) struct DemoArgs {
    /// Fewer sizes, less time for each
    #[arg(long)]
    pub(crate) short: bool,
}

pub(crate) fn run(args: &DemoArgs) -> Result<()> {
    show(args, &build(For::Users)?)
}

/// Runs the short demonstration with the tests' build of the command.
pub(crate) fn run_shortly() -> Result<()> {
    show(&DemoArgs { short: true }, &build(For::Tests)?)
}

fn show(args: &DemoArgs, uccl: &Path) -> Result<()> {
    println!("\nThis machine:");
    Program::new(uccl).args(["topo"]).limit(Duration::from_secs(60)).run()?;
    println!(
        "\nTwo processes, first over the best path between them, then over TCP. GB/s is 1e9 bytes a\n\
         second, with four transfers under way; the times are of one transfer alone."
    );
    let sweep = if args.short { SHORT } else { SWEEP };
    Program::new(uccl).args(sweep).limit(Duration::from_secs(300)).run()?;
    println!("\nEvery byte arrived as it was sent. More: uccl bench --help, uccl doctor.");
    Ok(())
}

/// Builds the command and returns its path.
pub(crate) fn build(whom: For) -> Result<PathBuf> {
    prebuild::wait();
    let build = Program::cargo(&["build", "--release", "--locked", "--package=uccl-cli"]);
    whom.set_in(build).run()?;
    Ok(whom.folder().join("uccl"))
}
