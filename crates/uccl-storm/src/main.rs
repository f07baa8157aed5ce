//! Two processes that do to each other whatever endpoints can, at random, over real links, and account for every byte of
//! their memory: whatever a call has given back must keep what its owner put there.
//!
//! The driver starts two *ends*, passes on what they say to each other, and stops, continues and kills them. Each end has
//! some *hands*, threads that own *plots* of memory, register them, *grant* them to the peer's hand of the same number, and
//! use what they were granted in turn. Who holds a plot knows what lies in it ([`content`]); what nobody may write is
//! filled with a guard ([`pattern`]).

mod clock;
mod content;
mod driver;
mod end;
mod history;
mod link;
mod pattern;
mod plot;
mod watch;
mod word;

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
