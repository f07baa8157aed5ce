//! Runs libfabric's tests with a newer library than distributions have, from a package of PyPI.

use std::path::PathBuf;

use anyhow::Result;

use crate::{
    outcome::Outcome,
    python,
    report::{failed_in, left_out, passed_in},
    shell::Program,
};

/// Intel's MPI, which brings libfabric 1.21 with reliable datagrams in its `tcp` provider.
const PACKAGE: &str = "impi-rt==2021.14.1";

/// Paths in the environment's folder.
const LIBRARY: &str = "lib/libfabric/libfabric.so.1";
const PROVIDERS: &str = "lib/libfabric/prov";

/// Runs every crate's tests of libfabric with that library.
pub(crate) fn tests() -> Result<Outcome> {
    if let Some(reason) = python::lacking() {
        return Ok(Outcome::skipped(reason));
    }
    let folder = match environment()? {
        Ok(folder) => folder,
        Err(reason) => return Ok(Outcome::skipped(format!("lacks {PACKAGE}: {reason}"))),
    };
    let (mut done, mut passed) = (Outcome::default(), 0);
    // Tests of the whole workspace: for the two crates that have some, everything would be built
    // anew.
    let tests = ["test", "--locked", "--workspace", "--test=libfabric"];
    let result = Program::cargo(&tests)
        .args(["--no-fail-fast", "--", "--show-output"])
        .env("UCCL_LIBFABRIC_SO", folder.join(LIBRARY))
        .env("FI_PROVIDER_PATH", folder.join(PROVIDERS))
        .watch(|line| {
            done.absent.extend(left_out(line));
            passed += passed_in(line).unwrap_or(0);
            done.failed.extend(failed_in(line));
        });
    done.detail = format!("{passed} passed");
    done.absent.sort();
    done.absent.dedup();
    done.or_failed(result)
}

/// Makes the environment unless it is there.
pub(crate) fn fetch() -> Result<()> {
    environment().map(drop)
}

/// The folder with the library, which is made unless it is there; or the reason why it cannot be
/// had.
fn environment() -> Result<Result<PathBuf, String>> {
    let folder = python::environment_of("libfabric", &python::Requirements::alone(&[PACKAGE]))?;
    Ok(folder.and_then(|folder| match folder.join(LIBRARY).exists() {
        true => Ok(folder),
        false => Err(format!("it has no {LIBRARY}")),
    }))
}
