//! Compilers and linkers for wheels that run on older systems than this one, and on other
//! processors.
//!
//! zig links Rust's part and the C++ part, because it knows the symbols of each version of glibc.
//! GCC compiles the C++ part, which uses GCC's libraries: NIXL loads this part and passes it
//! objects with their layouts.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};

use super::environment::Environment;
use crate::{shell::Program, tools, tree};

/// The oldest glibc that wheels run with, as their names promise: that of RHEL 8, Debian 10, and
/// NIXL's own wheels.
pub(super) const GLIBC: (u32, u32) = (2, 28);

/// A header that lets the plugin run with the libstdc++ of that time. GCC 11 added a function that
/// throws an exception of its own, where older versions threw its base class.
const OLDER_LIBSTDCXX: &str = r#"#pragma once
namespace std {
[[noreturn]] void __throw_bad_array_new_length() __asm__("_ZSt17__throw_bad_allocv");
}
"#;

/// The processor that a wheel is made for.
pub(super) struct Target {
    /// The name in wheels.
    pub(super) name: &'static str,
    triple: &'static str,
    /// The name in GCC and Debian.
    gnu: &'static str,
    /// Debian's package with the compiler.
    package: &'static str,
    /// Debian's name of the processor.
    pub(super) debian: &'static str,
}

pub(super) const X86_64: Target = Target {
    name: "x86_64",
    triple: "x86_64-unknown-linux-gnu",
    gnu: "x86_64-linux-gnu",
    package: "g++",
    debian: "amd64",
};

pub(super) const AARCH64: Target = Target {
    name: "aarch64",
    triple: "aarch64-unknown-linux-gnu",
    gnu: "aarch64-linux-gnu",
    package: "g++-aarch64-linux-gnu",
    debian: "arm64",
};

impl Target {
    /// The platform in the names of wheels.
    pub(super) fn platform(&self) -> String {
        let (major, minor) = GLIBC;
        format!("manylinux_{major}_{minor}_{}", self.name)
    }

    /// Whether this machine has this processor.
    pub(super) fn is_here(&self) -> bool {
        std::env::consts::ARCH == self.name
    }

    /// Installs missing tools if that is allowed, and names the first one that is still missing.
    pub(super) fn lacking(&self) -> Option<String> {
        if !self.gnu("g++").args(["--version"]).works() {
            tools::try_to_install(&[self.package]);
            if !self.gnu("g++").args(["--version"]).works() {
                return Some(format!("lacks {}-g++ (Debian's {})", self.gnu, self.package));
            }
        }
        if !self.has_std() {
            if let Err(error) = Program::new("rustup").args(["target", "add", self.triple]).run() {
                println!("{error:#}");
            }
            if !self.has_std() {
                return Some(format!(
                    "lacks Rust's library for it (rustup target add {})",
                    self.triple
                ));
            }
        }
        None
    }

    /// Sets cargo, the C++ compiler and maturin up for this target.
    pub(super) fn prepare(&self, program: Program, with: &Environment) -> Result<Program> {
        let folder = tree::scratch().join("dist-linkers");
        fs::create_dir_all(&folder)?;
        let header = folder.join("older_libstdcxx.h");
        fs::write(&header, OLDER_LIBSTDCXX)?;
        let linker = self.write_linker(&folder, with)?;
        let small = self.triple.replace('-', "_");
        let arguments = ["--locked", "--target", self.triple, "--compatibility", &self.platform()];
        Ok(program
            .env("CARGO_BUILD_TARGET", self.triple)
            .env(&format!("CARGO_TARGET_{}_LINKER", small.to_uppercase()), linker)
            .env(&format!("CXX_{small}"), format!("{}-g++", self.gnu))
            .env(&format!("CXXFLAGS_{small}"), format!("-include {}", header.display()))
            .env("STRIP", format!("{}-strip", self.gnu))
            .env("MATURIN_PEP517_ARGS", arguments.join(" "))
            .env("ZIG_GLOBAL_CACHE_DIR", tree::scratch().join("zig")))
    }

    /// Writes a script that runs zig in the linker's place. zig would link its own libraries for
    /// C++ and for unwinding. GCC's are this system's and need a newer glibc than the target's, but
    /// those of the system that a wheel runs on do not.
    fn write_linker(&self, folder: &Path, with: &Environment) -> Result<PathBuf> {
        let (major, minor) = GLIBC;
        let script = format!(
            r#"#!/bin/sh
for argument; do
    case $argument in
        -lstdc++) argument='{cxx}' ;;
        -lgcc_s) argument='{unwind}' ;;
    esac
    set -- "$@" "$argument"
    shift
done
exec '{python}' -m ziglang cc -target {gnu}.{major}.{minor} -Wl,--allow-shlib-undefined "$@"
"#,
            cxx = self.library("libstdc++.so")?.display(),
            unwind = self.library("libgcc_s.so.1")?.display(),
            python = with.python().display(),
            gnu = self.gnu,
        );
        let linker = folder.join(self.triple);
        fs::write(&linker, script).with_context(|| linker.display().to_string())?;
        fs::set_permissions(&linker, fs::Permissions::from_mode(0o755))?;
        Ok(linker)
    }

    /// The path of one of GCC's libraries.
    fn library(&self, name: &str) -> Result<PathBuf> {
        let (well, said) = self.gnu("g++").args([format!("-print-file-name={name}")]).ask()?;
        let path = PathBuf::from(said);
        ensure!(well && path.is_absolute(), "{}-g++ has no {name}: install it anew", self.gnu);
        Ok(path)
    }

    fn gnu(&self, program: &str) -> Program {
        Program::new(format!("{}-{program}", self.gnu))
    }

    fn has_std(&self) -> bool {
        let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
        let asked =
            Program::new(rustc).args(["--print=target-libdir", "--target", self.triple]).ask();
        asked.is_ok_and(|(well, folder)| well && Path::new(&folder).is_dir())
    }
}
