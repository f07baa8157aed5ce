//! `cargo xtask headers`: makes the C header from the functions of the library.

use std::{fs, path::PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::{built, shell::Program, tree};

/// Make crates/uccl-capi/include/uccl.h from crates/uccl-capi/src/api
#[derive(Args)]
pub(crate) struct HeadersArgs {
    /// Change nothing, and fail if the header does not match the sources
    #[arg(long)]
    pub(crate) check: bool,
}

pub(crate) fn run(args: &HeadersArgs) -> Result<()> {
    let made = made()?;
    let path = path();
    if !args.check {
        return fs::write(&path, made).with_context(|| path.display().to_string());
    }
    if fs::read_to_string(&path).is_ok_and(|checked_in| checked_in == made) {
        return Ok(());
    }
    bail!("{} is not what the sources make it: run cargo xtask headers", path.display());
}

fn path() -> PathBuf {
    tree::root().join("crates/uccl-capi/include/uccl.h")
}

fn made() -> Result<String> {
    // An example makes the header, so that the other commands need not be built with cbindgen.
    match Program::new(built::examples()?.executable("headers")?).ask()? {
        (true, header) => Ok(header + "\n"),
        (false, said) => bail!("the C header: {said}"),
    }
}
