//! The check over this project's plugin.

use std::{path::PathBuf, process::Command};

use serde_json::Value;

/// The plugin, which cargo builds beside this test.
fn plugin() -> PathBuf {
    // The crate is named so that cargo does.
    let _table = &nccl_net_uccl::tables::ncclNetPlugin_v12;
    let test = std::env::current_exe().expect("this program");
    test.with_file_name("libnccl_net_uccl.so")
}

fn passes(arguments: &[&str]) -> Value {
    passes_over("auto", arguments)
}

/// The rows of a check that passes, over a transport of the engine's.
fn passes_over(transport: &str, arguments: &[&str]) -> Value {
    passes_with(("UCCL_P2P_TRANSPORT", transport), arguments)
}

/// The rows of a check that passes, with a variable.
fn passes_with((name, value): (&str, &str), arguments: &[&str]) -> Value {
    let output = Command::new(env!("CARGO_BIN_EXE_uccl-nccl-check"))
        .arg(plugin())
        .args(["--json", "--silence-s", "40"])
        // Longer than a busy machine keeps a process from its turn, and less than the plugin's own
        // limit.
        .args(["--call-limit-ms", "5000"])
        .args(arguments)
        .env("NCCL_SOCKET_IFNAME", "lo")
        // A link that was cut for a moment comes back within this, and a lost peer is seen after
        // it.
        .env("UCCL_NCCL_TIMEOUT_SECS", "8")
        .env("UCCL_NCCL_TUNER", "1")
        .env("UCCL_NCCL_RMA", "1")
        // Over several streams nothing is in order by itself.
        .env("UCCL_P2P_TCP_STREAMS", "4")
        .env(name, value)
        .env_remove("UCCL_SOCKET_IFNAME")
        .output()
        .expect("the check runs");
    let report: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {output:?}"));
    let failed: Vec<_> = report["rows"]
        .as_array()
        .expect("rows")
        .iter()
        .filter(|row| row["outcome"]["failed"].is_string())
        .collect();
    assert!(output.status.success() && failed.is_empty(), "{failed:#?}");
    assert_eq!(report["net_versions"], serde_json::json!([8, 9, 10, 11, 12]));
    assert_eq!(report["rma_versions"], serde_json::json!([13, 14, 15, 16]));
    report["rows"].clone()
}

/// Checks with peers that fail, which wait for the plugin's limit.
const FAULTS: &str = "close,close-dead,close-stopped,killed,paused,stopped,cut,cut-for-long";

#[test]
fn the_newest_table_keeps_every_rule() {
    passes(&["--versions", "12", "--except", FAULTS]);
}

#[test]
fn the_newest_table_tells_of_peers_that_fail() {
    passes(&["--versions", "12", "--only", FAULTS]);
}

#[test]
fn older_tables_are_the_same_network() {
    let only = "layout,connect,sizes,too-long,ring,bootstrap,close";
    passes(&["--versions", "8,9,10,11", "--only", only]);
}

#[test]
fn rings_of_one_host_keep_every_rule() {
    let only = "connect,sizes,too-long,order,backpressure,preset,flags,threads,ring,bootstrap,leaks,\
                close,close-dead,close-stopped,killed,stopped";
    passes_with(("UCCL_NCCL_LOCAL", "1"), &["--versions", "12", "--only", only]);
}

/// One-sided checks with peers that fail, which wait for the plugin's limit.
const RMA_FAULTS: &str = "rma-join,rma-close,rma-close-dead,rma-close-stopped,rma-killed";

#[test]
fn one_sided_tables_keep_every_rule() {
    let except = format!("{RMA_FAULTS},rma-cut,rma-streams");
    for transport in ["tcp", "local"] {
        let rows = passes_over(transport, &["--versions", "16", "--except", &except]);
        let rows = rows.as_array().expect("rows");
        let is_rma = |row: &&Value| row["check"].as_str().is_some_and(|it| it.starts_with("rma-"));
        let skipped: Vec<_> =
            rows.iter().filter(is_rma).filter(|row| row["outcome"]["passed"].is_null()).collect();
        assert!(skipped.is_empty(), "{transport}: {skipped:#?}");
        assert!(rows.iter().filter(is_rma).count() >= 7, "{rows:#?}");
    }
}

#[test]
fn one_sided_tables_tell_of_peers_that_fail() {
    for transport in ["tcp", "local"] {
        passes_over(transport, &["--versions", "16", "--only", RMA_FAULTS]);
    }
    passes_over("tcp", &["--versions", "16", "--only", "layout,rma-cut,rma-streams"]);
}

#[test]
fn older_one_sided_tables_are_the_same() {
    let only = "rma-layout,rma-put,rma-signal,rma-get,rma-order";
    passes(&["--versions", "13,14,15", "--only", only]);
}

#[test]
fn one_sided_tables_are_off_unless_they_are_asked_for() {
    let output = Command::new(env!("CARGO_BIN_EXE_uccl-nccl-check"))
        .arg(plugin())
        .args(["--json", "--versions", "14", "--only", "layout,rma-layout"])
        .env("NCCL_SOCKET_IFNAME", "lo")
        .env_remove("UCCL_NCCL_RMA")
        .output()
        .expect("the check runs");
    let report: Value = serde_json::from_slice(&output.stdout).expect("a report");
    let rows = report["rows"].as_array().expect("rows");
    let row = rows.iter().find(|row| row["check"] == "rma-layout").expect("a row");
    let reason = row["outcome"]["skipped"].as_str().unwrap_or_default();
    assert!(output.status.success(), "{output:?}");
    assert!(reason.contains("NCCL passes the one-sided tables over"), "{report}");
}

#[test]
fn a_device_can_be_each_interface() {
    let output = Command::new(env!("CARGO_BIN_EXE_uccl-nccl-check"))
        .arg(plugin())
        .args(["--json", "--only", "layout"])
        .env("UCCL_NCCL_DEVICES", "each")
        .env("UCCL_NCCL_SPEED_MBPS", "25000")
        .output()
        .expect("the check runs");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("(25000 Mbit/s)"), "{output:?}");
}

fn asked(program: &str, argument: &str) -> Option<String> {
    match Command::new(program).arg(argument).arg(plugin()).output() {
        Ok(output) if output.status.success() => {
            Some(String::from_utf8_lossy(&output.stdout).into_owned())
        }
        _ => {
            eprintln!("skipped: lacks {program}: the library's symbols");
            None
        }
    }
}

#[test]
fn the_library_exports_tables_alone_and_needs_the_c_library_alone() {
    let Some(dynamic) = asked("readelf", "-dW") else { return };
    for line in dynamic.lines().filter(|line| line.contains("(NEEDED)")) {
        let is_of_c = ["libc.so", "libm.so", "libgcc_s.so", "ld-linux", "libpthread", "libdl"];
        assert!(is_of_c.iter().any(|name| line.contains(name)), "{line}");
    }
    assert!(dynamic.contains("soname: [libnccl-net-uccl.so]"), "{dynamic}");
    assert!(dynamic.contains("NODELETE"), "NCCL would unload it: {dynamic}");
    let Some(symbols) = asked("nm", "-D") else { return };
    let defined = symbols.lines().filter(|line| !line.contains(" U ") && !line.contains(" w "));
    let names: Vec<_> = defined.filter_map(|line| line.split_whitespace().last()).collect();
    assert!(names.len() >= 5, "{names:?}");
    let kinds = ["ncclNetPlugin_v", "ncclTunerPlugin_v", "ncclRmaPlugin_v", "ncclGinPlugin_v13"];
    let is_table = |name: &&str| kinds.iter().any(|kind| name.starts_with(kind));
    assert!(names.iter().all(is_table), "{names:?}");
}
