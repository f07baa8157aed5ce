//! Two processes that do to each other whatever endpoints can (`crates/uccl-storm`).

use std::time::Duration;

use anyhow::Result;
use clap::Args;

use crate::{built, shell::Program};

/// How long it takes where nobody asks for more, all links together.
const SHORT: &str = "--seconds=30";
/// For as long as somebody wants.
const LIMIT: Duration = Duration::from_secs(24 * 60 * 60);

/// Two processes at random over real links; every byte of their memory is accounted for
#[derive(Args)]
pub(crate) struct StormArgs {
    /// What uccl-storm is told: `--link cma --minutes 30`, `--seed N`; `--help` lists all
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

pub(crate) fn run(args: &StormArgs) -> Result<()> {
    let storm = ["run", "--locked", "--quiet", "--package", "uccl-storm", "--"];
    Program::cargo(&storm).args(&args.arguments).limit(LIMIT).run()
}

/// What every change has to stand, with what the tests have built.
pub(crate) fn run_shortly() -> Result<()> {
    Program::new(built::program("uccl-storm")?).args([SHORT]).run()
}
