//! `uccl bench` with memory of GPUs and pinned memory. Without a GPU it names the missing part.

use std::process::{Command, Output};

use serde_json::Value;
use uccl_device::cuda::Gpus;

fn bench(arguments: &str) -> Output {
    let words = "bench --duration 4ms --json -".split(' ').chain(arguments.split(' '));
    Command::new(env!("CARGO_BIN_EXE_uccl")).args(words).output().expect("uccl runs")
}

/// The rows of a run, or nothing without a GPU: then the run must have named the missing part.
fn rows(arguments: &str) -> Option<Vec<Value>> {
    let output = bench(arguments);
    let said = String::from_utf8_lossy(&output.stderr);
    if let Some(reason) = Gpus::get().why_none() {
        eprintln!("skipped: lacks a GPU ({reason})");
        assert!(!output.status.success());
        assert!(said.contains("need an NVIDIA GPU") && said.contains(reason), "{said}");
        assert!(!said.contains("panicked"), "{said}");
        return None;
    }
    assert!(output.status.success(), "{output:?}");
    let mut report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    Some(serde_json::from_value(report["rows"].take()).expect("rows"))
}

#[test]
fn gpu_memory_arrives_byte_by_byte() {
    for arguments in [
        "--device gpu --op write,read,send --size 1,4K,1M --transport local",
        "--device gpu --op write,read --size 4K --iovs 300 --inflight 1 --transport local",
        "--device gpu --peer-device pinned --op write,read --size 64K --transport local",
        "--device cpu --peer-device gpu --memory heap,alloc --op write --size 64K --transport local",
        "--device gpu --direction bi --op write --size 64K --transport local",
        "--device gpu --processes 1 --op write,read --size 64K --transport local,tcp",
        "--device pinned --op write,read --size 64K",
        "--device gpu --stream --size 1,4K,1M --transport local",
        "--device gpu --stream --op write,read --size 64K --iovs 30 --inflight 1 --transport tcp",
        "--device gpu --stream --op write,read --size 64K --direction bi --buffers 1",
    ] {
        let Some(rows) = rows(arguments) else { return };
        assert!(!rows.is_empty(), "{arguments}");
        for row in rows {
            assert_eq!(row["verified"], "yes", "{arguments}: {row}");
        }
    }
}

#[test]
fn a_gpu_that_is_not_there_is_told() {
    let output = bench("--peer-device gpu --peer-gpu 4000 --op write --size 64");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("GPU"), "{said}");
    assert!(!said.contains("panicked"), "{said}");
}

#[test]
fn the_drivers_own_copies_are_measured() {
    let arguments = "--limits --device gpu --peer-device pinned --peer-gpu 0 --size 4K,1M";
    let Some(rows) = rows(arguments) else { return };
    assert_eq!(rows.len(), 8);
    for row in rows {
        assert!(row["gb_per_s"].as_f64().is_some_and(|rate| rate > 0.0), "{row}");
        assert_eq!((&row["memory"], &row["peer_memory"]), (&"gpu:0".into(), &"pinned:0".into()));
    }
}
