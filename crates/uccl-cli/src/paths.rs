//! Which path a transfer would take, from what this machine has and allows.

mod gpu;

use serde::Serialize;
use uccl_device::{Interface, InterfaceKind, Topology};
use uccl_p2p::{Config, Transport};

use crate::{
    gpus::Gpus,
    probe::{self, Reached},
};

pub(crate) use gpu::GpuPaths;

const TRANSPORT: &str = "UCCL_P2P_TRANSPORT";
const DISABLE_CMA: &str = "UCCL_P2P_DISABLE_CMA";

/// A path and why it is the one.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct Path {
    /// As the engine names it: `cma`, `shm`, `tcp`, `cuda_ipc`; none if there is no way.
    pub(crate) name: Option<&'static str>,
    pub(crate) why: String,
}

/// Paths to peers near and far.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct Paths {
    /// To another endpoint of this process.
    pub(crate) same_process: Path,
    /// To a peer on this host.
    pub(crate) same_host: Path,
    /// To memory that a peer on this host got from the engine's alloc.
    pub(crate) same_host_alloc: Path,
    /// To a peer elsewhere.
    pub(crate) other_host: Path,
    /// From a GPU's memory, on a machine that has GPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) gpu: Option<GpuPaths>,
}

/// What was tried out.
pub(crate) struct Probes {
    /// Copies between two processes' memory, or why trying failed.
    pub(crate) process_memory: Result<Reached, String>,
    /// Memory shared through a file descriptor, or why not.
    pub(crate) shared_memory: Result<(), String>,
}

impl Probes {
    pub(crate) fn run() -> Self {
        Self {
            process_memory: probe::process_memory().map_err(|error| format!("{error:#}")),
            shared_memory: probe::shared_memory().map_err(|error| error.to_string()),
        }
    }

    /// Why copies by the kernel within one process's memory are out of the question, if they are.
    fn own_memory_refused(&self) -> Option<String> {
        match &self.process_memory {
            Ok(reached) => reached.own.clone(),
            Err(error) => Some(error.clone()),
        }
    }

    /// Why copies between two processes' memory are out of the question, if they are.
    pub(crate) fn memory_refused(&self) -> Option<String> {
        match &self.process_memory {
            Ok(reached) if reached.works() => None,
            Ok(reached) => reached.read.clone().or_else(|| reached.write.clone()),
            Err(error) => Some(error.clone()),
        }
    }
}

impl Path {
    fn new(name: &'static str, why: impl Into<String>) -> Self {
        Self { name: Some(name), why: why.into() }
    }

    fn none(why: impl Into<String>) -> Self {
        Self { name: None, why: why.into() }
    }
}

impl Paths {
    /// What the settings leave of what the machine allows.
    pub(crate) fn of(topology: &Topology, probes: &Probes, gpus: &Gpus, config: &Config) -> Self {
        let mut best = Self::best(topology, probes, config.cma);
        match config.transport {
            Transport::Local => {
                let why = format!("{TRANSPORT}=local allows this host's memory alone");
                best.other_host = Path::none(why);
            }
            Transport::Tcp => {
                let why = format!("on loopback: {TRANSPORT}=tcp forbids this host's memory");
                let tcp = Path::new("tcp", why);
                best.same_process = tcp.clone();
                best.same_host = tcp.clone();
                best.same_host_alloc = tcp;
            }
            _ => {}
        }
        best.gpu = GpuPaths::of(topology, gpus, &best);
        best
    }

    fn best(topology: &Topology, probes: &Probes, cma: bool) -> Self {
        let forbidden = (!cma).then(|| format!("{DISABLE_CMA} is set"));
        let own = forbidden.clone().or_else(|| probes.own_memory_refused());
        let other = forbidden.or_else(|| probes.memory_refused());
        Self {
            same_process: by_kernel(own.as_ref(), probes),
            same_host: by_kernel(other.as_ref(), probes),
            same_host_alloc: mapped(other.as_ref(), probes),
            other_host: other_host(topology),
            gpu: None,
        }
    }
}

fn mapped(refused: Option<&String>, probes: &Probes) -> Path {
    match &probes.shared_memory {
        Ok(()) => Path {
            name: Some("mapped"),
            why: "one copy in user space into the peer's memory".into(),
        },
        Err(_) => by_kernel(refused, probes),
    }
}

/// The path to memory that is not shared, if copies by the kernel are refused for this reason or none.
fn by_kernel(refused: Option<&String>, probes: &Probes) -> Path {
    match (refused, &probes.shared_memory) {
        (_, Err(error)) => {
            Path { name: Some("tcp"), why: format!("on loopback: no shared memory ({error})") }
        }
        (None, Ok(())) => {
            let why = "one copy by the kernel, process_vm_readv and process_vm_writev";
            Path { name: Some("cma"), why: why.into() }
        }
        (Some(error), Ok(())) => Path {
            name: Some("shm"),
            why: format!("through a shared ring, two copies: no process_vm_readv ({error})"),
        },
    }
}

fn other_host(topology: &Topology) -> Path {
    let Some(interface) = fastest(topology) else {
        let why = "no network interface is up; bring one up to reach other hosts";
        return Path { name: None, why: why.into() };
    };
    let speed = match interface.speed_mbps {
        Some(mbps) => format!(", {}", gbits(mbps)),
        None => String::new(),
    };
    let active = topology.rdma.iter().filter(|device| device.is_active()).count();
    let rdma = match active {
        0 => "no RDMA device".to_owned(),
        _ => format!("{active} active RDMA devices are not used yet"),
    };
    Path { name: Some("tcp"), why: format!("over {}{speed}; {rdma}", interface.name) }
}

/// The interface that leaves the host with the highest known speed.
pub(crate) fn fastest(topology: &Topology) -> Option<&Interface> {
    let outward = |interface: &&Interface| {
        interface.kind != InterfaceKind::Loopback
            && interface.is_up()
            // A fake or foreign tree has no addresses to tell by.
            && interface.operstate.as_deref() == Some("up")
    };
    let interfaces = topology.interfaces.iter().filter(outward);
    interfaces.max_by_key(|i| (i.kind == InterfaceKind::Physical, i.speed_mbps))
}

/// `25 Gbit/s`, `2.5 Gbit/s`, `100 Mbit/s`.
pub(crate) fn gbits(mbps: u32) -> String {
    match mbps {
        1000.. => format!("{} Gbit/s", f64::from(mbps) / 1000.0),
        _ => format!("{mbps} Mbit/s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn probes(memory: Option<&str>, shared: Result<(), String>) -> Probes {
        let read = memory.map(str::to_owned);
        Probes { process_memory: Ok(Reached { read, ..Reached::default() }), shared_memory: shared }
    }

    #[test]
    fn the_best_that_is_allowed_is_taken() {
        let same_host = |probes: &Probes| by_kernel(probes.memory_refused().as_ref(), probes);
        let name = |probes: &Probes| (same_host(probes).name, mapped(None, probes).name);
        assert_eq!(name(&probes(None, Ok(()))), (Some("cma"), Some("mapped")));
        assert_eq!(name(&probes(Some("EPERM"), Ok(()))), (Some("shm"), Some("mapped")));
        let neither = probes(Some("EPERM"), Err("ENOSYS".into()));
        assert_eq!(name(&neither), (Some("tcp"), Some("tcp")));
        let crashed = Probes { process_memory: Err("killed".into()), ..probes(None, Ok(())) };
        assert_eq!(name(&crashed), (Some("shm"), Some("mapped")));
        assert!(same_host(&crashed).why.contains("killed"));
    }

    #[test]
    fn settings_rule_over_what_the_machine_allows() {
        let root = tempfile::TempDir::new().expect("a temporary folder");
        let topology = Topology::read(root.path()).expect("a topology");
        let names = |config: &Config| {
            let paths = Paths::of(&topology, &probes(None, Ok(())), &Gpus::default(), config);
            [paths.same_process, paths.same_host, paths.same_host_alloc].map(|path| path.name)
        };
        assert_eq!(names(&Config::default()), ["cma", "cma", "mapped"].map(Some));
        let without = Config { cma: false, ..Config::default() };
        assert_eq!(names(&without), ["shm", "shm", "mapped"].map(Some));
        let tcp = Config { transport: Transport::Tcp, ..Config::default() };
        assert_eq!(names(&tcp), [Some("tcp"); 3]);
        let local = Config { transport: Transport::Local, ..Config::default() };
        let paths = Paths::of(&topology, &probes(None, Ok(())), &Gpus::default(), &local);
        assert_eq!(paths.gpu, None);
        assert_eq!(paths.other_host.name, None);
        assert!(paths.other_host.why.contains(TRANSPORT));
    }

    #[test]
    fn speeds_are_written_in_the_unit_that_fits() {
        assert_eq!(gbits(400_000), "400 Gbit/s");
        assert_eq!(gbits(2500), "2.5 Gbit/s");
        assert_eq!(gbits(100), "100 Mbit/s");
    }
}
