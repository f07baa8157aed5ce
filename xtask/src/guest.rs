//! RDMA without RDMA hardware: guests with soft-RoCE (`tests/guest`), and the tests that run in
//! them.

use std::{
    fs::{self, File},
    path::PathBuf,
    thread::available_parallelism,
    time::Duration,
};

use anyhow::{Result, anyhow};
use clap::Args;

use crate::{
    built::{self, Artifacts},
    outcome::Outcome,
    report::{failed_in, left_out, passed_in},
    shell::{self, BackgroundProgram, EarlyProgram, Program},
    tree,
};

/// Run a command on RDMA devices, in a throw-away guest of this machine
///
/// The guest sees this machine's files and can change none of them. Its kernel is built when it is
/// first needed, which takes some minutes. `python3 tests/guest --help` has all options and the
/// variables that tell the command its devices.
#[derive(Args)]
pub(crate) struct GuestArgs {
    /// One guest with both ends of every link, or two that are joined
    #[arg(long, default_value_t = 1)]
    guests: u8,
    /// Links, each with a device at both ends
    #[arg(long, default_value_t = 1)]
    rails: u8,
    /// The other ends of the links in a network namespace of their own (one guest)
    #[arg(long)]
    apart: bool,
    /// Per cent of packets lost, each way
    #[arg(long, default_value_t = 0.0)]
    loss: f64,
    /// Options of tc-netem, such as 'delay 1ms'
    #[arg(long, default_value = "")]
    netem: String,
    /// The guest's engine: auto, uml, kvm or tcg
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
    /// The command to run
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

pub(crate) fn run(args: &GuestArgs) -> Result<()> {
    let mut program = guest().args([
        format!("--guests={}", args.guests),
        format!("--rails={}", args.rails),
        format!("--loss={}", args.loss),
        format!("--netem={}", args.netem),
        format!("--engine={}", args.engine),
        format!("--timeout={}", args.timeout),
    ]);
    if let Some(cpus) = args.cpus {
        program = program.args([format!("--cpus={cpus}")]);
    }
    if let Some(scratch) = &args.scratch {
        program = program.args(["--scratch".as_ref(), scratch.as_os_str()]);
    }
    if args.apart {
        program = program.args(["--apart"]);
    }
    if args.verbose {
        program = program.args(["--verbose"]);
    }
    let limit = Duration::from_secs(u64::from(args.timeout)) + BUILD_LIMIT;
    program.args(["--"]).args(&args.command).limit(limit).run()
}

/// Time limit for a kernel that is built beside everything else.
const BUILD_LIMIT: Duration = Duration::from_secs(20 * 60);

/// The most guests that run beside each other: each has 2 GiB of memory.
const AT_A_TIME: usize = 4;

/// The exit status of tests/guest if this machine cannot have a guest; see tests/guest/shell.py.
const LACKING: i32 = 77;

/// A test binary, and the guest that it runs in.
struct Run {
    package: &'static str,
    test: &'static str,
    guest: &'static str,
    /// Arguments of the test binary that leave tests out.
    without: &'static [&'static str],
}

/// The engine's tests run with every kind of link, between two network namespaces: only there do
/// TCP and the connection manager of libfabric's verbs provider cross the cable. That takes the
/// kernel that is built for guests. The channels' tests, with both ends on one thread, run in
/// guests with two links (one to use and one to cut), once with sound links and once with links
/// that lose packets.
///
/// They take about 270, 170, 115, 95 and 30 seconds on two processors: the longest begin first.
const RUNS: [Run; 5] = [
    Run {
        package: "uccl-p2p",
        test: "verbs",
        guest: "--rails=2 --apart --engine=uml",
        // This test does the same as the others of its kind, three times, and then over TCP.
        without: &[TINY_PIECES, "--skip=removed::the_only_device"],
    },
    Run {
        package: "uccl-p2p",
        test: "verbs",
        guest: "--rails=2 --apart --engine=uml --loss=1",
        // These tests take long, and their subject does not depend on lost packets.
        without: &[TINY_PIECES, "--skip=removed::", "--skip=peers::"],
    },
    Run {
        package: "uccl-verbs",
        test: "verbs",
        guest: "--rails=2 --loss=1",
        // The device may forget to answer a refused request when packets are lost.
        without: &["--skip=faults::"],
    },
    Run { package: "uccl-verbs", test: "verbs", guest: "--rails=2", without: &[] },
    Run {
        package: "uccl-p2p",
        test: "libfabric",
        guest: "--apart --engine=uml",
        without: &[TINY_PIECES],
    },
];

/// Devices made of software take long for tens of thousands of tiny pieces.
const TINY_PIECES: &str = "--skip=vectors_are_cut";

/// The provider of libfabric's tests in a guest, and the settings that it needs there: soft-RoCE's
/// completion queues are short, the buffers for the provider's own messages alone should be few,
/// and without the other settings soft-RoCE is refused.
const LIBFABRIC: [(&str, &str); 5] = [
    ("UCCL_TEST_LIBFABRIC", "verbs;ofi_rxm"),
    ("FI_UNIVERSE_SIZE", "64"),
    ("FI_MR_CACHE_MAX_COUNT", "0"),
    ("FI_OFI_RXM_USE_SRX", "1"),
    ("FI_OFI_RXM_MSG_RX_SIZE", "128"),
];

/// The process that makes a guest's kernel.
static PREPARING: EarlyProgram = EarlyProgram::nothing();

/// The program that boots guests.
pub(crate) fn guest() -> Program {
    Program::new("python3").args(["-B", "tests/guest"])
}

fn log() -> PathBuf {
    tree::scratch().join("guest.log")
}

/// Begins to make the kernel, at the lowest priority. [`tests`] reports a failure.
pub(crate) fn begin_to_prepare() {
    PREPARING.keep(prepare());
}

fn prepare() -> Result<BackgroundProgram> {
    fs::create_dir_all(tree::scratch())?;
    let log = File::create(log())?;
    let idle = Program::new("nice").args(["-n", "19", "python3", "-B", "tests/guest", "--prepare"]);
    idle.limit(BUILD_LIMIT).beside(log)
}

/// Waits for the kernel, or makes it. Returns the reason if there can be no guest.
pub(crate) fn lacking() -> Result<Option<String>> {
    let status = PREPARING.take().map_or_else(prepare, Ok).and_then(BackgroundProgram::wait)?;
    if status.success() {
        return Ok(None);
    }
    let said = fs::read_to_string(log()).unwrap_or_default();
    let why = match status.code() {
        Some(LACKING) => said.lines().rev().find_map(|line| line.strip_prefix("guest: lacks ")),
        // The kernel's sources and compiler are this machine's, and no part of the tested code.
        _ => said.lines().rev().find(|line| !line.trim().is_empty()),
    };
    let why = why.unwrap_or("what guests need");
    Ok(Some(format!("lacks a guest ({}): {why}", log().display())))
}

/// Runs the tests that need RDMA devices, in guests.
pub(crate) fn tests() -> Result<Outcome> {
    if let Some(reason) = lacking()? {
        return Ok(Outcome::skipped(reason));
    }
    let built = built::tests(&RUNS.map(|run| run.test))?;
    let programs = RUNS.iter().map(|run| run.program(&built)).collect::<Result<Vec<_>>>()?;
    let logs = tree::scratch().join("guests");
    fs::create_dir_all(&logs)?;
    // A guest leaves a processor idle for a quarter of its time: one more than there are is faster.
    let at_a_time =
        available_parallelism().map_or(1, |cpus| (usize::from(cpus) + 1).min(AT_A_TIME));
    let (mut done, mut passed) = (Outcome::default(), 0);
    let results = shell::run_several(programs, at_a_time, &logs, |line| {
        done.absent.extend(left_out(line));
        passed += passed_in(line).unwrap_or(0);
        done.failed.extend(failed_in(line));
    });
    let failed: Vec<_> = results.into_iter().filter_map(Result::err).collect();
    let result = match failed.is_empty() {
        true => Ok(()),
        false => {
            Err(anyhow!(failed.iter().map(|e| format!("{e:#}")).collect::<Vec<_>>().join("\n")))
        }
    };
    done.detail = format!("{passed} passed");
    done.absent.sort();
    done.absent.dedup();
    done.or_failed(result)
}

impl Run {
    /// The program that runs the tests, which are built here, in a guest.
    fn program(&self, built: &Artifacts) -> Result<Program> {
        let Self { package, test, guest, without } = self;
        let tool = tree::root().join("tests/guest");
        let program = Program::new("python3")
            .args(["-B".as_ref(), tool.as_os_str()])
            .args(guest.split(' '))
            .args(["--timeout=600", "--"])
            .args([built.tests_of(package, test)?])
            // cargo runs tests in the crate's folder too.
            .in_folder(&tree::root().join("crates").join(package));
        let program =
            LIBFABRIC.iter().fold(program, |program, (name, value)| program.env(name, value));
        // An error repeats the last lines of the output, where backtraces would hide the reason.
        let program = program.env("RUST_BACKTRACE", "0");
        // One test at a time: the tests share cables, and some cut them.
        Ok(program.args(["--show-output", "--test-threads=1"]).args(*without))
    }
}
