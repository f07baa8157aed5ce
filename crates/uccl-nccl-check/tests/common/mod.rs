//! Plugins in C, and the check over them.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;
use tempfile::TempDir;

/// Compiles a plugin with a fault of its list; none without a compiler.
pub(crate) fn compiled(folder: &TempDir, source: &str, fault: &str) -> Option<PathBuf> {
    if Command::new("cc").arg("--version").output().is_err() {
        eprintln!("skipped: lacks cc: a plugin in C");
        return None;
    }
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(source);
    let library = folder.path().join("libnccl-net-test.so");
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"])
        .arg(format!("-DFAULT=FAULT_{fault}"))
        .arg(&source)
        .arg("-o")
        .arg(&library)
        .output()
        .expect("the compiler runs");
    assert!(compiled.status.success(), "{compiled:?}");
    Some(library)
}

/// Limits of a check: of the time until a lost peer is an error, and of a call that must not block.
#[derive(Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) silence_s: u32,
    pub(crate) call_ms: u32,
}

impl Limits {
    /// Longer than a busy machine keeps a process from its turn.
    pub(crate) const FAR: Self = Self { silence_s: 30, call_ms: 8000 };
}

/// The outcomes of some checks, and whether the whole passed.
pub(crate) fn check(library: &Path, only: &str, limits: Limits) -> (bool, Vec<Value>) {
    let output = Command::new(env!("CARGO_BIN_EXE_uccl-nccl-check"))
        .arg(library)
        .args(["--json", "--silence-s", &limits.silence_s.to_string()])
        .args(["--call-limit-ms", &limits.call_ms.to_string()])
        .args(["--limit-s", "60", "--only", only])
        .output()
        .expect("the check runs");
    let mut report: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {output:?}"));
    let rows = serde_json::from_value(report["rows"].take()).expect("rows");
    (output.status.success(), rows)
}

/// Expects that one check fails with these words, for a plugin with a fault.
pub(crate) fn notices(source: &str, fault: &str, (name, silence_s): (&str, u32), words: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    let Some(library) = compiled(&folder, source, fault) else { return };
    let (passed, rows) = check(&library, name, Limits { silence_s, call_ms: 1000 });
    assert!(!passed, "{rows:?}");
    let reason = rows[0]["outcome"]["failed"].as_str().unwrap_or_default();
    assert!(reason.contains(words), "{rows:?}");
}
