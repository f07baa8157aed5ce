//! Two processes use all that an endpoint can do on each other, at random, over real links, and
//! account for every byte of their memory: memory that a call has given back must keep the bytes
//! that its owner put there.
//!
//! The driver starts two *ends*, forwards the messages between them, and stops, continues and kills
//! them. Each end has some *workers*, threads that own *buffers* of memory, register them, *grant*
//! them to the peer's worker of the same number, and use the grants of the peer in turn. The holder
//! of a buffer knows its bytes ([`content`]). A guard fills the memory that nobody may write
//! ([`pattern`]).

mod buffer;
mod clock;
mod content;
mod control;
mod driver;
mod end;
mod history;
mod link;
mod pattern;
mod watch;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(about = "Two processes that do to each other whatever endpoints can, at random")]
struct Cli {
    #[command(subcommand)]
    end: Option<Role>,
    #[command(flatten)]
    driver: driver::DriverArgs,
}

#[derive(Subcommand)]
enum Role {
    #[command(hide = true)]
    End(end::EndArgs),
}

fn main() -> Result<ExitCode> {
    let cli = Cli::parse();
    match cli.end {
        Some(Role::End(args)) => end::run(&args).map(|()| ExitCode::SUCCESS),
        None => driver::run(&cli.driver),
    }
}
