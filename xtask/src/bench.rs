//! `cargo xtask bench`: the project beside its peers.

use std::time::Duration;

use anyhow::Result;
use clap::Args;

use crate::{demo, shell::Program};

/// Measure this project and its peers side by side (bench/README.md)
#[derive(Args)]
pub(crate) struct BenchArgs {
    /// Run bench/gpu.py, which measures between two GPUs of this machine
    #[arg(long)]
    gpu: bool,
    /// For bench/run.py: --install, --quick, --only tcp, --json FILE, --help; for bench/gpu.py: --wheels DIR, ...
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    arguments: Vec<String>,
}

pub(crate) fn run(args: &BenchArgs) -> Result<()> {
    let uccl = demo::build()?;
    let script = if args.gpu { "bench/gpu.py" } else { "bench/run.py" };
    Program::new("python3")
        .args([script, "--uccl-bin"])
        .args([uccl])
        .args(&args.arguments)
        .limit(Duration::from_secs(2 * 3600))
        .run()
}
