//! `cargo xtask hammer`: random and mutated bytes for every parser.

use anyhow::Result;
use clap::Args;

use crate::{built, shell::Program};

/// Throw random and mutated bytes at every parser of uccl-wire
#[derive(Args)]
pub(crate) struct HammerArgs {
    /// Frames to throw
    #[arg(default_value_t = 10_000_000)]
    pub(crate) count: u64,
    /// Seed of the random numbers: a failure names it [default: a new one]
    pub(crate) seed: Option<u64>,
}

/// Runs the parsers as the tests build them: with checks for overflow, which a release build leaves
/// out.
pub(crate) fn run(args: &HammerArgs) -> Result<()> {
    let hammer = ["run", "--quiet", "--locked", "--package=uccl-fuzz", "--example=hammer", "--"];
    throw(Program::cargo(&hammer), args)
}

/// Runs the example that the tests have built.
pub(crate) fn run_built(args: &HammerArgs) -> Result<()> {
    throw(Program::new(built::examples()?.executable("hammer")?), args)
}

fn throw(hammer: Program, args: &HammerArgs) -> Result<()> {
    let numbers = [Some(args.count), args.seed];
    hammer.args(numbers.iter().flatten().map(u64::to_string)).run()
}
