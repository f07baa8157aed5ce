//! The commands for developers: `cargo xtask <command>`.

mod bench;
mod built;
mod capi;
mod circles;
mod clang_format;
mod demo;
mod deny;
mod dist;
mod ep;
mod fetch;
mod floors;
mod guest;
mod hammer;
mod headers;
mod install;
mod kernels;
mod libfabric;
mod limits;
mod lint;
mod loom;
mod mutants;
mod nixl;
mod optimized;
mod outcome;
mod package;
mod prebuild;
mod prefetch;
mod python;
mod ray;
mod readme;
mod release_builds;
mod report;
mod sanitize;
mod semver;
mod settings;
mod shell;
mod storm;
mod stubs;
mod test;
mod tools;
mod tree;
mod vllm;
mod widths;
mod words;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "What developers of this project run")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Bench(bench::BenchArgs),
    /// List the modules that import each other, or call methods in each other, in a circle
    Circles,
    /// Print the table of settings of docs/settings.md
    ConfigTable,
    Demo(demo::DemoArgs),
    Dist(dist::DistArgs),
    /// Download the packages that the tests need from PyPI
    Fetch,
    Guest(guest::GuestArgs),
    Hammer(hammer::HammerArgs),
    Headers(headers::HeadersArgs),
    Install(install::InstallArgs),
    Kernels(kernels::KernelsArgs),
    /// Formatting, clippy, types of Python, documentation and licences
    Lint,
    /// Explore every interleaving of the structures that processes share
    Loom,
    Mutants(mutants::MutantsArgs),
    /// Make the optimized builds of the tests: a part of `cargo xtask test`
    #[command(hide = true)]
    Prebuild,
    Sanitize(sanitize::SanitizeArgs),
    /// Compare the interface of the crates with the last release's
    Semver,
    Storm(storm::StormArgs),
    Stubs(stubs::StubsArgs),
    Test(test::TestArgs),
    Widths(widths::WidthsArgs),
    /// Comments and names of functions in which a pronoun stands for the thing: the share and the
    /// count of each folder, or the lines of the folders named
    Words {
        /// Folders, named as `cargo xtask words` prints them
        folders: Vec<String>,
    },
}

fn main() -> ExitCode {
    match shell::forward_interrupts().and_then(|()| run(Cli::parse().command)) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Bench(args) => bench::run(&args)?,
        Command::Circles => circles::print()?,
        Command::ConfigTable => settings::print()?,
        Command::Demo(args) => demo::run(&args)?,
        Command::Dist(args) => return dist::run(&args),
        Command::Fetch => fetch::run()?,
        Command::Guest(args) => guest::run(&args)?,
        Command::Hammer(args) => hammer::run(&args)?,
        Command::Headers(args) => headers::run(&args)?,
        Command::Install(args) => install::run(&args)?,
        Command::Kernels(args) => kernels::run(&args)?,
        Command::Lint => return test::run(&test::TestArgs::only(test::Group::Lint)),
        Command::Loom => loom::run()?,
        Command::Mutants(args) => mutants::run(&args)?,
        Command::Prebuild => release_builds::run()?,
        Command::Sanitize(args) => sanitize::run(&args)?,
        Command::Semver => semver::run()?,
        Command::Storm(args) => storm::run(&args)?,
        Command::Stubs(args) => stubs::run(&args)?,
        Command::Test(args) => return test::run(&args),
        Command::Widths(args) => widths::run(&args)?,
        Command::Words { folders } => words::print(&folders)?,
    }
    Ok(ExitCode::SUCCESS)
}
