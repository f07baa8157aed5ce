//! `cargo xtask loom`: runs the structures that processes share under every interleaving.

use anyhow::Result;

use crate::{prebuild, shell::Program, tree};

pub(crate) fn run() -> Result<()> {
    prebuild::wait();
    tests().run()
}

/// Builds the tests without running them.
pub(crate) fn build() -> Result<()> {
    tests().args(["--no-run"]).run()
}

/// Builds in a target folder of its own: the flag changes every crate's build.
fn tests() -> Program {
    let flags = std::env::var("RUSTFLAGS").unwrap_or_default();
    Program::cargo(&["test", "--locked", "--release", "--package=uccl-fabric"])
        .args(["--package=uccl-local", "--package=uccl-ep", "--lib", "loom"])
        .env("RUSTFLAGS", format!("{flags} --cfg loom").trim())
        .env("CARGO_TARGET_DIR", tree::target().join("loom"))
        // Models run for seconds, most of them in loom, which is optimized. Optimizing the rest
        // would take longer than it saves.
        .args(
            ["loom", "generator"]
                .map(|name| format!("--config=profile.release.package.{name}.opt-level=1")),
        )
        .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "0")
        .env("CARGO_PROFILE_RELEASE_LTO", "off")
        .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16")
        .env("CARGO_PROFILE_RELEASE_DEBUG", "0")
}
