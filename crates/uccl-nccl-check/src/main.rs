//! `uccl nccl-check` as a small program of its own.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Check an NCCL plugin without NCCL and without a GPU.
#[derive(Parser)]
#[command(version, args_conflicts_with_subcommands = true, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    rank: Option<Rank>,
    #[command(flatten)]
    check: Option<uccl_nccl_check::CheckArgs>,
}

#[derive(Subcommand)]
enum Rank {
    /// Be a rank of the check that started this process.
    #[command(name = uccl_nccl_check::SUBCOMMAND, hide = true)]
    Rank,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let done = match (cli.rank, cli.check) {
        (Some(Rank::Rank), _) => uccl_nccl_check::serve_parent().map(|()| ExitCode::SUCCESS),
        (None, Some(check)) => uccl_nccl_check::run(&check),
        (None, None) => Ok(ExitCode::FAILURE),
    };
    done.unwrap_or_else(|error| {
        eprintln!("uccl-nccl-check: {error:#}");
        ExitCode::FAILURE
    })
}
