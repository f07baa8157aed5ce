//! `cargo xtask bench`: the project beside its peers.

use std::time::Duration;

use anyhow::Result;
use clap::Args;

use crate::{demo, shell::Program};

/// Measure this project and its peers side by side (bench/README.md)
#[derive(Args)]
pub(crate) struct BenchArgs {
    /// For bench/run.py: --install, --quick, --only tcp, --json FILE, --help
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    arguments: Vec<String>,
}

pub(crate) fn run(args: &BenchArgs) -> Result<()> {
    let uccl = demo::build()?;
    Program::new("python3")
        .args(["bench/run.py", "--uccl-bin"])
        .args([uccl])
        .args(&args.arguments)
        .limit(Duration::from_secs(2 * 3600))
        .run()
}
