//! `cargo xtask test`: everything that must hold before a change is accepted.

use std::{
    fs,
    process::ExitCode,
    thread::available_parallelism,
    time::{Duration, Instant},
};

use anyhow::Result;
use clap::{Args, ValueEnum};

use crate::{
    capi, circles, clang_format, demo, deny, ep, floors, guest, hammer, headers, kernels,
    libfabric, lint, loom, mutants, nixl,
    outcome::Outcome,
    package, prebuild, prefetch, python, ray, readme,
    report::{failed_in, failed_of_report, left_out, passed_in},
    settings,
    shell::{self, Program},
    storm, stubs, tools, tree, vllm, widths, words,
};

/// Install the tools of the tests, run all tests, and name the skipped ones
#[derive(Args)]
pub(crate) struct TestArgs {
    /// Groups (lint, rust, python) or single steps [default: all]
    #[arg(long, value_delimiter = ',', value_parser = known, value_name = "NAME,...")]
    only: Vec<String>,
    /// Frames that are thrown at the parsers
    #[arg(long, default_value_t = 1_000_000)]
    frames: u64,
    /// List the steps
    #[arg(long)]
    list: bool,
}

impl TestArgs {
    /// One group of steps.
    pub(crate) fn only(group: Group) -> Self {
        Self { only: vec![group.name()], frames: 0, list: false }
    }

    /// Whether all steps run.
    fn is_all(&self) -> bool {
        self.only.is_empty()
    }

    fn wants(&self, step: &Step) -> bool {
        let named = |name: &str| self.only.iter().any(|only| only == name);
        let all = self.is_all() || step.group == Group::Setup;
        all || named(step.name) || named(&step.group.name())
    }
}

/// Groups of steps.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Group {
    /// Runs with every other group.
    Setup,
    Lint,
    Rust,
    Python,
}

impl Group {
    fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

struct Step {
    name: &'static str,
    group: Group,
    about: &'static str,
    run: fn(&TestArgs) -> Result<Outcome>,
}

/// The steps, in an order in which each can use the builds of those before it.
const STEPS: &[Step] = &[
    Step {
        name: "tools",
        group: Group::Setup,
        about: "installs missing packages, or says what is missing",
        run: |_| tools::provide(),
    },
    Step {
        name: "fmt",
        group: Group::Lint,
        about: "formatting",
        run: |_| with_component("fmt", "rustfmt", lint::fmt),
    },
    Step {
        name: "clippy",
        group: Group::Lint,
        about: "clippy, without a warning",
        run: |_| with_component("clippy", "clippy", lint::clippy),
    },
    Step {
        name: "features",
        group: Group::Lint,
        about: "clippy without links, and with each alone",
        run: |_| with_component("clippy", "clippy", lint::features),
    },
    Step {
        name: "doc",
        group: Group::Lint,
        about: "documentation, without a warning",
        run: |_| lint::doc().map(Outcome::from),
    },
    Step {
        name: "circles",
        group: Group::Lint,
        about: "whether modules need each other in a circle",
        run: |_| circles::check().map(Outcome::from),
    },
    Step {
        name: "floors",
        group: Group::Lint,
        about: "whether dependencies between the crates point down",
        run: |_| floors::check().map(Outcome::from),
    },
    Step {
        name: "words",
        group: Group::Lint,
        about: "whether comments and functions name things, and no folder has fewer that do",
        run: |_| words::check().map(Outcome::with),
    },
    Step {
        name: "widths",
        group: Group::Lint,
        about: "whether a folder has more lines over 100 columns than before",
        run: |_| widths::check().map(Outcome::with),
    },
    Step {
        name: "stubs",
        group: Group::Lint,
        about: "the types of the extension module, python/uccl/_core.pyi",
        run: |_| stubs::run(&stubs::StubsArgs { check: true }).map(Outcome::from),
    },
    Step {
        name: "mutants",
        group: Group::Lint,
        about: "whether every guard that can be broken on purpose is still where the list says",
        run: |_| mutants::check().map(Outcome::from),
    },
    Step {
        name: "package",
        group: Group::Lint,
        about: "the crates as they would be published, without building them",
        run: |_| package::check().map(Outcome::with),
    },
    Step {
        name: "units",
        group: Group::Rust,
        about: "Rust's tests, in one and in two processes",
        run: |args| units(args.is_all()),
    },
    Step {
        name: "doctests",
        group: Group::Rust,
        about: "examples in documentation and README",
        run: |_| doctests(),
    },
    Step {
        name: "settings",
        group: Group::Rust,
        about: "the table of settings in docs/settings.md",
        run: |_| settings::check().map(Outcome::from),
    },
    Step {
        name: "headers",
        group: Group::Rust,
        about: "the C header, and those of the kernels' parameters",
        run: |_| headers::run(&headers::HeadersArgs { check: true }).map(Outcome::from),
    },
    Step {
        name: "hammer",
        group: Group::Rust,
        about: "random and mutated bytes for every parser",
        run: |args| {
            let frames = hammer::HammerArgs { count: args.frames, seed: None };
            hammer::run_built(&frames).map(Outcome::from)
        },
    },
    Step {
        name: "storm",
        group: Group::Rust,
        about: "two processes at random over every link of this machine",
        run: |_| storm::run_shortly().map(Outcome::from),
    },
    Step {
        name: "loom",
        group: Group::Rust,
        about: "shared structures under every interleaving",
        run: |_| loom::run().map(Outcome::from),
    },
    // Not earlier: cargo-deny is downloaded beside the earlier steps, where it is not there yet.
    Step {
        name: "licences",
        group: Group::Lint,
        about: "licences and sources of all dependencies (cargo-deny)",
        run: |_| deny::licences(),
    },
    Step {
        name: "advisories",
        group: Group::Lint,
        about: "known faults of dependencies (cargo-deny)",
        run: |_| deny::advisories(),
    },
    Step {
        name: "kernels",
        group: Group::Rust,
        about: "GPU kernels: what is checked in, spills, registers, layouts",
        run: |_| kernels::run(&kernels::KernelsArgs { check: true }).map(Outcome::from),
    },
    Step {
        name: "demo",
        group: Group::Rust,
        about: "cargo xtask demo, shortened",
        run: |_| demo::run_shortly().map(Outcome::from),
    },
    Step {
        name: "capi",
        group: Group::Rust,
        about: "the examples in C and C++, with what is installed",
        run: |_| capi::run(),
    },
    Step {
        name: "wheel",
        group: Group::Python,
        about: "the wheel, in an environment with nothing else",
        run: |_| python::wheel(),
    },
    // Not earlier: these linters are downloaded beside the earlier steps, where they are not there
    // yet.
    Step {
        name: "clang-format",
        group: Group::Lint,
        about: "formatting of C, C++ and CUDA",
        run: |_| clang_format::check(),
    },
    Step {
        name: "ruff",
        group: Group::Lint,
        about: "formatting and imports of Python, unused and undefined names",
        run: |_| lint::ruff(),
    },
    Step { name: "mypy", group: Group::Lint, about: "types of Python", run: |_| lint::mypy() },
    Step {
        name: "stubtest",
        group: Group::Python,
        about: "whether the extension module has the types that it is said to have",
        run: |_| lint::stubtest(),
    },
    Step {
        name: "pytest",
        group: Group::Python,
        about: "tests across processes, hosts and faults",
        run: |_| python::tests(),
    },
    Step {
        name: "nixl",
        group: Group::Python,
        about: "the backend UCCL in stock NIXL, oldest and newest release",
        run: |_| nixl::tests(),
    },
    Step {
        name: "ep",
        group: Group::Python,
        about: "expert parallelism among processes, with torch",
        run: |_| ep::tests(),
    },
    Step {
        name: "ray",
        group: Group::Python,
        about: "Ray's tensor transport UCCL on CPUs, among actors",
        run: |_| ray::tests(),
    },
    Step {
        name: "examples",
        group: Group::Python,
        about: "examples in Python, those of the documents among them",
        run: |_| readme::python(),
    },
    // Last: the guest's kernel is made beside the earlier steps, where it is not there yet.
    Step {
        name: "libfabric",
        group: Group::Rust,
        about: "libfabric's tests with a newer library than the system's",
        run: |_| libfabric::tests(),
    },
    Step {
        name: "guest",
        group: Group::Rust,
        about: "RDMA, in guests with soft-RoCE",
        run: |_| guest::tests(),
    },
    Step {
        name: "rails",
        group: Group::Python,
        about: "tests across processes over RDMA, in a guest",
        run: |_| python::tests_in_guest(),
    },
    Step {
        name: "vllm",
        group: Group::Python,
        about: "vLLM's disaggregated prefill on CPUs, over NIXL's backend UCCL and mooncake.engine",
        run: |_| vllm::tests(),
    },
];

/// Runs all wanted steps, even after a failure.
pub(crate) fn run(args: &TestArgs) -> Result<ExitCode> {
    if args.list {
        STEPS.iter().for_each(|s| println!("{:<7} {:<11} {}", s.group.name(), s.name, s.about));
        return Ok(ExitCode::SUCCESS);
    }
    let wanted: Vec<_> = STEPS.iter().filter(|step| args.wants(step)).collect();
    let mut results = Vec::new();
    for (number, step) in wanted.iter().enumerate() {
        println!("\n=== {}/{} {}: {}", number + 1, wanted.len(), step.name, step.about);
        let start = Instant::now();
        let done = (step.run)(args).or_else(|error| Outcome::default().or_failed(Err(error)))?;
        // Only after packages have been installed: one program at a time can do that.
        if step.group == Group::Setup {
            begin_beside(&wanted, args.is_all());
        }
        if let Some(failure) = &done.failure {
            println!("{failure}");
        }
        results.push((step.name, done, start.elapsed()));
    }
    shell::end_beside();
    print_results(&results);
    let failed = results.iter().any(|(_, done, _)| done.failure.is_some());
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Begins slow preparations beside the steps, if the wanted steps need them.
fn begin_beside(wanted: &[&Step], all: bool) {
    let any = |names: &[&str]| wanted.iter().any(|step| names.contains(&step.name));
    if any(&["guest", "rails"]) {
        guest::begin_to_prepare();
    }
    if all {
        prefetch::begin();
    }
}

fn print_results(results: &[(&str, Outcome, Duration)]) {
    println!("\n{:<11} {:<8} {:>7}", "step", "result", "seconds");
    for (name, done, took) in results {
        let line = format!(
            "{name:<11} {:<8} {:>7.1}  {}",
            done.verdict(),
            took.as_secs_f64(),
            done.detail
        );
        println!("{}", line.trim_end());
    }
    let total: Duration = results.iter().map(|(_, _, took)| took).sum();
    println!("{:<11} {:<8} {:>7.1}", "", "", total.as_secs_f64());
    let absent =
        results.iter().flat_map(|(name, done, _)| done.absent.iter().map(move |a| (name, a)));
    for (index, (name, what)) in absent.enumerate() {
        if index == 0 {
            println!("\nLeft out:");
        }
        println!("  {name}: {what}");
    }
    for (name, done, _) in results {
        if let Some(failure) = &done.failure {
            println!("\n{name} FAILED: {failure}");
            done.failed.iter().for_each(|test| println!("  {test}"));
        }
    }
}

fn known(name: &str) -> Result<String, String> {
    match STEPS.iter().any(|step| step.name == name || step.group.name() == name) {
        true => Ok(name.to_owned()),
        false => {
            let names: Vec<_> = STEPS.iter().map(|step| step.name).collect();
            Err(format!("there are lint, rust, python, and the steps {}", names.join(", ")))
        }
    }
}

fn with_component(command: &str, component: &str, run: fn() -> Result<()>) -> Result<Outcome> {
    match tools::cargo_has(command) {
        true => run().map(Outcome::from),
        false => {
            Ok(Outcome::skipped(format!("lacks {component} (rustup component add {component})")))
        }
    }
}

/// Runs Rust's tests, and beside them the builds of later steps if `all` steps run.
fn units(all: bool) -> Result<Outcome> {
    // nextest's report. An earlier run's report is removed.
    let report = tree::target().join("nextest/default/junit.xml");
    let _ = fs::remove_file(&report);
    let (tests, while_running) = match tools::cargo_has("nextest") {
        true => (&["nextest", "run"][..], &["--no-fail-fast", "--status-level=fail"][..]),
        false => (&["test", "--all-targets"][..], &["--no-fail-fast", "--", "--show-output"][..]),
    };
    let program = || Program::cargo(tests).args(["--locked", "--workspace"]);
    program().args(["--no-run"]).run()?;
    if all {
        prebuild::begin();
    }
    let mut done = Outcome::default();
    let mut passed = 0;
    // Many tests wait for a time: with twice as many at once as there are processors, fewer idle.
    let at_a_time = available_parallelism().map_or(1, |cpus| 2 * usize::from(cpus)).to_string();
    let program = program().args(while_running).env("NEXTEST_TEST_THREADS", &at_a_time);
    let result = program.watch(|line| {
        done.absent.extend(left_out(line));
        if let Some((_, summary)) = line.split_once("tests run: ") {
            done.detail = summary.to_owned();
        } else if let Some(count) = passed_in(line) {
            passed += count;
            done.detail = format!("{passed} passed");
        }
        done.failed.extend(failed_in(line));
    });
    if let Ok(report) = fs::read_to_string(&report) {
        done.absent.extend(report.lines().filter_map(left_out));
        done.failed = failed_of_report(&report);
    }
    done.absent.sort();
    done.absent.dedup();
    done.or_failed(result)
}

fn doctests() -> Result<Outcome> {
    Program::cargo(&["test", "--locked", "--workspace", "--doc"]).run()?;
    readme::rust()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_chosen_by_name_and_by_group() {
        let chosen = |names: &[&str]| {
            let only = names.iter().map(|name| (*name).to_owned()).collect();
            let args = TestArgs { only, frames: 0, list: false };
            STEPS.iter().filter(|step| args.wants(step)).map(|step| step.name).collect::<Vec<_>>()
        };
        assert_eq!(chosen(&[]).len(), STEPS.len());
        assert_eq!(chosen(&["fmt", "loom"]), ["tools", "fmt", "loom"]);
        assert_eq!(
            chosen(&["python"]),
            [
                "tools", "wheel", "stubtest", "pytest", "nixl", "ep", "ray", "examples", "rails",
                "vllm"
            ]
        );
        assert!(known("pytest").is_ok() && known("lint").is_ok() && known("linty").is_err());
    }
}
