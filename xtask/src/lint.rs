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

pub(crate) fn doc() -> Result<()> {
    let flags = std::env::var("RUSTDOCFLAGS").unwrap_or_default();
    Program::cargo(&["doc", "--locked", "--workspace", "--no-deps"])
        .env("RUSTDOCFLAGS", format!("{flags} -D warnings").trim())
        .run()
}
