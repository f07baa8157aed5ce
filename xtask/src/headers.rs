//! `cargo xtask headers`: makes the C header from the functions of the library, and the headers of
//! the kernels' parameters from their structs in Rust.

use std::fs;

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::{
    built::{self, Artifacts},
    shell::Program,
    tree,
};

/// Make crates/uccl-capi/include/uccl.h from crates/uccl-capi/src/api, kernels/ep/params.cuh from
/// crates/uccl-ep/src/cuda/params.rs, and kernels/copy.cuh from
/// crates/uccl-device/src/cuda/gather/params.rs
#[derive(Args)]
pub(crate) struct HeadersArgs {
    /// Change nothing, and fail if a header does not match the sources
    #[arg(long)]
    pub(crate) check: bool,
}

/// A header, and the example that prints it: the other commands need not be built with a generator,
/// and the compiler of Rust says how long and where fields are.
struct Header {
    path: &'static str,
    example: &'static str,
}

const LIBRARY: Header = Header { path: "crates/uccl-capi/include/uccl.h", example: "headers" };
const KERNELS: [Header; 2] = [
    Header { path: "kernels/ep/params.cuh", example: "ep_kernel_header" },
    Header { path: "kernels/copy.cuh", example: "kernel_header" },
];

pub(crate) fn run(args: &HeadersArgs) -> Result<()> {
    let built = built::examples()?;
    LIBRARY.make(&built, args.check)?;
    of_kernels(&built, args.check)
}

/// Makes the headers of the kernels' parameters, or checks them.
pub(crate) fn of_kernels(built: &Artifacts, check: bool) -> Result<()> {
    KERNELS.iter().try_for_each(|header| header.make(built, check))
}

impl Header {
    fn make(&self, built: &Artifacts, check: bool) -> Result<()> {
        let made = match Program::new(built.executable(self.example)?).ask()? {
            (true, header) => header + "\n",
            (false, said) => bail!("{}: {said}", self.path),
        };
        let path = tree::root().join(self.path);
        if !check {
            return fs::write(&path, made).with_context(|| path.display().to_string());
        }
        if fs::read_to_string(&path).is_ok_and(|checked_in| checked_in == made) {
            return Ok(());
        }
        bail!("{} is not what the sources make it: run cargo xtask headers", path.display());
    }
}
