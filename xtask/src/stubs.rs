//! `cargo xtask stubs`: makes python/uccl/_core.pyi from the sources of the extension module.
//!
//! Names, parameters, defaults and documentation are those of the sources, and types are made from
//! Rust's. Nothing is built for it; `stubtest` holds the result against the built module.

mod python;
mod source;
mod tokens;
mod types;

use std::{fs, path::PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

use self::{python::Forms, source::Module};
use crate::tree;

/// Make python/uccl/_core.pyi from crates/uccl-py/src
#[derive(Args)]
pub(crate) struct StubsArgs {
    /// Change nothing, and fail if the file does not match the sources
    #[arg(long)]
    pub(crate) check: bool,
}

pub(crate) fn run(args: &StubsArgs) -> Result<()> {
    let made = made()?;
    let path = tree::root().join("python/uccl/_core.pyi");
    if !args.check {
        return fs::write(&path, made).with_context(|| path.display().to_string());
    }
    if fs::read_to_string(&path).is_ok_and(|checked_in| checked_in == made) {
        return Ok(());
    }
    bail!("{} is not what the sources make it: run cargo xtask stubs", path.display());
}

fn made() -> Result<String> {
    let folder = tree::root().join("crates/uccl-py");
    let module = Module::read(&folder.join("src"))?;
    let head = read(folder.join("stubs/head.pyi"))?;
    let forms = Forms::read(&read(folder.join("stubs/forms.pyi"))?)?;
    python::check_forms(&forms, &module)?;
    let text = python::module(&head, &module, &forms);
    ensure!(!text.contains('\t'), "a tab in the documentation of the extension module");
    Ok(text)
}

fn read(path: PathBuf) -> Result<String> {
    fs::read_to_string(&path).with_context(|| path.display().to_string())
}
