//! The wheel, and the tests in Python.

use std::{
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    sync::OnceLock,
    thread::available_parallelism,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};

use crate::{
    guest, optimized::For, outcome::Outcome, prebuild, prefetch, shell::Program, tools, tree,
};

/// The first steps with the wheel in an environment without anything else.
const FIRST_STEPS: &str = "\
import uccl
from uccl import p2p
endpoint = p2p.Endpoint(local_gpu_idx=0, num_cpus=1)
assert len(endpoint.get_metadata()) > 0
print('imported', uccl.__file__)
";

/// Whether the wheel was built with NIXL's plugin.
const HAS_PLUGIN: &str = "import uccl.nixl; raise SystemExit(not uccl.nixl._PLUGIN.exists())";

/// The reason why Python's steps cannot run here, if there is one.
pub(crate) fn lacking() -> Option<&'static str> {
    (!tools::can_make_environments()).then_some("lacks python3-venv")
}

/// Builds the wheel and uses it where nothing else is installed.
pub(crate) fn wheel() -> Result<Outcome> {
    if let Some(reason) = lacking() {
        return Ok(Outcome::skipped(reason));
    }
    let wheel = build(For::Tests)?;
    let folder = tree::scratch().join("clean");
    let python = make_environment(&folder, true)?;
    install(&python, wheel)?;
    // The program runs elsewhere and without the caller's variables, so that it can import only the
    // wheel.
    Program::new(&python).args(["-I", "-c", FIRST_STEPS]).in_folder(&folder).run()?;
    let name = wheel.file_name().unwrap_or_default().to_string_lossy();
    let mut done = Outcome::with(format!("{name}, {} KiB", fs::metadata(wheel)?.len() >> 10));
    if !Program::new(&python).args(["-I", "-c", HAS_PLUGIN]).in_folder(&folder).works() {
        done.absent.push("lacks a C++ compiler for NIXL's plugin".into());
    }
    Ok(done)
}

/// Tests that have environments or runs of their own.
const ELSEWHERE: &[&str] = &[
    "--ignore=tests/nixl",
    "--ignore=tests/ep",
    "--ignore=tests/mooncake",
    "--ignore=tests/vllm",
    "--ignore=tests/weights",
    "--ignore=tests/collective",
];

/// Runs the tests against the wheel.
pub(crate) fn tests() -> Result<Outcome> {
    if let Some(reason) = lacking() {
        return Ok(Outcome::skipped(reason));
    }
    let python = with_wheel()?;
    let mut done = Outcome::default();
    let result = pytest(&python, &[ELSEWHERE, &["tests"]].concat(), &mut done);
    let detail = std::mem::take(&mut done.detail);
    // By themselves: their fixtures are in a module of the same name as those of the others.
    let of_mooncake = pytest(&python, &["tests/mooncake"], &mut done);
    done.detail = format!("{detail}; mooncake: {}", done.detail);
    done.or_failed(result.and(of_mooncake))
}

/// The tests marked for rails that run in a guest. Few of them are about operations that end early
/// or lost connections: in a guest, 256 MiB under way take seconds, and the tests in Rust cover
/// those cases.
const IN_GUEST: &str = "TestReadWrite or TestAdverts or after_the_data and not 16777216";

/// Runs tests against the wheel in a guest with RDMA devices.
pub(crate) fn tests_in_guest() -> Result<Outcome> {
    if let Some(reason) = lacking() {
        return Ok(Outcome::skipped(reason));
    }
    if let Some(reason) = guest::lacking()? {
        return Ok(Outcome::skipped(reason));
    }
    let python = with_wheel()?;
    let mut done = Outcome::default();
    // The two processes poll, so each has a processor and no other test runs beside them.
    let program = guest::guest()
        .args(["--rails=1", "--cpus=2", "--timeout=300", "--"])
        .args([&python])
        .env("UCCL_TEST_TRANSPORTS", "verbs");
    let ended =
        watch(program, &[ELSEWHERE, &["-m", "rails", "-k", IN_GUEST, "tests"]].concat(), &mut done);
    done.or_failed(ended)
}

/// Runs pytest with the wheel, in an environment that is made unless it is there. `needed` names
/// the package without which there is none.
pub(crate) fn tests_in(
    environment: impl FnOnce() -> Result<Result<PathBuf, String>>,
    needed: &str,
    arguments: &[&str],
) -> Result<Outcome> {
    if let Some(reason) = lacking() {
        return Ok(Outcome::skipped(reason));
    }
    let wheel = build(For::Tests)?;
    let python = match environment()? {
        Ok(python) => python,
        Err(reason) => return Ok(Outcome::skipped(format!("lacks {needed}: {reason}"))),
    };
    install(&python, wheel)?;
    let mut done = Outcome::default();
    let result = pytest(&python, arguments, &mut done);
    done.or_failed(result)
}

/// Runs pytest, several tests at a time, and records the left-out tests and the counts in `done`.
pub(crate) fn pytest(python: &Path, arguments: &[&str], done: &mut Outcome) -> Result<()> {
    let cpus = available_parallelism().map_or(1, usize::from);
    // Tests wait as long as they compute, or longer. With many at a time, though, their time limits
    // are soon used up.
    let workers = format!("--numprocesses={}", (cpus + 1).clamp(2, 4));
    let beside = [workers.as_str(), "--dist=loadgroup", "--maxschedchunk=1"];
    watch(Program::new(python), &[&beside, arguments].concat(), done)
}

fn watch(python: Program, arguments: &[&str], done: &mut Outcome) -> Result<()> {
    let always = ["-m", "pytest", "-rsfE", "--durations=10", "-p", "no:cacheprovider"];
    let program = python.args(always).args(arguments);
    let program = program.without_env("PYTHONPATH").env("COLUMNS", "200");
    program.limit(Duration::from_secs(15 * 60)).watch(|line| {
        if line.starts_with("SKIPPED") {
            done.absent.push(line.to_owned());
        } else if line.starts_with("FAILED ") || line.starts_with("ERROR ") {
            done.failed.push(line.to_owned());
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

/// Builds the wheel once in a run. All calls of a run want the same kind of build.
pub(crate) fn build(whom: For) -> Result<&'static Path> {
    static WHEEL: OnceLock<PathBuf> = OnceLock::new();
    if let Some(wheel) = WHEEL.get() {
        return Ok(wheel);
    }
    prebuild::wait();
    let python = environment()?;
    let folder = whom.folder().join("wheels");
    empty(&folder)?;
    // Builds as `pip install .` does, with the maturin that is there.
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

/// Makes the tests' environment unless it is there.
pub(crate) fn fetch() -> Result<()> {
    environment().map(drop)
}

/// The developer's environment, `.venv`, with the packages of tests/requirements.txt.
fn environment() -> Result<PathBuf> {
    prefetch::wait();
    let folder = developers_folder();
    let python = folder.join("bin/python");
    if has_environment()? {
        return Ok(python);
    }
    if !has_pip(&python) {
        make_environment(&folder, false)?;
    }
    pip(&python).args(["--requirement", TEST_REQUIREMENTS]).run()?;
    fs::write(folder.join(STAMP), wanted_by_tests()?)?;
    Ok(python)
}

/// Whether the developer's environment is there with all packages.
pub(crate) fn has_environment() -> Result<bool> {
    let (folder, wanted) = (developers_folder(), wanted_by_tests()?);
    let complete = fs::read_to_string(folder.join(STAMP)).is_ok_and(|there| there == wanted);
    Ok(complete && has_pip(&folder.join("bin/python")))
}

fn developers_folder() -> PathBuf {
    tree::root().join(".venv")
}

fn wanted_by_tests() -> Result<String> {
    Ok(fs::read_to_string(tree::root().join(TEST_REQUIREMENTS))?)
}

fn has_pip(python: &Path) -> bool {
    Program::new(python).args(["-m", "pip", "--version"]).works()
}

/// The packages of PyPI for an environment.
#[derive(Default)]
pub(crate) struct Requirements<'a> {
    /// Packages without their dependencies.
    pub(crate) alone: &'a [&'a str],
    /// Packages with their dependencies.
    pub(crate) whole: &'a [&'a str],
    /// Whether the environment also has the packages of the tests in Python.
    pub(crate) tests: bool,
    /// The Python of another environment, whose packages it has too.
    pub(crate) beneath: Option<&'a Path>,
}

impl<'a> Requirements<'a> {
    /// These packages, without their dependencies.
    pub(crate) fn alone(packages: &'a [&'a str]) -> Self {
        Self { alone: packages, ..Self::default() }
    }
}

const TEST_REQUIREMENTS: &str = "tests/requirements.txt";

/// The file of an environment that lists its packages, once all of them are there.
const STAMP: &str = "requirements.txt";

/// The folder of an environment with packages of PyPI, which is made unless it is there; or the
/// reason why it cannot be had.
pub(crate) fn environment_of(
    name: &str,
    wanted: &Requirements<'_>,
) -> Result<Result<PathBuf, String>> {
    prefetch::wait();
    let Requirements { alone, whole, tests, beneath } = wanted;
    let folder = tree::scratch().join(name);
    let stamp = folder.join(STAMP);
    let mut text = [*alone, *whole].concat().join("\n");
    if *tests {
        text = format!("{text}\n{}", wanted_by_tests()?);
    }
    if fs::read_to_string(&stamp).is_ok_and(|installed| installed == text) {
        return Ok(Ok(folder));
    }
    let python = make_environment(&folder, true)?;
    if let Some(beneath) = beneath {
        fs::write(
            packages_of(&python)?.join("beneath.pth"),
            packages_of(beneath)?.as_os_str().as_encoded_bytes(),
        )?;
    }
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

/// The folder of the packages of a Python.
fn packages_of(python: &Path) -> Result<PathBuf> {
    let ask = "import sysconfig; print(sysconfig.get_path('purelib'))";
    let (well, said) = Program::new(python).args(["-c", ask]).ask()?;
    ensure!(well, "{} does not say where its packages are: {said}", python.display());
    Ok(said.trim().into())
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
