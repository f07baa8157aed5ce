//! Formatting, clippy and documentation: each without a word of complaint.

use anyhow::Result;

use crate::shell::Program;

pub(crate) fn fmt() -> Result<()> {
    Program::cargo(&["fmt", "--all", "--check"]).run()
}

pub(crate) fn clippy() -> Result<()> {
    let arguments = ["clippy", "--locked", "--workspace", "--all-targets", "--", "-D", "warnings"];
    Program::cargo(&arguments).run()
}

/// Checks the engine, and the crates that pass its features on, without optional links and with
/// each link alone. The step `clippy` checks them with both links.
pub(crate) fn features() -> Result<()> {
    for features in ["", "verbs", "libfabric"] {
        let packages = ["uccl-p2p", "uccl-capi", "uccl-nixl", "uccl-py"];
        for package in packages {
            let package = format!("--package={package}");
            let features = format!("--features={features}");
            let of = ["clippy", "--locked", "--no-default-features", &package, &features];
            Program::cargo(&of).args(["--", "-D", "warnings"]).run()?;
        }
    }
    Ok(())
}

pub(crate) fn doc() -> Result<()> {
    let flags = std::env::var("RUSTDOCFLAGS").unwrap_or_default();
    Program::cargo(&["doc", "--locked", "--workspace", "--no-deps"])
        .env("RUSTDOCFLAGS", format!("{flags} -D warnings").trim())
        .run()
}
