//! The tests' needs on this machine: installed where that is allowed, named where it is not.

use std::path::Path;

use anyhow::Result;
use rustix::process::geteuid;

use crate::{outcome::Outcome, shell::Program};

/// A tool or package that is not part of the repository.
struct Need {
    /// The purpose that is lost without it.
    purpose: &'static str,
    /// Debian's package.
    package: &'static str,
    is_there: fn() -> bool,
}

const NEEDS: &[Need] = &[
    Need { purpose: "tests and examples in C and C++", package: "g++", is_there: can_compile_cpp },
    Need { purpose: "the examples in C and C++", package: "pkg-config", is_there: has_pkg_config },
    Need {
        purpose: "tests between two hosts (network namespaces)",
        package: "iproute2",
        is_there: || Program::new("ip").args(["-V"]).works(),
    },
    Need {
        purpose: "the wheel and every test in Python",
        package: "python3",
        is_there: || Program::new("python3").args(["-V"]).works(),
    },
    Need {
        purpose: "the wheel and every test in Python",
        package: "python3-venv",
        is_there: can_make_environments,
    },
    Need {
        purpose: "the plugin for NIXL, in the wheel",
        package: "g++",
        is_there: || Program::new("c++").args(["--version"]).works(),
    },
    Need {
        purpose: "layouts compared with the headers of verbs",
        package: "libibverbs-dev",
        is_there: || Path::new("/usr/include/infiniband/verbs.h").exists(),
    },
    Need {
        purpose: "layouts compared with the headers of RDMA's connection manager",
        package: "librdmacm-dev",
        is_there: || Path::new("/usr/include/rdma/rdma_cma.h").exists(),
    },
    Need {
        purpose: "layouts compared with the headers of libfabric, and tests over its providers",
        package: "libfabric-dev",
        is_there: || Path::new("/usr/include/rdma/fabric.h").exists(),
    },
    Need {
        purpose: "which providers libfabric has (fi_info)",
        package: "libfabric-bin",
        is_there: || Program::new("fi_info").args(["--version"]).works(),
    },
    Need {
        purpose: "RDMA compared with what the device can do (ib_write_bw)",
        package: "perftest",
        is_there: || Path::new("/usr/bin/ib_write_bw").exists(),
    },
];

/// Cargo's commands that a minimal toolchain leaves out.
const COMPONENTS: [(&str, &str); 2] = [("fmt", "rustfmt"), ("clippy", "clippy")];

/// Whether Python can make virtual environments that have pip.
pub(crate) fn can_make_environments() -> bool {
    Program::new("python3").args(["-c", "import ensurepip, venv"]).works()
}

/// Whether there is a compiler for C++, which comes with one for C.
pub(crate) fn can_compile_cpp() -> bool {
    ["c++", "cc"].iter().all(|compiler| Program::new(compiler).args(["--version"]).works())
}

/// Whether there is pkg-config.
pub(crate) fn has_pkg_config() -> bool {
    Program::new("pkg-config").args(["--version"]).works()
}

/// Whether cargo knows a command.
pub(crate) fn cargo_has(command: &str) -> bool {
    Program::cargo(&[command, "--version"]).works()
}

/// Installs missing tools, and names those that are still missing.
pub(crate) fn provide() -> Result<Outcome> {
    install_packages();
    install_components();
    let packages = missing().map(|need| format!("{} is missing: {}", need.package, need.purpose));
    let components = COMPONENTS.iter().filter(|(command, _)| !cargo_has(command));
    let lints = components.map(|(_, name)| format!("{name} is missing: one of the lints"));
    let absent: Vec<_> = packages.chain(lints).collect();
    Ok(Outcome::without(absent))
}

fn missing() -> impl Iterator<Item = &'static Need> {
    NEEDS.iter().filter(|need| !(need.is_there)())
}

/// Installs missing packages. A failure ends nothing: missing packages are noticed afterwards.
fn install_packages() {
    let packages: Vec<_> = missing().map(|need| need.package).collect();
    try_to_install(&packages);
}

/// Installs Debian's packages, or prints the command for that.
pub(crate) fn try_to_install(packages: &[&str]) {
    if packages.is_empty() {
        return;
    }
    if !geteuid().is_root() || !Program::new("apt-get").args(["--version"]).works() {
        println!("as root on Debian or Ubuntu: apt-get install {}", packages.join(" "));
        return;
    }
    if install(packages).is_err() {
        // A fresh machine has no list of packages yet.
        if let Err(error) = Program::new("apt-get").args(["update"]).run() {
            println!("{error:#}");
        }
        if install(packages).is_err() {
            // One package at a time: a package that this release lacks must not stop the others.
            packages.iter().filter_map(|package| install(&[package]).err()).for_each(|error| {
                println!("{error:#}");
            });
        }
    }
}

fn install(packages: &[&str]) -> Result<()> {
    Program::new("apt-get")
        .args(["install", "--yes", "--no-install-recommends"])
        .args(packages)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .run()
}

fn install_components() {
    for (command, name) in COMPONENTS {
        if cargo_has(command) {
            continue;
        }
        if let Err(error) = Program::new("rustup").args(["component", "add", name]).run() {
            println!("{error:#}");
        }
    }
}
