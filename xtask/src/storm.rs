//! Two processes that use all that an endpoint can do on each other (`crates/uccl-storm`).

use std::time::Duration;

use anyhow::Result;
use clap::Args;

use crate::{built, shell::Program};

/// The default duration, for all links together.
const SHORT: &str = "--seconds=30";
/// Time limit: as long as a developer wants.
const LIMIT: Duration = Duration::from_secs(24 * 60 * 60);

/// Two processes at random over real links; every byte of their memory is accounted for
#[derive(Args)]
pub(crate) struct StormArgs {
    /// Arguments of uccl-storm: `--link cma --minutes 30`, `--seed N`; `--help` lists all
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

pub(crate) fn run(args: &StormArgs) -> Result<()> {
    let storm = ["run", "--locked", "--quiet", "--package", "uccl-storm", "--"];
    Program::cargo(&storm).args(&args.arguments).limit(LIMIT).run()
}

/// Runs the storm that every change has to stand, with the tests' builds.
pub(crate) fn run_shortly() -> Result<()> {
    Program::new(built::program("uccl-storm")?).args([SHORT]).run()
}
