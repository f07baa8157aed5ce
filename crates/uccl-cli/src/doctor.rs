//! `uccl doctor`: what this machine lacks, what that costs, and what to do about it.

mod gpus;

use std::{fmt::Write, net::TcpListener, process::ExitCode};

use anyhow::Result;
use clap::Args;
use rustix::process::{Resource, getrlimit};
use serde::Serialize;
use uccl_device::Topology;
use uccl_p2p::{Config, Transport};

use crate::{
    gpus::Gpus,
    libraries,
    paths::{Probes, fastest},
    probe::{self, Cubic},
};

/// Say what slows transfers down on this machine, and what to do about it.
///
/// The exit status is 0 unless something keeps transfers from working at all.
#[derive(Args)]
pub(crate) struct DoctorArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// How bad it is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
enum Level {
    /// As it should be.
    Fine,
    /// Something that is not there and perhaps not wanted.
    Note,
    /// Works, but costs speed.
    Slow,
    /// Does not work.
    Broken,
}

/// What was looked at, and what was seen.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
struct Finding {
    about: &'static str,
    level: Level,
    seen: String,
    /// What it costs; empty if nothing.
    cost: String,
    /// What to do; empty if nothing.
    remedy: String,
}

impl Finding {
    fn fine(about: &'static str, seen: impl Into<String>) -> Self {
        Self {
            about,
            level: Level::Fine,
            seen: seen.into(),
            cost: String::new(),
            remedy: String::new(),
        }
    }

    fn new(about: &'static str, level: Level, seen: impl Into<String>) -> Self {
        Self { level, ..Self::fine(about, seen) }
    }

    fn cost(mut self, cost: impl Into<String>) -> Self {
        self.cost = cost.into();
        self
    }

    fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = remedy.into();
        self
    }
}

/// All that the checks look at.
struct Facts {
    topology: Topology,
    probes: Probes,
    loopback: Result<Cubic, String>,
    any_interface: Result<(), String>,
    /// Open files and locked bytes that this process may have; none for no limit.
    open_files: Option<u64>,
    locked_bytes: Option<u64>,
    libraries: Vec<(&'static str, bool)>,
    gpus: Gpus,
    settings: Result<Config, String>,
}

const VERBS: &str = "libibverbs.so.1";
const FABRIC: &str = "libfabric.so.1";

impl Facts {
    fn gather() -> Result<Self> {
        let found = |name| (name, libraries::find(name).is_some());
        Ok(Self {
            topology: Topology::of_this_machine()?,
            probes: Probes::run(),
            loopback: probe::loopback().map_err(|error| error.to_string()),
            any_interface: TcpListener::bind("0.0.0.0:0").map(|_| ()).map_err(|e| e.to_string()),
            open_files: getrlimit(Resource::Nofile).current,
            locked_bytes: getrlimit(Resource::Memlock).current,
            libraries: [VERBS, FABRIC].map(found).to_vec(),
            gpus: Gpus::look(),
            settings: Config::from_env().map_err(|error| error.to_string()),
        })
    }

    fn has(&self, library: &str) -> bool {
        self.libraries.iter().any(|(name, found)| *name == library && *found)
    }
}

pub(crate) fn run(args: &DoctorArgs) -> Result<ExitCode> {
    let findings = examine(&Facts::gather()?);
    match args.json {
        true => println!("{}", serde_json::to_string_pretty(&findings)?),
        false => print!("{}", text(&findings)),
    }
    let broken = findings.iter().any(|finding| finding.level == Level::Broken);
    Ok(if broken { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn text(findings: &[Finding]) -> String {
    let mut out = String::new();
    for Finding { about, level, seen, cost, remedy } in findings {
        let mark = match level {
            Level::Fine => "ok    ",
            Level::Note => "note  ",
            Level::Slow => "slow  ",
            Level::Broken => "BROKEN",
        };
        let _ = writeln!(out, "{mark}  {about}: {seen}");
        for (what, line) in [("cost", cost), ("remedy", remedy)] {
            if !line.is_empty() {
                let _ = writeln!(out, "        {what}: {line}");
            }
        }
    }
    let count = |level| findings.iter().filter(|finding| finding.level == level).count();
    let (broken, slow) = (count(Level::Broken), count(Level::Slow));
    let _ = match (broken, slow) {
        (0, 0) => writeln!(out, "\nnothing holds this machine back"),
        _ => writeln!(out, "\n{broken} broken, {slow} slow"),
    };
    out
}

fn examine(facts: &Facts) -> Vec<Finding> {
    let mut findings = vec![
        settings(facts),
        sockets(facts),
        process_memory(facts),
        shared_memory(facts),
        congestion(facts),
        socket_buffers(facts),
        network(facts),
        cpus(facts),
        numa(facts),
        huge_pages(facts),
        open_files(facts),
        locked_memory(facts),
    ];
    findings.extend(rdma(facts));
    findings.extend(gpus::examine(&facts.topology, &facts.gpus));
    findings
}

fn settings(facts: &Facts) -> Finding {
    const ABOUT: &str = "settings";
    match &facts.settings {
        Err(error) => Finding::new(ABOUT, Level::Broken, error)
            .cost("no endpoint can start")
            .remedy("correct the environment variable, or unset it"),
        Ok(config) if !config.cma => {
            Finding::new(ABOUT, Level::Slow, "UCCL_P2P_DISABLE_CMA is set")
                .cost(SHARED_RING)
                .remedy("unset it")
        }
        Ok(config) if config.transport == Transport::Tcp => {
            Finding::new(ABOUT, Level::Slow, "UCCL_P2P_TRANSPORT=tcp")
                .cost("same-host transfers go over TCP")
                .remedy("unset it, or set it to auto")
        }
        Ok(_) => Finding::fine(ABOUT, "the environment is understood"),
    }
}

/// What it costs when the kernel's copies are out of the question.
const SHARED_RING: &str = "same-host transfers go through a shared ring: two copies for one";

fn sockets(facts: &Facts) -> Finding {
    match (&facts.loopback, &facts.any_interface) {
        (Ok(_), Ok(())) => Finding::fine("sockets", "TCP works on loopback"),
        (Err(error), _) => {
            Finding::new("sockets", Level::Broken, format!("no TCP on loopback: {error}"))
                .cost("processes of this host cannot connect")
                .remedy("bring loopback up: ip link set lo up")
        }
        (_, Err(error)) => {
            Finding::new("sockets", Level::Broken, format!("cannot listen: {error}"))
                .cost("no endpoint can start unless UCCL_P2P_BIND names an address that works")
                .remedy("let this process listen on TCP ports")
        }
    }
}

fn process_memory(facts: &Facts) -> Finding {
    const ABOUT: &str = "copies between processes";
    let Some(refused) = facts.probes.memory_refused() else {
        return Finding::fine(ABOUT, "process_vm_readv and process_vm_writev work");
    };
    let finding =
        Finding::new(ABOUT, Level::Slow, format!("process_vm_readv is refused: {refused}"))
            .cost(SHARED_RING);
    let scope = facts.topology.kernel.ptrace_scope;
    finding.remedy(match scope {
        Some(scope @ 1..) => format!(
            "kernel.yama.ptrace_scope is {scope}: sysctl -w kernel.yama.ptrace_scope=0, \
             or give the program CAP_SYS_PTRACE, or use memory from alloc, which needs neither"
        ),
        _ => "in a container, allow the process_vm_* calls in its seccomp profile (docker: \
              --cap-add SYS_PTRACE) and share the PID namespace; or use memory from alloc"
            .to_owned(),
    })
}

fn shared_memory(facts: &Facts) -> Finding {
    const ABOUT: &str = "shared memory";
    match (&facts.probes.shared_memory, facts.topology.kernel.shm) {
        (Err(error), _) => Finding::new(ABOUT, Level::Slow, format!("no memfd: {error}"))
            .cost("same-host transfers go over TCP; alloc does not work")
            .remedy("allow memfd_create in the container's seccomp profile"),
        (Ok(()), Some(shm)) => {
            let mib = shm.size_bytes >> 20;
            // memfds are not counted against it; other libraries in the process may use it.
            Finding::fine(
                ABOUT,
                format!("memfd works; /dev/shm has {mib} MiB, which is not needed"),
            )
        }
        (Ok(()), None) => Finding::fine(ABOUT, "memfd works; no /dev/shm, which is not needed"),
    }
}

fn congestion(facts: &Facts) -> Finding {
    const ABOUT: &str = "TCP congestion control";
    const COST: &str = "TCP on loopback runs at half the rate of cubic's or less";
    let congestion = &facts.topology.kernel.congestion;
    let default = congestion.default.as_deref().unwrap_or("unknown");
    match (default, &facts.loopback) {
        ("cubic", _) => Finding::fine(ABOUT, "cubic"),
        (_, Ok(Cubic::Works)) => Finding::fine(
            ABOUT,
            format!("{default}; connections on loopback choose cubic for themselves"),
        ),
        (_, Ok(Cubic::Forbidden)) => {
            let allowed = congestion.allowed.join(" ");
            Finding::new(
                ABOUT,
                Level::Slow,
                format!("{default}, and this process may not choose cubic"),
            )
            .cost(COST)
            .remedy(format!(
                "sysctl -w net.ipv4.tcp_allowed_congestion_control=\"{allowed} cubic\", \
                     or give the program CAP_NET_ADMIN"
            ))
        }
        _ => Finding::new(ABOUT, Level::Slow, format!("{default}, and the kernel has no cubic"))
            .cost(COST)
            .remedy("modprobe tcp_cubic"),
    }
}

/// A window for 64 Gbit/s at half a millisecond; kernels come with this much or more.
const GOOD_BUFFER: u64 = 4 << 20;

fn socket_buffers(facts: &Facts) -> Finding {
    const ABOUT: &str = "TCP buffers";
    let kernel = &facts.topology.kernel;
    let limits = [
        ("net.ipv4.tcp_rmem", kernel.tcp_rmem_max_bytes, "4096 131072 67108864"),
        ("net.ipv4.tcp_wmem", kernel.tcp_wmem_max_bytes, "4096 16384 67108864"),
    ];
    let small: Vec<_> = limits
        .into_iter()
        .filter_map(|(name, most, good)| {
            Some((name, most.filter(|most| *most < GOOD_BUFFER)?, good))
        })
        .collect();
    if small.is_empty() {
        return Finding::fine(ABOUT, "grow far enough, or the kernel does not say");
    }
    let seen = small.iter().map(|(name, most, _)| format!("{name} ends at {} KiB", most >> 10));
    let remedy = small.iter().map(|(name, _, good)| format!("sysctl -w {name}=\"{good}\""));
    Finding::new(ABOUT, Level::Slow, seen.collect::<Vec<_>>().join(", "))
        .cost("one stream cannot fill a fast link over a long way (rate = buffer / round trip)")
        .remedy(remedy.collect::<Vec<_>>().join(" && "))
}

fn network(facts: &Facts) -> Finding {
    const ABOUT: &str = "network";
    let Some(interface) = fastest(&facts.topology) else {
        return Finding::new(ABOUT, Level::Note, "no interface but loopback is up")
            .cost("other hosts cannot be reached")
            .remedy("ip link set <interface> up, and give it an address");
    };
    let name = &interface.name;
    let mtu = interface.mtu_bytes.unwrap_or_default();
    match (mtu, interface.speed_mbps) {
        (1..=1500, Some(10_000..)) => {
            Finding::new(ABOUT, Level::Slow, format!("{name} has mtu {mtu}"))
                .cost("six times the packets, and CPU, of jumbo frames")
                .remedy(format!(
                    "if the switches allow it: ip link set {name} mtu 9000, on every host"
                ))
        }
        _ => Finding::fine(ABOUT, format!("{name}, mtu {mtu}")),
    }
}

fn cpus(facts: &Facts) -> Finding {
    let cpus = std::thread::available_parallelism().map_or(1, |n| n.get());
    let all = facts.topology.cpus.online.len();
    match cpus {
        1 => Finding::new("CPUs", Level::Slow, format!("this process may use 1 of {all}"))
            .cost("two sides that wait for each other take turns: tens of microseconds each")
            .remedy("allow it two or more (taskset, cgroup cpuset, container --cpus)"),
        _ => Finding::fine("CPUs", format!("this process may use {cpus} of {all}")),
    }
}

fn numa(facts: &Facts) -> Finding {
    let nodes = facts.topology.numa_nodes.len();
    let sockets = facts.topology.cpus.sockets.unwrap_or(1);
    match nodes {
        0 if sockets > 1 => {
            Finding::new("NUMA", Level::Slow, "the kernel names no nodes, but there are sockets")
                .cost("buffers and threads may lie on the far socket")
                .remedy("mount /sys in the container, or boot without numa=off")
        }
        0 => Finding::fine("NUMA", "the kernel names no nodes; one socket"),
        _ => Finding::fine("NUMA", format!("{nodes} node(s)")),
    }
}

fn huge_pages(facts: &Facts) -> Finding {
    match facts.topology.kernel.huge_pages.as_deref() {
        Some("never") => Finding::new("huge pages", Level::Note, "transparent huge pages are off")
            .cost("more page faults while large buffers are first touched")
            .remedy("echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"),
        Some(setting) => Finding::fine("huge pages", format!("transparent: {setting}")),
        None => Finding::fine("huge pages", "unknown"),
    }
}

/// Fewer open files are used up by a handful of connections.
const FEW_FILES: u64 = 1024;
/// With fewer, not even one endpoint gets its sockets.
const TOO_FEW_FILES: u64 = 32;

fn open_files(facts: &Facts) -> Finding {
    const ABOUT: &str = "open files";
    match facts.open_files {
        Some(limit) if limit < FEW_FILES => {
            let level = if limit < TOO_FEW_FILES { Level::Broken } else { Level::Slow };
            Finding::new(ABOUT, level, format!("at most {limit}"))
                .cost("each connection takes several; connecting fails once they are used up")
                .remedy("ulimit -n 65536, or LimitNOFILE= in the service")
        }
        Some(limit) => Finding::fine(ABOUT, format!("at most {limit}")),
        None => Finding::fine(ABOUT, "no limit"),
    }
}

/// RDMA and CUDA lock the buffers they register.
const LITTLE_LOCKED: u64 = 1 << 30;

fn locked_memory(facts: &Facts) -> Finding {
    const ABOUT: &str = "locked memory";
    let devices = !facts.topology.rdma.is_empty();
    match facts.locked_bytes {
        Some(limit) if limit < LITTLE_LOCKED && devices => {
            Finding::new(ABOUT, Level::Slow, format!("at most {} KiB", limit >> 10))
                .cost("RDMA cannot register large buffers")
                .remedy("ulimit -l unlimited, or LimitMEMLOCK=infinity in the service")
        }
        Some(limit) => {
            Finding::fine(ABOUT, format!("at most {} KiB; no device needs more", limit >> 10))
        }
        None => Finding::fine(ABOUT, "no limit"),
    }
}

fn rdma(facts: &Facts) -> Vec<Finding> {
    let devices = &facts.topology.rdma;
    let names: Vec<_> = devices.iter().map(|device| device.name.as_str()).collect();
    let device = match devices.iter().filter(|device| device.is_active()).count() {
        0 if devices.is_empty() => {
            Finding::new("RDMA", Level::Note, "no device").cost("other hosts are reached over TCP")
        }
        0 => {
            Finding::new("RDMA", Level::Slow, format!("no port of {} is active", names.join(", ")))
                .cost("other hosts are reached over TCP")
                .remedy("see rdma link, and cables or subnet manager")
        }
        _ => Finding::fine("RDMA", names.join(", ")),
    };
    let library =
        |about, name: &'static str, package: &str| match (facts.has(name), devices.is_empty()) {
            (true, _) => Finding::fine(about, format!("{name} is there")),
            (false, true) => {
                Finding::new(about, Level::Note, format!("{name} is not there; no device needs it"))
            }
            (false, false) => Finding::new(about, Level::Slow, format!("{name} is not there"))
                .cost("the RDMA devices cannot be used")
                .remedy(format!("install {package}")),
        };
    vec![
        device,
        library("verbs", VERBS, "libibverbs1 and ibverbs-providers (rdma-core)"),
        library("libfabric", FABRIC, "libfabric1, for CXI and EFA (verbs devices do without)"),
    ]
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use tempfile::TempDir;

    use super::*;
    use crate::probe::Reached;

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
            probes: Probes { process_memory: Ok(Reached::default()), shared_memory: Ok(()) },
            loopback: Ok(Cubic::Works),
            any_interface: Ok(()),
            open_files: None,
            locked_bytes: None,
            libraries: vec![(VERBS, false), (FABRIC, false)],
            gpus: Gpus::elsewhere(),
            settings: Ok(Config::default()),
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
    fn what_slows_down_has_a_cost_and_a_remedy() {
        let mut facts = facts(&[
            ("proc/sys/kernel/yama/ptrace_scope", "1"),
            ("proc/sys/net/ipv4/tcp_congestion_control", "bbr"),
            ("proc/sys/net/ipv4/tcp_allowed_congestion_control", "reno bbr"),
            ("proc/sys/net/ipv4/tcp_rmem", "4096 131072 212992"),
            ("sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN"),
        ]);
        facts.probes.process_memory =
            Ok(Reached { read: Some("EPERM".into()), write: Some("EPERM".into()), own: None });
        facts.loopback = Ok(Cubic::Forbidden);
        facts.open_files = Some(256);
        facts.locked_bytes = Some(8 << 20);
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
}
