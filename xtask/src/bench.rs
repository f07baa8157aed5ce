//! `cargo xtask bench`: the project beside its peers.

use std::time::Duration;

use anyhow::Result;
use clap::Args;

use crate::{demo, optimized::For, python, shell::Program};

/// Measure this project and its peers side by side (bench/README.md)
#[derive(Args)]
pub(crate) struct BenchArgs {
    /// Run bench.gpu.run, which measures between two GPUs of this machine
    #[arg(long)]
    gpu: bool,
    /// Run bench.nixl.run, which measures NIXL with this project's backend and with UCX
    #[arg(long, conflicts_with = "gpu")]
    nixl: bool,
    /// Run bench.rdma.run, which measures RDMA beside perftest, in a guest or on --devices, and
    /// libfabric
    #[arg(long, conflicts_with_all = ["gpu", "nixl"])]
    rdma: bool,
    /// Run bench.before.run, which measures this tree beside an earlier commit of it
    #[arg(long, value_name = "REVISION", conflicts_with_all = ["gpu", "nixl", "rdma"])]
    before: Option<String>,
    /// For bench.host.run: --install, --quick, --only tcp, --json FILE, --help; for bench.gpu.run:
    /// --wheels DIR, ...; for bench.nixl.run: --install, --only dram,post, ...; for bench.rdma.run:
    /// --devices mlx5_0-mlx5_1, --only verbs, ...
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    arguments: Vec<String>,
}

pub(crate) fn run(args: &BenchArgs) -> Result<()> {
    let program = Program::new("python3");
    let program = if args.nixl {
        // The folder of wheels that holds the project's.
        let wheels = python::build(For::Users)?.with_file_name("");
        program.args(["-m", "bench.nixl.run", "--wheels"]).args([wheels])
    } else {
        let module = match (args.gpu, args.rdma, &args.before) {
            (true, ..) => "bench.gpu.run",
            (_, true, _) => "bench.rdma.run",
            (.., Some(_)) => "bench.before.run",
            _ => "bench.host.run",
        };
        let before = args.before.iter().flat_map(|revision| ["--before", revision]);
        program.args(["-m", module, "--uccl-bin"]).args([demo::build(For::Users)?]).args(before)
    };
    program.args(&args.arguments).limit(Duration::from_secs(2 * 3600)).run()
}
