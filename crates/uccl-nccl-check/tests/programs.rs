//! The check over a plugin in C, as it should be and with one fault each.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;
use tempfile::TempDir;

/// Compiles the plugin with a fault of its list; none without a compiler.
fn plugin(folder: &TempDir, fault: &str) -> Option<PathBuf> {
    if Command::new("cc").arg("--version").output().is_err() {
        eprintln!("skipped: lacks cc: a plugin in C");
        return None;
    }
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/net_plugin.c");
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

/// The outcomes of some checks, and whether the whole passed.
fn check(library: &Path, only: &str) -> (bool, Vec<Value>) {
    let output = Command::new(env!("CARGO_BIN_EXE_uccl-nccl-check"))
        .arg(library)
        .args(["--json", "--silence-s", "3", "--limit-s", "60", "--only", only])
        .output()
        .expect("the check runs");
    let mut report: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {output:?}"));
    let rows = serde_json::from_value(report["rows"].take()).expect("rows");
    (output.status.success(), rows)
}

/// Expects that one check fails with these words.
fn notices(fault: &str, name: &str, words: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    let Some(library) = plugin(&folder, fault) else { return };
    let (passed, rows) = check(&library, name);
    assert!(!passed, "{rows:?}");
    let reason = rows[0]["outcome"]["failed"].as_str().unwrap_or_default();
    assert!(reason.contains(words), "{rows:?}");
}

#[test]
fn a_plugin_in_c_passes() {
    let folder = tempfile::tempdir().expect("a folder");
    let Some(library) = plugin(&folder, "NONE") else { return };
    let only = "layout,contexts,reload,connect,peers,listener,sizes,too-long,order,backpressure,\
                grouped,preset,flags,threads,ring,bootstrap,leaks,close,close-dead,close-stopped,\
                killed,paused";
    let (passed, rows) = check(&library, only);
    assert!(passed, "{rows:#?}");
    assert_eq!(rows.len(), 22);
}

#[test]
fn a_wrong_byte_is_noticed() {
    notices("BYTE", "sizes", "byte 5000 is wrong");
}

#[test]
fn a_call_that_blocks_is_noticed() {
    // The connector waits for the handle, which is told after accept has returned.
    let folder = tempfile::tempdir().expect("a folder");
    let Some(library) = plugin(&folder, "BLOCK") else { return };
    let output = Command::new(env!("CARGO_BIN_EXE_uccl-nccl-check"))
        .arg(&library)
        .args(["--limit-s", "3", "--only", "connect"])
        .output()
        .expect("the check runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("no end within 3s"), "{said}");
    assert!(said.contains("accept before connect"), "{said}");
}

#[test]
fn output_is_noticed() {
    notices("PRINT", "contexts", "wrote to standard output: hello");
}

#[test]
fn a_write_after_close_is_noticed() {
    notices("LATE", "close", "");
}

#[test]
fn an_unknown_speed_is_noticed() {
    notices("SPEED", "layout", "the speed is -1");
}

#[test]
fn a_flag_before_its_data_is_noticed() {
    notices("FLAG", "flags", "the flag came first");
}

#[test]
fn a_silent_death_is_noticed() {
    notices("SILENT", "killed", "no error within 3s");
}

#[test]
fn the_bench_times_every_collective() {
    let folder = tempfile::tempdir().expect("a folder");
    let Some(library) = plugin(&folder, "NONE") else { return };
    let output = Command::new(env!("CARGO_BIN_EXE_uccl-nccl-check"))
        .arg(&library)
        .args(["--bench", "--json", "--batch-ms", "1"])
        .output()
        .expect("the bench runs");
    let rows: Vec<Value> = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {output:?}"));
    assert_eq!(rows.len(), 11);
    assert!(rows.iter().all(|row| row["us"].as_f64().is_some_and(|us| us > 0.0)), "{rows:?}");
    // The device has 100 Gbit/s, and there is no tuner.
    let of = |bytes: u64| rows.iter().find(|row| row["bytes"] == bytes).expect("a row");
    assert_eq!((&of(1 << 18)["protocol"], &of(1 << 18)["channels"]), (&"LL".into(), &2.into()));
    assert_eq!(of(1 << 20)["protocol"], "Simple");
}
