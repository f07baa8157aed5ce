//! The wheel, and the tests that are written in Python.

use std::{
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    sync::OnceLock,
    thread::available_parallelism,
    time::Duration,
};

use anyhow::{Context, Result, bail};

use crate::{done::Done, guest, optimized::For, prefetch, shell::Program, tools, tree};

/// What an environment without anything else must be able to do with the wheel.
const FIRST_STEPS: &str = "\
import uccl
from uccl import p2p
endpoint = p2p.Endpoint(local_gpu_idx=0, num_cpus=1)
assert len(endpoint.get_metadata()) > 0
print('imported', uccl.__file__)
";

/// Whether the wheel was built with NIXL's plugin.
const HAS_PLUGIN: &str = "import uccl.nixl; raise SystemExit(not uccl.nixl._PLUGIN.exists())";

/// Why Python's steps cannot run here; none if they can.
pub(crate) fn lacking() -> Option<&'static str> {
    (!tools::can_make_environments()).then_some("lacks python3-venv")
}

/// Builds the wheel and uses it where nothing else is installed.
pub(crate) fn wheel() -> Result<Done> {
    if let Some(reason) = lacking() {
        return Ok(Done::skipped(reason));
    }
    let wheel = build(For::Tests)?;
    let folder = tree::scratch().join("clean");
    let python = make_environment(&folder, true)?;
    install(&python, wheel)?;
    // From elsewhere, without the caller's variables: only the wheel can be what is imported.
    Program::new(&python).args(["-I", "-c", FIRST_STEPS]).in_folder(&folder).run()?;
    let name = wheel.file_name().unwrap_or_default().to_string_lossy();
    let mut done = Done::with(format!("{name}, {} KiB", fs::metadata(wheel)?.len() >> 10));
    if !Program::new(&python).args(["-I", "-c", HAS_PLUGIN]).in_folder(&folder).works() {
        done.absent.push("lacks a C++ compiler for NIXL's plugin".into());
    }
    Ok(done)
}

/// Runs the tests against the wheel.
pub(crate) fn tests() -> Result<Done> {
    if let Some(reason) = lacking() {
        return Ok(Done::skipped(reason));
    }
    let python = with_wheel()?;
    let mut done = Done::default();
    // Those have environments of their own.
    let others = ["--ignore=tests/nixl", "--ignore=tests/ep", "tests"];
    let result = pytest(&python, &others, &mut done);
    done.or_failed(result)
}

/// Which of the tests that are marked for rails run in a guest. Little of what ends or is lost: there, 256 MiB on
/// their way take seconds, and the tests in Rust have it.
const IN_GUEST: &str = "TestReadWrite or TestAdverts or after_the_data and not 16777216";

/// Runs tests against the wheel in a guest, whose processes have RDMA devices.
pub(crate) fn tests_in_guest() -> Result<Done> {
    if let Some(reason) = lacking() {
        return Ok(Done::skipped(reason));
    }
    if let Some(reason) = guest::lacking()? {
        return Ok(Done::skipped(reason));
    }
    let python = with_wheel()?;
    let mut done = Done::default();
    // Two processes that poll: each has a processor, and no other test runs beside them.
    let program = guest::guest()
        .args(["--rails=1", "--cpus=2", "--timeout=300", "--"])
        .args([&python])
        .env("UCCL_TEST_TRANSPORTS", "verbs");
    let ended = watch(
        program,
        &["--ignore=tests/nixl", "--ignore=tests/ep", "-m", "rails", "-k", IN_GUEST, "tests"],
        &mut done,
    );
    done.or_failed(ended)
}

/// Runs pytest, several tests at a time, and tells what it left out and how many tests passed.
pub(crate) fn pytest(python: &Path, arguments: &[&str], done: &mut Done) -> Result<()> {
    let cpus = available_parallelism().map_or(1, usize::from);
    // Tests wait more than they compute, but where many run, what each allows for is soon used up.
    let workers = format!("--numprocesses={}", cpus.clamp(2, 4));
    let beside = [workers.as_str(), "--dist=loadgroup", "--maxschedchunk=1"];
    watch(Program::new(python), &[&beside, arguments].concat(), done)
}

fn watch(python: Program, arguments: &[&str], done: &mut Done) -> Result<()> {
    let always = ["-m", "pytest", "-rs", "--durations=10", "-p", "no:cacheprovider"];
    let program = python.args(always).args(arguments);
    let program = program.without_env("PYTHONPATH").env("COLUMNS", "200");
    program.limit(Duration::from_secs(15 * 60)).watch(|line| {
        if line.starts_with("SKIPPED") {
            done.absent.push(line.to_owned());
        } else if line.starts_with('=') && line.contains(" in ") {
            done.detail = line.trim_matches(['=', ' ']).to_owned();
        }
    })
}

/// The environment of the tests, with the wheel in it.
pub(crate) fn with_wheel() -> Result<PathBuf> {
    let wheel = build(For::Tests)?;
    let python = environment()?;
    install(&python, wheel)?;
    Ok(python)
}

/// Builds the wheel, once in a run, which builds it for the same.
pub(crate) fn build(whom: For) -> Result<&'static Path> {
    static WHEEL: OnceLock<PathBuf> = OnceLock::new();
    if let Some(wheel) = WHEEL.get() {
        return Ok(wheel);
    }
    let python = environment()?;
    let folder = whom.folder().join("wheels");
    empty(&folder)?;
    // As `pip install .` does, with the maturin that is there.
    let programs = python.parent().unwrap_or(&python).as_os_str().to_owned();
    let path = std::env::var_os("PATH").unwrap_or_default();
    let build = Program::new(&python)
        .args(["-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--wheel-dir"])
        .args([&folder])
        .env("PATH", [programs, path].join(OsStr::new(":")))
        .env("MATURIN_PEP517_ARGS", "--locked");
    whom.set_in(build).run()?;
    let files = fs::read_dir(&folder)?.map(|entry| Ok(entry?.path()));
    match files.collect::<Result<Vec<_>>>()?.as_slice() {
        [wheel] => Ok(WHEEL.get_or_init(|| wheel.clone())),
        found => bail!("pip made {} wheels, and not one", found.len()),
    }
}

/// Makes it, unless it is there.
pub(crate) fn fetch() -> Result<()> {
    environment().map(drop)
}

/// The developer's environment, `.venv`, with what tests/requirements.txt names.
fn environment() -> Result<PathBuf> {
    prefetch::wait();
    let folder = tree::root().join(".venv");
    let wanted = fs::read_to_string(tree::root().join(TEST_REQUIREMENTS))?;
    let stamp = folder.join("requirements.txt");
    let python = folder.join("bin/python");
    let works = Program::new(&python).args(["-m", "pip", "--version"]).works();
    if works && fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted) {
        return Ok(python);
    }
    if !works {
        make_environment(&folder, false)?;
    }
    pip(&python).args(["--requirement", TEST_REQUIREMENTS]).run()?;
    fs::write(stamp, wanted)?;
    Ok(python)
}

/// What an environment has of PyPI.
#[derive(Default)]
pub(crate) struct Wanted<'a> {
    /// Packages without what they depend on.
    pub(crate) alone: &'a [&'a str],
    /// Packages with what they depend on.
    pub(crate) whole: &'a [&'a str],
    /// Whether it has what the tests in Python need, too.
    pub(crate) tests: bool,
}

impl<'a> Wanted<'a> {
    /// These packages, without what they depend on.
    pub(crate) fn alone(packages: &'a [&'a str]) -> Self {
        Self { alone: packages, ..Self::default() }
    }
}

const TEST_REQUIREMENTS: &str = "tests/requirements.txt";

/// An environment with packages of PyPI, made unless it is there: its folder; or why it cannot be had.
pub(crate) fn environment_of(name: &str, wanted: &Wanted<'_>) -> Result<Result<PathBuf, String>> {
    prefetch::wait();
    let Wanted { alone, whole, tests } = wanted;
    let folder = tree::scratch().join(name);
    let stamp = folder.join("requirements.txt");
    let mut text = [*alone, *whole].concat().join("\n");
    if *tests {
        text = format!("{text}\n{}", fs::read_to_string(tree::root().join(TEST_REQUIREMENTS))?);
    }
    if fs::read_to_string(&stamp).is_ok_and(|installed| installed == text) {
        return Ok(Ok(folder));
    }
    let python = make_environment(&folder, true)?;
    println!("{} into {}", [*alone, *whole].concat().join(", "), folder.display());
    let requirements: &[&str] = if *tests { &["--requirement", TEST_REQUIREMENTS] } else { &[] };
    let rest = [*whole, requirements].concat();
    for (options, packages) in [(&["--no-deps"][..], *alone), (&[], &rest)] {
        if packages.is_empty() {
            continue;
        }
        let (well, said) = pip(&python).args(options).args(packages).ask()?;
        if !well {
            return Ok(Err(said.lines().last().unwrap_or("pip failed").to_owned()));
        }
    }
    fs::write(stamp, text)?;
    Ok(Ok(folder))
}

pub(crate) fn make_environment(folder: &Path, anew: bool) -> Result<PathBuf> {
    if anew {
        empty(folder)?;
    }
    Program::new("python3").args(["-m".as_ref(), "venv".as_ref(), folder.as_os_str()]).run()?;
    Ok(folder.join("bin/python"))
}

pub(crate) fn install(python: &Path, wheel: &Path) -> Result<()> {
    pip(python).args(["--no-index", "--no-deps", "--force-reinstall"]).args([wheel]).run()
}

pub(crate) fn pip(python: &Path) -> Program {
    Program::new(python).args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"])
}

fn empty(folder: &Path) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder)
            .with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))
}
