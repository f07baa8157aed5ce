//! The command as its users run it.

use std::{
    fs,
    process::{Command, Output},
};

use serde_json::Value;
use tempfile::TempDir;

fn uccl(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_uccl")).args(arguments).output().expect("uccl runs")
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

#[test]
fn limits_measure_every_ceiling_of_this_machine() {
    let output =
        uccl(&["bench", "--limits", "--size", "4K,64K", "--duration", "5ms", "--json", "-"]);
    assert!(output.status.success(), "{output:?}");
    let report = json(&output);
    let rows = report["rows"].as_array().expect("rows");
    for op in ["memcpy", "tcp-stream", "tcp-rtt", "vm-read", "vm-write", "shm-rtt", "thread-hop"] {
        let row = rows.iter().find(|row| row["op"] == op).expect(op);
        assert_eq!(row["path"], "raw");
        let number = if op.ends_with("rtt") || op == "thread-hop" {
            &row["latency_us"]["p50"]
        } else {
            &row["gb_per_s"]
        };
        // A container may refuse; then the row says so.
        assert!(number.as_f64().is_some_and(|n| n > 0.0) || row["note"].is_string(), "{row}");
    }
    // Standard output was taken, so that the table went elsewhere.
    assert!(String::from_utf8_lossy(&output.stderr).contains("thread-hop"));
}

#[test]
fn files_are_written_beside_the_table() {
    let folder = TempDir::new().expect("a temporary folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let (csv, svg) = (path("a.csv"), path("a.svg"));
    let output = uccl(&[
        "bench",
        "--limits",
        "--size",
        "4K",
        "--duration",
        "2ms",
        "--csv",
        &csv,
        "--plot",
        &svg,
    ]);
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("memcpy"));
    assert!(fs::read_to_string(csv).expect("a CSV file").contains("memcpy,raw,"));
    assert!(fs::read_to_string(svg).expect("an SVG file").contains("raw memcpy"));
}

#[test]
fn mistakes_are_told_with_what_to_do() {
    for (arguments, word) in [
        (&["bench", "--size", "4X"][..], "4K"),
        (&["bench", "--json", "-", "--csv", "-"], "file"),
        (&["bench", "--connect", "127.0.0.1:1"], "--listen"),
        (
            &["bench", "--limits", "--size", "4K", "--json", "/no/such/folder/a"],
            "/no/such/folder/a",
        ),
    ] {
        let output = uccl(arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(word), "{arguments:?}: {said}");
    }
}

#[test]
fn topo_shows_this_machine() {
    let output = uccl(&["topo"]);
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("CPUs") && text.contains("same host"), "{text}");
    let report = json(&uccl(&["topo", "--json"]));
    let path = report["paths"]["same_host"]["name"].as_str();
    assert!(path.is_some_and(|name| ["cma", "shm", "tcp"].contains(&name)), "{report}");
    assert!(report["topology"]["kernel"]["release"].is_string());
}

#[test]
fn doctor_finds_this_machine_working() {
    let output = uccl(&["doctor", "--json"]);
    let findings = json(&output);
    let broken = findings.as_array().expect("findings").iter().any(|f| f["level"] == "broken");
    assert_eq!(output.status.success(), !broken, "{findings}");
    let text = uccl(&["doctor"]);
    assert!(String::from_utf8_lossy(&text.stdout).contains("copies between processes"));
}
