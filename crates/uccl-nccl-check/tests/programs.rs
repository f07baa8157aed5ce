//! The check over a plugin in C, as it should be and with one fault each.

mod common;

use std::process::Command;

use serde_json::Value;

const SOURCE: &str = "net_plugin.c";
const SILENCE_S: u32 = 3;

fn notices(fault: &str, name: &str, words: &str) {
    common::notices(SOURCE, fault, (name, SILENCE_S), words);
}

#[test]
fn a_plugin_in_c_passes() {
    let folder = tempfile::tempdir().expect("a folder");
    let Some(library) = common::compiled(&folder, SOURCE, "NONE") else { return };
    let only = "layout,contexts,reload,connect,peers,listener,sizes,too-long,order,backpressure,\
                grouped,preset,flags,threads,ring,bootstrap,leaks,close,close-dead,close-stopped,\
                killed,paused";
    let (passed, rows) = common::check(&library, only, common::Limits::FAR);
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
    let Some(library) = common::compiled(&folder, SOURCE, "BLOCK") else { return };
    let output = Command::new(env!("CARGO_BIN_EXE_uccl-nccl-check"))
        .arg(&library)
        .args(["--limit-s", "12", "--only", "connect"])
        .output()
        .expect("the check runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("no end within 12s"), "{said}");
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
    let Some(library) = common::compiled(&folder, SOURCE, "NONE") else { return };
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
