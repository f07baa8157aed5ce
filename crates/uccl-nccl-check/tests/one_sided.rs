//! The check over a one-sided plugin in C, as it should be and with one fault each.

mod common;

use std::process::Command;

use common::{Limits, check, compiled};
use serde_json::Value;

const SOURCE: &str = "rma_plugin.c";
const SILENCE_S: u32 = 10;

fn notices(fault: &str, name: &str, words: &str) {
    common::notices(SOURCE, fault, (name, SILENCE_S), words);
}

#[test]
fn a_one_sided_plugin_in_c_passes() {
    let folder = tempfile::tempdir().expect("a folder");
    let Some(library) = compiled(&folder, SOURCE, "NONE") else { return };
    let only = "rma-layout,rma-ends,rma-join,rma-put,rma-signal,rma-get,rma-strong,rma-order,\
                rma-regions,rma-close,rma-close-dead,rma-close-stopped,rma-streams,rma-killed";
    let (passed, rows) = check(&library, only, Limits::FAR);
    assert!(passed, "{rows:#?}");
    let has_passed = |row: &&Value| row["outcome"]["passed"].is_string();
    assert_eq!(rows.iter().filter(has_passed).count(), 14, "{rows:#?}");
}

#[test]
fn a_device_of_another_type_is_noticed() {
    notices("TYPE", "rma-layout", "the device's type is 0");
}

#[test]
fn a_thread_that_is_left_is_noticed() {
    notices("LEAK", "rma-ends", "threads of the plugin are left");
}

#[test]
fn a_connect_without_end_is_noticed() {
    let folder = tempfile::tempdir().expect("a folder");
    let Some(library) = compiled(&folder, SOURCE, "HANG") else { return };
    let output = Command::new(env!("CARGO_BIN_EXE_uccl-nccl-check"))
        .arg(&library)
        .args(["--limit-s", "8", "--only", "rma-join"])
        .output()
        .expect("the check runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("no end within 8s"), "{said}");
}

#[test]
fn a_wrong_byte_of_a_put_is_noticed() {
    notices("BYTE", "rma-put", "byte Some(5000) is wrong");
}

#[test]
fn a_signal_before_its_put_is_noticed() {
    notices("EARLY", "rma-put", "the signal is there, and byte");
}

#[test]
fn a_call_that_takes_long_is_noticed() {
    notices("BLOCK", "rma-put", "it must not block");
}

#[test]
fn a_signal_that_comes_twice_is_noticed() {
    notices("TWICE", "rma-signal", "should be");
}

#[test]
fn a_wrong_byte_of_a_get_is_noticed() {
    notices("GET", "rma-get", "is wrong");
}

#[test]
fn a_signal_before_earlier_puts_is_noticed() {
    notices("LOOSE", "rma-order", "its signal is there, and byte");
}

#[test]
fn a_weak_signal_is_noticed() {
    notices("LOOSE", "rma-strong", "the signal is there, and byte");
}

#[test]
fn a_signal_that_comes_twice_without_a_stream_is_noticed() {
    notices("TWICE", "rma-streams", "signals of 300 puts");
}

#[test]
fn a_missing_request_is_noticed() {
    notices("NULL", "rma-order", "gives no request");
}

#[test]
fn a_registration_that_ends_others_is_noticed() {
    notices("REGION", "rma-regions", "a region is not there");
}

#[test]
fn a_write_after_the_groups_end_is_noticed() {
    notices("LATE", "rma-close", "signal 11");
}

#[test]
fn a_close_that_waits_for_a_rank_is_noticed() {
    notices("SLOW", "rma-close-dead", "close took");
    notices("SLOW", "rma-close-stopped", "close took");
}

#[test]
fn a_ranks_silent_death_is_noticed() {
    notices("SILENT", "rma-killed", "no error within 10s");
}

#[test]
fn a_signal_that_comes_twice_over_a_link_is_noticed() {
    let folder = tempfile::tempdir().expect("a folder");
    let Some(library) = compiled(&folder, SOURCE, "TWICE") else { return };
    let (passed, rows) = check(&library, "rma-cut", Limits::FAR);
    if let Some(lacking) = rows[0]["outcome"]["skipped"].as_str() {
        eprintln!("skipped: {lacking}");
        return;
    }
    assert!(!passed, "{rows:?}");
}
