//! `cargo xtask install`: puts the library, its headers and the command where other programs look
//! for them.

use std::{
    fs,
    path::{Path, PathBuf, absolute},
};

use anyhow::{Context, Result};
use clap::Args;

use crate::{optimized::For, prebuild, shell::Program, tree};

/// A file that cargo builds.
struct Product {
    package: &'static str,
    /// The file's name in cargo's folder.
    file: &'static str,
    /// The path below the prefix.
    to: &'static str,
}

/// The files that cargo builds for an installation. Programs look for the first under the name of
/// UCCL's library, which is also the name of a crate here.
const BUILT: &[Product] = &[
    Product { package: "uccl-capi", file: "libuccl_capi.so", to: "lib/libuccl_p2p.so" },
    Product { package: "uccl-cli", file: "uccl", to: "bin/uccl" },
    Product { package: "uccl-nixl", file: "libplugin_UCCL.so", to: "lib/nixl/libplugin_UCCL.so" },
    // NCCL finds it by the name `uccl` in NCCL_NET_PLUGIN, where the loader looks.
    Product { package: "uccl-nccl", file: "libnccl_net_uccl.so", to: "lib/libnccl-net-uccl.so" },
];

/// Files of the repository, and their paths below the prefix.
const FILES: &[(&str, &str)] = &[
    ("include/uccl.h", "include/uccl.h"),
    ("include/uccl_engine.h", "include/uccl_engine.h"),
    ("include/common.h", "include/common.h"),
    ("package/uccl.pc.in", "lib/pkgconfig/uccl.pc"),
    ("package/uccl-config.cmake.in", "lib/cmake/uccl/uccl-config.cmake"),
    ("package/uccl-config-version.cmake.in", "lib/cmake/uccl/uccl-config-version.cmake"),
];

/// Build the library for C and C++, the plugins of NIXL and NCCL and the uccl command, and install
/// them
///
/// Makes lib/libuccl_p2p.so, lib/libnccl-net-uccl.so, include/uccl.h, include/uccl_engine.h,
/// bin/uccl, and the files for pkg-config and CMake. The folder can be moved afterwards.
#[derive(Args)]
pub(crate) struct InstallArgs {
    /// The folder to install into
    #[arg(long, default_value = "/usr/local", value_name = "DIR")]
    pub(crate) prefix: PathBuf,
}

pub(crate) fn run(args: &InstallArgs) -> Result<()> {
    let prefix = absolute(&args.prefix).context("the prefix")?;
    install(&prefix, For::Users)
}

/// Installs into a folder.
pub(crate) fn install(prefix: &Path, whom: For) -> Result<()> {
    prebuild::wait();
    build(whom)?;
    for built in BUILT {
        let file = whom.folder().join(built.file);
        put(&prefix.join(built.to), |to| fs::copy(&file, to).map(drop))?;
    }
    for (from, to) in FILES {
        let from = tree::root().join("crates/uccl-capi").join(from);
        let text = fs::read_to_string(&from).with_context(|| from.display().to_string())?;
        let text = text.replace("@VERSION@", env!("CARGO_PKG_VERSION"));
        put(&prefix.join(to), |to| fs::write(to, &text))?;
    }
    Ok(())
}

/// Builds the library, the plugins and the command.
pub(crate) fn build(whom: For) -> Result<()> {
    let packages = BUILT.iter().map(|built| format!("--package={}", built.package));
    whom.set_in(Program::cargo(&["build", "--release", "--locked"]).args(packages)).run()
}

/// Makes a file beside its place and then moves it there: programs that have the old one mapped
/// keep it.
fn put(to: &Path, make: impl FnOnce(&Path) -> std::io::Result<()>) -> Result<()> {
    let shown = || format!("cannot install {}", to.display());
    fs::create_dir_all(to.with_file_name("")).with_context(shown)?;
    let mut new = to.as_os_str().to_owned();
    new.push(".new");
    let new = Path::new(&new);
    make(new).and_then(|()| fs::rename(new, to)).with_context(shown)?;
    println!("{}", to.display());
    Ok(())
}
