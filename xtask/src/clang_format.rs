//! The format of C, C++ and CUDA, by clang-format. `.clang-format` files have the styles.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};

use crate::{
    outcome::Outcome,
    python::{self, Requirements},
    shell::Program,
    tree,
};

const FORMATTER: &str = "clang-format==21.1.8";
/// Folders of the root that hold sources.
const FOLDERS: [&str; 4] = ["bench", "crates", "examples", "kernels"];
const ENDINGS: [&str; 7] = ["c", "cc", "cpp", "h", "hpp", "cu", "cuh"];

/// Fails if the formatter would change a file.
pub(crate) fn check() -> Result<Outcome> {
    if let Some(reason) = python::lacking() {
        return Ok(Outcome::skipped(reason));
    }
    let folder = match environment()? {
        Ok(folder) => folder,
        Err(reason) => return Ok(Outcome::skipped(format!("lacks {FORMATTER}: {reason}"))),
    };
    let mut sources = Vec::new();
    for folder in FOLDERS {
        find(&tree::root().join(folder), &mut sources)?;
    }
    ensure!(!sources.is_empty(), "there is no source in {FOLDERS:?}");
    sources.sort();
    let list = folder.join("sources");
    fs::write(&list, sources.join("\n"))?;
    let formatter = Program::new(folder.join("bin/clang-format"));
    formatter.args(["--dry-run", "-Werror", &format!("--files={}", list.display())]).run()?;
    Ok(Outcome::default())
}

/// Installs the formatter, unless it is there.
pub(crate) fn fetch() -> Result<()> {
    environment().map(drop)
}

fn environment() -> Result<Result<PathBuf, String>> {
    python::environment_of("clang-format", &Requirements::alone(&[FORMATTER]))
}

/// Adds the sources in a folder and in the folders below it.
fn find(folder: &Path, sources: &mut Vec<String>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() {
            find(&path, sources)?;
        } else if path.extension().is_some_and(|end| ENDINGS.iter().any(|known| end == *known)) {
            sources.push(path.display().to_string());
        }
    }
    Ok(())
}
