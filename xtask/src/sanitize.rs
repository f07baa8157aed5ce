//! `cargo xtask sanitize`: the kernels of expert parallelism under compute-sanitizer.

use anyhow::Result;
use clap::Args;

use crate::{built, shell::Program};

/// Run tests of one rank on a GPU under compute-sanitizer (tests/sanitize.py)
#[derive(Args)]
pub(crate) struct SanitizeArgs {
    /// For tests/sanitize.py: --tools memcheck, --tests one_rank, --sanitizer PATH, --help
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    arguments: Vec<String>,
}

pub(crate) fn run(args: &SanitizeArgs) -> Result<()> {
    let built = built::tests(&["gpu"])?;
    let tests = built.tests_of("uccl-ep", "gpu")?;
    Program::new("python3").args(["tests/sanitize.py"]).args([tests]).args(&args.arguments).run()
}
