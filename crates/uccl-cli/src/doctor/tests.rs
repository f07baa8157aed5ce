//! The checks on machines of files.

use std::{fs, path::Path};

use tempfile::TempDir;

use super::*;
use crate::probe::ProbeResult;

/// A machine of files, on which everything that can be tried works.
fn facts(files: &[(&str, &str)]) -> Facts {
    let root = TempDir::new().expect("a temporary folder");
    for (path, text) in files {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().unwrap_or(Path::new("/"))).expect("folders");
        fs::write(path, text).expect("a file");
    }
    Facts {
        topology: Topology::read(root.path()).expect("a topology"),
        probes: Probes { process_memory: Ok(ProbeResult::default()), shared_memory: Ok(()) },
        loopback: Ok(Cubic::Works),
        any_interface: Ok(()),
        open_files: None,
        rdma: rdma::Facts::none(),
        gpus: Gpus::elsewhere(),
        settings: Ok(Config::default()),
        frameworks: Vec::new(),
        nccl_selection: None,
        nccl_mbps: None,
    }
}

fn level(facts: &Facts, about: &str) -> Level {
    finding(facts, about).level
}

fn finding(facts: &Facts, about: &str) -> Finding {
    let all = examine(facts);
    all.into_iter().find(|finding| finding.about == about).expect("a finding")
}

#[test]
fn a_plain_box_works() {
    let findings = examine(&facts(&[]));
    let worst = findings.iter().map(|finding| finding.level).max();
    assert_eq!(worst, Some(Level::Note), "{findings:?}");
    assert!(text(&findings).contains("nothing holds this machine back"));
}

#[test]
fn a_finding_that_slows_transfers_has_a_cost_and_a_remedy() {
    let mut facts = facts(&[
        ("proc/sys/kernel/yama/ptrace_scope", "1"),
        ("proc/sys/net/ipv4/tcp_congestion_control", "bbr"),
        ("proc/sys/net/ipv4/tcp_allowed_congestion_control", "reno bbr"),
        ("proc/sys/net/ipv4/tcp_rmem", "4096 131072 212992"),
        ("sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN"),
    ]);
    facts.probes.process_memory =
        Ok(ProbeResult { read: Some("EPERM".into()), write: Some("EPERM".into()), own: None });
    facts.loopback = Ok(Cubic::Forbidden);
    facts.open_files = Some(256);
    facts.rdma.locked_bytes = Some(8 << 20);
    for about in [
        "copies between processes",
        "TCP congestion control",
        "TCP buffers",
        "open files",
        "locked memory",
        "RDMA",
        "verbs",
    ] {
        let finding = finding(&facts, about);
        assert_eq!(finding.level, Level::Slow, "{finding:?}");
        assert!(!finding.cost.is_empty() && !finding.remedy.is_empty(), "{finding:?}");
    }
    assert!(finding(&facts, "copies between processes").remedy.contains("ptrace_scope=0"));
    assert!(finding(&facts, "TCP congestion control").remedy.contains("\"reno bbr cubic\""));
    assert!(text(&examine(&facts)).contains("0 broken, "));
}

#[test]
fn bbr_is_fine_where_cubic_can_be_chosen() {
    let files = [("proc/sys/net/ipv4/tcp_congestion_control", "bbr")];
    let mut facts = facts(&files);
    assert_eq!(level(&facts, "TCP congestion control"), Level::Fine);
    facts.loopback = Ok(Cubic::Missing);
    assert_eq!(level(&facts, "TCP congestion control"), Level::Slow);
}

#[test]
fn a_seccomp_filter_has_its_own_remedy() {
    let mut facts = facts(&[]);
    facts.probes.process_memory = Err("the process that tried ended with signal 31".into());
    assert!(finding(&facts, "copies between processes").remedy.contains("seccomp"));
}

#[test]
fn without_sockets_nothing_works() {
    let mut facts = facts(&[]);
    facts.loopback = Err("Network is unreachable".into());
    assert_eq!(level(&facts, "sockets"), Level::Broken);
    facts.loopback = Ok(Cubic::Works);
    facts.any_interface = Err("Operation not permitted".into());
    assert_eq!(level(&facts, "sockets"), Level::Broken);
    facts.open_files = Some(8);
    assert_eq!(level(&facts, "open files"), Level::Broken);
}

#[test]
fn settings_that_slow_down_or_stop_are_told() {
    let mut facts = facts(&[]);
    let mut set = |settings| {
        facts.settings = settings;
        level(&facts, "settings")
    };
    assert_eq!(set(Ok(Config { cma: false, ..Config::default() })), Level::Slow);
    let tcp = Config { transport: Transport::Tcp, ..Config::default() };
    assert_eq!(set(Ok(tcp)), Level::Slow);
    assert_eq!(set(Err("UCCL_P2P_CHECKSUM=\"maybe\"".into())), Level::Broken);
}

#[test]
fn a_slow_mtu_on_a_fast_link() {
    let nic = |mtu| {
        [
            ("sys/class/net/eth0/operstate", "up"),
            ("sys/class/net/eth0/speed", "100000"),
            ("sys/class/net/eth0/mtu", mtu),
        ]
    };
    assert_eq!(level(&facts(&nic("1500")), "network"), Level::Slow);
    assert_eq!(level(&facts(&nic("9000")), "network"), Level::Fine);
    assert_eq!(level(&facts(&[]), "network"), Level::Note);
}
