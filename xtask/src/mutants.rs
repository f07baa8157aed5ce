//! `cargo xtask mutants`: breaks guards one at a time, and names the tests that notice.
//!
//! `xtask/mutants.toml` lists the guards. Each is broken in a copy of the working tree with a
//! target folder of its own, so that neither the tree nor its builds are ever broken. Tests that
//! fail on sound code too notice nothing, nor does a filter that matches no test: both are errors
//! of the list.

mod list;
mod test_results;
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
    test_results::TestResults,
    tree::TreeCopy,
};
use crate::shell::Program;

/// Time limit of tests on sound code, and of their build.
const LIMIT: Duration = Duration::from_secs(10 * 60);
/// Time limit of tests without a guard, which may hang: a fixed time, and this many times their
/// time with it.
const PATIENCE: (Duration, u32) = (Duration::from_secs(60), 5);

/// Break the guards that xtask/mutants.toml lists, one at a time, and see which tests notice
#[derive(Args)]
pub(crate) struct MutantsArgs {
    /// Prefixes of the wanted mutants' ids [default: all]
    ids: Vec<String>,
    /// Run all tests of the crate instead of those that must notice
    #[arg(long)]
    all_tests: bool,
    /// Number of runs of the tests: a test that notices by luck does not notice in each
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Show the output of the tests
    #[arg(long, short)]
    verbose: bool,
    /// List the mutants
    #[arg(long)]
    list: bool,
}

/// The verdict on a mutant.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Verdict {
    Noticed,
    /// Noticed in some runs: their number, and the number of all.
    Sometimes(u32, u32),
    Unnoticed,
    DoesNotBuild,
    /// The tests fail or match nothing on sound code.
    WrongTests,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Noticed => f.pad("noticed"),
            Self::Sometimes(times, of) => f.pad(&format!("{times} of {of}")),
            Self::Unnoticed => f.pad("UNNOTICED"),
            Self::DoesNotBuild => f.pad("DOES NOT BUILD"),
            Self::WrongTests => f.pad("WRONG TESTS"),
        }
    }
}

/// Fails if a mutant no longer applies; cheap.
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
    let copy = TreeCopy::make()?;
    let bench = Trial { copy: &copy, args };
    let mut verdicts = BTreeMap::new();
    for alike in mutants.chunk_by(|a, b| a.tests_are_those_of(b)) {
        // Tests run once on sound code, before the mutants that they must notice.
        let sound = bench.sound(&alike[0])?;
        for mutant in alike {
            let begun = Instant::now();
            let (verdict, by) = match &sound {
                Ok(sound) => bench.broken(mutant, sound)?,
                Err(why) => (Verdict::WrongTests, vec![why.clone()]),
            };
            println!("{verdict:<15} {:>4.0} s  {}", begun.elapsed().as_secs_f64(), mutant.id);
            by.iter().for_each(|by| println!("{:<24}{by}", ""));
            verdicts.entry(verdict).or_insert_with(Vec::new).push(mutant);
        }
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
    if args.all_tests {
        mutants.iter_mut().for_each(|mutant| mutant.tests.clear());
    }
    // Mutants of one crate follow each other, which saves builds.
    mutants.sort_by(|a, b| a.built().cmp(&b.built()));
    Ok(mutants)
}

/// The results of tests on sound code.
struct SoundRun {
    results: TestResults,
    took: Duration,
}

/// The copy in which mutants are tried, and the options.
struct Trial<'a> {
    copy: &'a TreeCopy,
    args: &'a MutantsArgs,
}

impl Trial<'_> {
    /// Runs the tests of a mutant on sound code. Returns the reason if they can show nothing.
    fn sound(&self, mutant: &Mutant) -> Result<Result<SoundRun, String>> {
        let shown = format!("{} {}", mutant.package, mutant.tests.join(" "));
        if !self.build(mutant)? {
            return Ok(Err(format!("{shown}: they do not build on sound code")));
        }
        let begun = Instant::now();
        let (status, said) = self.run(mutant, LIMIT)?;
        let results = TestResults::of(&said);
        Ok(match status {
            Ok(true) if self.says_nothing(mutant, &results) => {
                Err(format!("{shown}: a part of that matches no test"))
            }
            Ok(true) => Ok(SoundRun { results, took: begun.elapsed() }),
            // cargo has no such program, or tests fail.
            Ok(false) => Err(format!("{shown}: on sound code {}", why(&results, None, &said))),
            Err(hung) => {
                Err(format!("{shown}: on sound code {}", why(&results, Some(&hung), &said)))
            }
        })
    }

    /// Whether a chosen program runs no test, or a filter matches none. Among all tests of a crate,
    /// some programs may have none.
    fn says_nothing(&self, mutant: &Mutant, results: &TestResults) -> bool {
        let matches = |filter: &str| results.ended.iter().any(|name| name.contains(filter));
        match self.args.all_tests {
            true => results.ended.is_empty(),
            false => {
                results.passed.is_empty()
                    || results.passed.contains(&0)
                    || !mutant.filters().all(matches)
            }
        }
    }

    /// The verdict on a mutant, and the tests that noticed, each with its count.
    fn broken(&self, mutant: &Mutant, sound: &SoundRun) -> Result<(Verdict, Vec<String>)> {
        let _broken = self.copy.with(mutant)?;
        if !self.build(mutant)? {
            return Ok((Verdict::DoesNotBuild, vec![]));
        }
        let (mut noticed, mut by) = (0, BTreeMap::new());
        for _ in 0..self.args.runs {
            let limit = (PATIENCE.0 + sound.took * PATIENCE.1).min(LIMIT);
            let (status, said) = self.run(mutant, limit)?;
            if matches!(status, Ok(true)) {
                continue;
            }
            let results = TestResults::of(&said);
            noticed += 1;
            for name in &results.failed {
                *by.entry(name.clone()).or_insert(0) += 1;
            }
            let left = || {
                let left: Vec<_> = sound.results.ended.difference(&results.ended).collect();
                match left[..] {
                    [] => "after all tests".to_owned(),
                    [one] => format!("in {one}"),
                    [one, two] => format!("in {one} or {two}"),
                    [one, ..] => format!("in {one} or one of {} others", left.len() - 1),
                }
            };
            let early = match (&results.signal, status) {
                (_, Err(_)) => format!("hangs {}", left()),
                (Some(signal), _) => format!("signal {signal} {}", left()),
                (None, _) if results.failed.is_empty() => {
                    bail!("{}: no test has failed, and yet:\n{}", mutant.id, said.join("\n"))
                }
                (None, _) => continue,
            };
            *by.entry(early).or_insert(0) += 1;
        }
        let verdict = match noticed {
            0 => Verdict::Unnoticed,
            n if n == self.args.runs => Verdict::Noticed,
            n => Verdict::Sometimes(n, self.args.runs),
        };
        let of = self.args.runs;
        let by = by.into_iter().map(|(by, times)| format!("{times} of {of}  {by}"));
        Ok((verdict, by.collect()))
    }

    fn build(&self, mutant: &Mutant) -> Result<bool> {
        let (status, said) = self.cargo(mutant, "--no-run").limit(LIMIT).hear()?;
        self.show(&said);
        Ok(status?.success())
    }

    /// Runs the tests. Returns whether they pass, unless they hang, and their output.
    fn run(&self, mutant: &Mutant, limit: Duration) -> Result<(Result<bool>, Vec<String>)> {
        let cargo = self.cargo(mutant, "--no-fail-fast").limit(limit);
        let (status, said) = cargo.hear()?;
        self.show(&said);
        Ok((status.map(|status| status.success()), said))
    }

    fn cargo(&self, mutant: &Mutant, how: &str) -> Program {
        let package = format!("--package={}", mutant.package);
        let cargo = self.copy.cargo(mutant.loom).args(["test", "--locked", how]);
        cargo.args([&package]).args(&mutant.tests)
    }

    fn show(&self, said: &[String]) {
        if self.args.verbose {
            said.iter().for_each(|line| println!("{line}"));
        }
    }
}

/// The reason why tests that should have passed did not.
fn why(results: &TestResults, hung: Option<&anyhow::Error>, said: &[String]) -> String {
    let failed: Vec<_> = results.failed.iter().map(String::as_str).collect();
    match (hung, &results.signal) {
        _ if !failed.is_empty() => format!("these fail: {}", failed.join(", ")),
        (Some(hung), _) => hung.to_string(),
        (None, Some(signal)) => format!("a program ends by signal {signal}"),
        (None, None) => said.last().cloned().unwrap_or_default(),
    }
}
