//! The `uccl` command: shows a machine's devices, names causes of slow transfers, measures
//! transfers by the crate `uccl-bench`, checks NCCL's plugins by the crate `uccl-nccl-check`, and
//! simulates networks by the crate `uccl-sim`.

mod doctor;
mod gpus;
mod libraries;
mod matrix;
mod nixl_dir;
mod paths;
mod probe;
mod rdma;
mod sim;
mod topo;
mod units;

use std::{io::IsTerminal, process::ExitCode};

use anyhow::Result;
use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;

/// Moves memory between processes, hosts and GPUs: measure it, and see this machine's means for it.
#[derive(Parser)]
#[command(name = "uccl", version, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Bench(Box<uccl_bench::BenchArgs>),
    /// Serve the benchmark that started this process.
    #[command(name = uccl_bench::SUBCOMMAND, hide = true)]
    BenchPeer,
    /// Be a rank of the benchmark that started this process.
    #[command(name = uccl_bench::RANK_SUBCOMMAND, hide = true)]
    BenchRank,
    Doctor(doctor::DoctorArgs),
    NcclCheck(uccl_nccl_check::CheckArgs),
    /// Be a rank of the check that started this process.
    #[command(name = uccl_nccl_check::SUBCOMMAND, hide = true)]
    NcclCheckRank,
    NixlDir(nixl_dir::NixlDirArgs),
    /// Try to reach the memory of the process that started this one.
    #[command(name = probe::SUBCOMMAND, hide = true)]
    Probe(probe::ProbeArgs),
    Sim(Box<sim::SimArgs>),
    Topo(topo::TopoArgs),
}

fn main() -> ExitCode {
    let filter = EnvFilter::try_from_env("UCCL_LOG").unwrap_or_else(|_| EnvFilter::new("warn"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    match run(Cli::parse().command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("uccl: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Bench(args) => uccl_bench::run(*args)?,
        Command::BenchPeer => uccl_bench::serve_parent()?,
        Command::BenchRank => uccl_bench::serve_rank()?,
        Command::Doctor(args) => return doctor::run(&args),
        Command::NcclCheck(args) => return uccl_nccl_check::run(&args),
        Command::NcclCheckRank => uccl_nccl_check::serve_parent()?,
        Command::NixlDir(args) => nixl_dir::run(&args)?,
        Command::Probe(args) => probe::serve_parent(&args)?,
        Command::Sim(args) => sim::run(&args)?,
        Command::Topo(args) => topo::run(&args)?,
    }
    Ok(ExitCode::SUCCESS)
}
