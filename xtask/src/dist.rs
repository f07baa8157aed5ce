//! `cargo xtask dist`: makes all parts of a release in `target/dist`. Nothing is uploaded.

mod cross;
mod emulated;
mod environment;
mod notes;
mod wheel;

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};

use crate::{
    kernels::{self, KernelsArgs},
    package,
    shell::Program,
    tree,
};

/// Build all parts of a release into target/dist: wheels, source distribution, crates, notes, sums
///
/// Parts that cannot be had on this machine are named and left out. Only a failure of a part that
/// should work is an error.
#[derive(Args)]
pub(crate) struct DistArgs {
    /// Make these alone, and keep the rest of target/dist [default: all, anew]
    #[arg(long, value_delimiter = ',', value_name = "PART,...")]
    only: Vec<Part>,
    /// Also with changes that are not committed
    #[arg(long)]
    allow_dirty: bool,
}

/// The parts of a release, in the order in which they are made.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// The newest section of CHANGELOG.md
    Notes,
    /// The crates, each compiled from its package
    Crates,
    /// Machine code of the GPU kernels, for the wheels
    Kernels,
    /// The wheel for aarch64
    Arm,
    /// The wheel for x86-64
    X86,
    /// The source distribution for pip, from which a wheel is built
    Sdist,
}

impl Part {
    fn make(self, args: &DistArgs) -> Result<PartOutcome> {
        match self {
            Self::Notes => notes::write(&folder()).map(PartOutcome::from),
            Self::Crates => crates(args),
            Self::Kernels => machine_code(),
            Self::Arm => wheel::make(&cross::AARCH64),
            Self::X86 => wheel::make(&cross::X86_64),
            Self::Sdist => wheel::sdist(),
        }
    }

    fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

/// The outcome of a part.
#[derive(Default)]
struct PartOutcome {
    /// The results, a line each.
    found: Vec<String>,
    /// The left-out pieces, each with the missing thing.
    lacks: Vec<String>,
}

impl From<String> for PartOutcome {
    fn from(found: String) -> Self {
        Self { found: vec![found], lacks: Vec::new() }
    }
}

impl PartOutcome {
    /// The outcome of a part that was not made because something is missing.
    fn lacking(what: impl Into<String>) -> Self {
        Self { found: Vec::new(), lacks: vec![what.into()] }
    }
}

/// Makes all wanted parts, even after a failure.
pub(crate) fn run(args: &DistArgs) -> Result<ExitCode> {
    let mut results = Vec::new();
    prepare(args)?;
    for part in Part::value_variants() {
        if args.only.is_empty() || args.only.contains(part) {
            println!("\n=== {}", part.name());
            results.push((part.name(), part.make(args)));
        }
    }
    write_sums(&folder())?;
    print_results(&results)?;
    let failed = results.iter().any(|(_, result)| result.is_err());
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// The folder of the release.
fn folder() -> PathBuf {
    tree::target().join("dist")
}

/// Makes the folder, and removes an earlier release if all parts are wanted.
fn prepare(args: &DistArgs) -> Result<()> {
    let folder = folder();
    ensure!(
        args.allow_dirty || is_committed()?,
        "there are changes that are not committed: commit them, or say --allow-dirty to try things out"
    );
    if args.only.is_empty() && folder.exists() {
        fs::remove_dir_all(&folder)
            .with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))
}

fn is_committed() -> Result<bool> {
    let (well, said) = Program::new("git").args(["status", "--porcelain"]).ask()?;
    ensure!(well, "git status: {said}");
    Ok(said.is_empty())
}

fn crates(args: &DistArgs) -> Result<PartOutcome> {
    let files = package::crates(args.allow_dirty)?;
    package::compile(&files)?;
    for file in &files {
        let name = file.file_name().unwrap_or_default();
        fs::copy(file, folder().join(name)).with_context(|| file.display().to_string())?;
    }
    Ok(format!("{} crates, each compiled from its package", files.len()).into())
}

/// Makes the machine code that the next build embeds.
fn machine_code() -> Result<PartOutcome> {
    if let Err(error) = kernels::fetch() {
        return Ok(PartOutcome::lacking(format!(
            "lacks CUDA's compiler, so that wheels have PTX and what kernels/out has: {error:#}"
        )));
    }
    kernels::run(&KernelsArgs { check: false })?;
    Ok("machine code and PTX of the kernels, which the wheels contain".to_owned().into())
}

/// The files of a release, by name.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    let mut files = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    files.sort();
    Ok(files)
}

/// Writes the file that `sha256sum --check SHA256SUMS` reads.
fn write_sums(folder: &Path) -> Result<()> {
    let sums = folder.join("SHA256SUMS");
    let names: Vec<_> = files(folder)?
        .iter()
        .filter(|file| **file != sums)
        .filter_map(|file| file.file_name().map(ToOwned::to_owned))
        .collect();
    if names.is_empty() {
        return Ok(());
    }
    let (well, said) = Program::new("sha256sum").args(names).in_folder(folder).ask()?;
    ensure!(well, "sha256sum: {said}");
    fs::write(&sums, format!("{said}\n")).with_context(|| sums.display().to_string())
}

fn print_results(results: &[(String, Result<PartOutcome>)]) -> Result<()> {
    println!("\n{}:", folder().display());
    for file in files(&folder())? {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        println!("  {:>7} KiB  {name}", fs::metadata(&file)?.len().div_ceil(1024));
    }
    let lines = |of: fn(&PartOutcome) -> &Vec<String>| {
        results.iter().flat_map(move |(part, result)| {
            let lines = result.iter().flat_map(of);
            lines.map(move |line| format!("  {part}: {line}"))
        })
    };
    println!();
    lines(|made| &made.found).for_each(|line| println!("{line}"));
    for (index, line) in lines(|made| &made.lacks).enumerate() {
        if index == 0 {
            println!("\nLeft out:");
        }
        println!("{line}");
    }
    for (part, result) in results {
        if let Err(error) = result {
            println!("\n{part} FAILED: {error:#}");
        }
    }
    Ok(())
}
