//! `cargo xtask mutants`: breaks guards one at a time, and says whether the tests notice.
//!
//! `xtask/mutants.toml` lists them. Each is broken in a copy of the working tree, which has a target folder of its own, so
//! that neither the tree nor what is built from it is ever broken.

mod list;
mod tree;

use std::{
    collections::BTreeMap,
    fmt,
    time::{Duration, Instant},
};

use anyhow::{Result, bail, ensure};
use clap::Args;

use self::{
    list::{Mutant, read},
    tree::Copy,
};
use crate::shell::Program;

/// What one mutant's tests may take: a guard that is gone may leave them hanging.
const LIMIT: Duration = Duration::from_secs(10 * 60);

/// Break the guards that xtask/mutants.toml lists, one at a time, and see which tests notice
#[derive(Args)]
pub(crate) struct MutantsArgs {
    /// Those whose id begins so [default: all]
    ids: Vec<String>,
    /// With all tests of the crate instead of those that must notice
    #[arg(long)]
    all_tests: bool,
    /// How often the tests run: one that notices by luck does not always
    #[arg(long, default_value_t = 1)]
    runs: u32,
    /// Show what the tests said
    #[arg(long, short)]
    verbose: bool,
    /// List them
    #[arg(long)]
    list: bool,
}

/// What became of a mutant.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Verdict {
    Noticed,
    /// In so many runs of so many.
    Sometimes(u32, u32),
    Unnoticed,
    DoesNotBuild,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Noticed => f.pad("noticed"),
            Self::Sometimes(times, of) => f.pad(&format!("{times} of {of}")),
            Self::Unnoticed => f.pad("UNNOTICED"),
            Self::DoesNotBuild => f.pad("DOES NOT BUILD"),
        }
    }
}

/// Whether every mutant still applies; cheap.
pub(crate) fn check() -> Result<()> {
    let stale: Vec<_> = read()?.iter().filter_map(|mutant| mutant.stale().err()).collect();
    ensure!(stale.is_empty(), "{}", stale.join("\n"));
    Ok(())
}

pub(crate) fn run(args: &MutantsArgs) -> Result<()> {
    let mutants = chosen(args)?;
    if args.list {
        mutants.iter().for_each(|m| println!("{:<36} {:<14} {}", m.id, m.package, m.protects));
        return Ok(());
    }
    check()?;
    let copy = Copy::make()?;
    let mut verdicts = BTreeMap::new();
    for mutant in &mutants {
        let begun = Instant::now();
        let verdict = try_one(&copy, mutant, args)?;
        println!("{verdict:<15} {:>4.0} s  {}", begun.elapsed().as_secs_f64(), mutant.id);
        verdicts.entry(verdict).or_insert_with(Vec::new).push(mutant);
    }
    println!();
    for (verdict, mutants) in &verdicts {
        println!("{verdict}: {}", mutants.len());
        if *verdict != Verdict::Noticed {
            mutants.iter().for_each(|m| println!("  {} ({}): {}", m.id, m.file, m.protects));
        }
    }
    match verdicts.keys().all(|verdict| *verdict == Verdict::Noticed) {
        true => Ok(()),
        false => bail!("not every mutant is noticed"),
    }
}

fn chosen(args: &MutantsArgs) -> Result<Vec<Mutant>> {
    let wanted = |mutant: &Mutant| args.ids.iter().any(|id| mutant.id.starts_with(id.as_str()));
    let mut mutants = read()?;
    mutants.retain(|mutant| args.ids.is_empty() || wanted(mutant));
    ensure!(!mutants.is_empty(), "no mutant is called so");
    // Those of one crate after each other, which builds least.
    mutants.sort_by(|a, b| (&a.package, &a.tests).cmp(&(&b.package, &b.tests)));
    Ok(mutants)
}

fn try_one(copy: &Copy, mutant: &Mutant, args: &MutantsArgs) -> Result<Verdict> {
    let _broken = copy.with(mutant)?;
    if !said(tests(copy, mutant, args, true), args)? {
        return Ok(Verdict::DoesNotBuild);
    }
    let mut noticed = 0;
    for _ in 0..args.runs {
        // A program that was ended hung, which is noticed too.
        noticed += u32::from(!said(tests(copy, mutant, args, false), args).unwrap_or(false));
    }
    Ok(match noticed {
        0 => Verdict::Unnoticed,
        n if n == args.runs => Verdict::Noticed,
        n => Verdict::Sometimes(n, args.runs),
    })
}

/// Builds the tests, or runs them.
fn tests(copy: &Copy, mutant: &Mutant, args: &MutantsArgs, build: bool) -> Program {
    let build = if build { &["--no-run"][..] } else { &[] };
    let package = format!("--package={}", mutant.package);
    let program = copy.cargo(mutant.loom).args(["test", "--locked", "--quiet"]).args([&package]);
    let program = program.args(build).limit(LIMIT);
    if args.all_tests { program } else { program.args(&mutant.tests) }
}

fn said(program: Program, args: &MutantsArgs) -> Result<bool> {
    let (well, said) = program.ask()?;
    if args.verbose {
        println!("{said}");
    }
    Ok(well)
}
