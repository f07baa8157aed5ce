//! The programs that make wheels, from PyPI.

use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
};

use anyhow::Result;

use crate::{python, shell::Program, tools, tree};

/// maturin makes the wheel, zig links it for an older glibc, auditwheel reports its needs.
const PACKAGES: [&str; 3] = ["maturin==1.16.0", "ziglang==0.17.1", "auditwheel==6.8.2"];

/// An environment with these programs.
pub(super) struct Environment {
    folder: PathBuf,
}

impl Environment {
    /// Makes the environment unless it is there, or returns the reason why it cannot be had.
    pub(super) fn provide() -> Result<Result<Self, String>> {
        if !tools::can_make_environments() {
            return Ok(Err("lacks python3-venv".into()));
        }
        let folder = tree::scratch().join("dist");
        let stamp = folder.join("requirements.txt");
        let wanted = PACKAGES.join("\n");
        let made = Self { folder };
        if fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted) {
            return Ok(Ok(made));
        }
        python::make_environment(&made.folder, true)?;
        println!("{} into {}", PACKAGES.join(", "), made.folder.display());
        let (well, said) = python::pip(&made.python()).args(PACKAGES).ask()?;
        if !well {
            let reason = said.lines().last().unwrap_or("pip failed");
            return Ok(Err(format!("lacks {}: {reason}", PACKAGES.join(", "))));
        }
        fs::write(stamp, wanted)?;
        Ok(Ok(made))
    }

    pub(super) fn python(&self) -> PathBuf {
        self.folder.join("bin/python")
    }

    pub(super) fn program(&self, name: &str) -> Program {
        Program::new(self.folder.join("bin").join(name))
    }

    /// pip, set up to make a wheel with these programs and no others.
    pub(super) fn pip_wheel(&self, source: &Path, to: &Path) -> Result<Program> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let before = [self.folder.join("bin")];
        let path: OsString =
            std::env::join_paths(before.into_iter().chain(std::env::split_paths(&path)))?;
        Ok(Program::new(self.python())
            .args(["-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir"])
            .args([to, source])
            .env("PATH", path))
    }
}
