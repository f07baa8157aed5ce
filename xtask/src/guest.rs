//! RDMA without RDMA hardware: guests with soft-RoCE (`tests/guest`), and the tests that run in them.

use std::{
    fs::{self, File},
    path::PathBuf,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use anyhow::{Context, Result};
use clap::Args;

use crate::{
    shell::{Beside, Program},
    test::{Done, left_out, passed_in},
    tree,
};

/// Run a command on RDMA devices, in a throw-away guest of this machine
///
/// The guest sees this machine's files and can change none of them. Its kernel is built when it is first
/// needed, which takes some minutes. `python3 tests/guest --help` has all options and the variables that tell
/// the command its devices.
#[derive(Args)]
pub(crate) struct GuestArgs {
    /// One guest with both ends of every link, or two that are joined
    #[arg(long, default_value_t = 1)]
    guests: u8,
    /// Links, each with a device at both ends
    #[arg(long, default_value_t = 1)]
    rails: u8,
    /// Per cent of packets lost, each way
    #[arg(long, default_value_t = 0.0)]
    loss: f64,
    /// Words of tc-netem, as 'delay 1ms'
    #[arg(long, default_value = "")]
    netem: String,
    /// The devices' driver: rxe (RoCE) or siw (iWARP)
    #[arg(long, default_value = "rxe")]
    driver: String,
    /// What runs the guest: auto, uml, kvm or tcg
    #[arg(long, default_value = "auto")]
    engine: String,
    /// Processors of the guest [default: the engine's]
    #[arg(long)]
    cpus: Option<u8>,
    /// Seconds that the command may take
    #[arg(long, default_value_t = 300)]
    timeout: u32,
    /// A folder that the command can write to and that outlives the guest
    #[arg(long)]
    scratch: Option<PathBuf>,
    /// Show the guest's console afterwards
    #[arg(long, short)]
    verbose: bool,
    /// What to run
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

pub(crate) fn run(args: &GuestArgs) -> Result<()> {
    let mut program = guest().args([
        format!("--guests={}", args.guests),
        format!("--rails={}", args.rails),
        format!("--loss={}", args.loss),
        format!("--netem={}", args.netem),
        format!("--driver={}", args.driver),
        format!("--engine={}", args.engine),
        format!("--timeout={}", args.timeout),
    ]);
    if let Some(cpus) = args.cpus {
        program = program.args([format!("--cpus={cpus}")]);
    }
    if let Some(scratch) = &args.scratch {
        program = program.args(["--scratch".as_ref(), scratch.as_os_str()]);
    }
    if args.verbose {
        program = program.args(["--verbose"]);
    }
    let limit = Duration::from_secs(u64::from(args.timeout)) + BUILD_LIMIT;
    program.args(["--"]).args(&args.command).limit(limit).run()
}

/// How long a kernel may take that is built beside everything else.
const BUILD_LIMIT: Duration = Duration::from_secs(20 * 60);

/// Exit status of a guest that this machine cannot have; see tests/guest/shell.py.
const LACKING: i32 = 77;

/// What the guests that tests run in are like, and what is left out there: two links, one to use and one to cut; sound
/// ones, ones that lose packets, and iWARP's, which only the kernel that is built for guests has.
const GUESTS: [(&str, &[&str]); 3] = [
    // Tens of thousands of tiny pieces take soft-RoCE long.
    ("--rails=2", &["--skip=vectors_are_cut"]),
    // What it refuses it may forget to answer when packets are lost.
    ("--rails=2 --loss=1", &["--skip=faults::", "--skip=vectors_are_cut"]),
    ("--rails=2 --driver=siw --engine=uml", &[]),
];

/// What a guest's kernel is being made by.
static PREPARING: Mutex<Option<Beside>> = Mutex::new(None);

/// The program that boots guests.
pub(crate) fn guest() -> Program {
    Program::new("python3").args(["-B", "tests/guest"])
}

fn log() -> PathBuf {
    tree::scratch().join("guest.log")
}

/// Begins to make the kernel, out of everybody's way. What goes wrong is told by [`tests`].
pub(crate) fn begin_to_prepare() {
    if let Ok(beside) = prepare() {
        *PREPARING.lock().unwrap_or_else(PoisonError::into_inner) = Some(beside);
    }
}

fn prepare() -> Result<Beside> {
    fs::create_dir_all(tree::scratch())?;
    let log = File::create(log())?;
    let idle = Program::new("nice").args(["-n", "19", "python3", "-B", "tests/guest", "--prepare"]);
    idle.limit(BUILD_LIMIT).beside(log)
}

/// Runs every crate's tests of the name `verbs` in a guest.
pub(crate) fn tests() -> Result<Done> {
    let begun = PREPARING.lock().unwrap_or_else(PoisonError::into_inner).take();
    let status = begun.map_or_else(prepare, Ok).and_then(Beside::wait)?;
    let said = fs::read_to_string(log()).unwrap_or_default();
    if !status.success() {
        let why = match status.code() {
            Some(LACKING) => said.lines().rev().find_map(|line| line.strip_prefix("guest: lacks ")),
            // The kernel's sources and compiler are this machine's, and no part of what is tested.
            _ => said.lines().rev().find(|line| !line.trim().is_empty()),
        };
        let why = why.unwrap_or("what guests need");
        return Ok(Done::skipped(format!("lacks a guest ({}): {why}", log().display())));
    }
    let crates = crates_with_tests()?;
    if crates.is_empty() {
        guest().args(["--", "ibv_devinfo"]).run()?;
        return Ok(Done::with("no crate has tests of RDMA; a guest has devices"));
    }
    let (mut done, mut passed) = (Done::default(), 0);
    let mut result = Ok(());
    let runs = crates.iter().flat_map(|name| GUESTS.map(|guest| (name, guest)));
    for (name, (options, without)) in runs {
        let tests = in_guest(options, &["test", "--locked", "--test=verbs", "--package", name]);
        // One at a time: they share cables, and some are cut.
        let ended =
            tests.args(["--", "--show-output", "--test-threads=1"]).args(without).watch(|line| {
                done.absent.extend(left_out(line));
                passed += passed_in(line).unwrap_or(0);
            });
        result = result.and(ended);
    }
    done.detail = format!("{passed} passed");
    done.absent.sort();
    done.absent.dedup();
    done.or_failed(result)
}

/// Cargo, which builds here and runs what it has built in a guest.
fn in_guest(options: &str, arguments: &[&str]) -> Program {
    let tool = tree::root().join("tests/guest");
    let runner = format!("python3 -B {} {options} --timeout=600 --", tool.display());
    Program::cargo(arguments).env("CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER", runner)
}

/// The crates that have a test binary of the name `verbs`.
fn crates_with_tests() -> Result<Vec<String>> {
    let folder = tree::root().join("crates");
    let mut names = Vec::new();
    for entry in fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
        let tests = entry?.path().join("tests");
        let has_tests = tests.join("verbs.rs").exists() || tests.join("verbs/main.rs").exists();
        let name = tests.parent().and_then(|path| path.file_name()).filter(|_| has_tests);
        names.extend(name.map(|name| name.to_string_lossy().into_owned()));
    }
    names.sort();
    Ok(names)
}
