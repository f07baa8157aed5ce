//! The paths of transfers, by the engine's own choice, and the reasons for it in this machine's
//! devices and permissions. The engine of another machine cannot be asked: there the reasons say
//! which path to expect.

mod chosen;
mod gpu;
mod remote;

use serde::Serialize;
use uccl_device::{Interface, InterfaceKind, Topology};
use uccl_p2p::{Config, Transport};

use crate::{
    gpus::Gpus,
    probe::{self, ProbeResult},
    rdma::Rdma,
};

pub(crate) use self::{chosen::PathChoices, gpu::GpuPaths};

const TRANSPORT: &str = "UCCL_P2P_TRANSPORT";
const DISABLE_CMA: &str = "UCCL_P2P_DISABLE_CMA";

/// A path and why it is the one.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct Path {
    /// As the engine names it: `cma`, `shm`, `tcp`, `cuda_ipc`, `verbs`, `libfabric`; none if there
    /// is no way.
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

/// Results of the probes.
pub(crate) struct Probes {
    /// Copies between two processes' memory, or why trying failed.
    pub(crate) process_memory: Result<ProbeResult, String>,
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

/// The input from which the paths are derived.
pub(crate) struct Facts<'a> {
    pub(crate) topology: &'a Topology,
    pub(crate) probes: &'a Probes,
    pub(crate) gpus: &'a Gpus,
    pub(crate) rdma: &'a Rdma,
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
    /// The best paths that both the machine and the settings seem to allow.
    pub(crate) fn of(facts: &Facts<'_>, config: &Config) -> Self {
        let other_host = remote::other_host(facts.topology, facts.rdma, config);
        let mut best = match config.transport {
            Transport::Auto | Transport::Local => {
                Self::in_memory(facts.probes, config.cma, other_host)
            }
            Transport::Tcp => {
                let why = format!("on loopback: {TRANSPORT}=tcp forbids this host's memory");
                Self { other_host, ..Self::everywhere(&Path::new("tcp", why)) }
            }
            Transport::Fifo => {
                let why = format!("{TRANSPORT}=fifo allows nothing else");
                Self { other_host, ..Self::everywhere(&Path::new("fifo", why)) }
            }
            // Auto's order with devices alone, even between processes of one host.
            _ => Self::everywhere(&other_host),
        };
        best.gpu = GpuPaths::of(facts.topology, facts.gpus, &best);
        best
    }

    fn everywhere(path: &Path) -> Self {
        Self {
            same_process: path.clone(),
            same_host: path.clone(),
            same_host_alloc: path.clone(),
            other_host: path.clone(),
            gpu: None,
        }
    }

    fn in_memory(probes: &Probes, cma: bool, other_host: Path) -> Self {
        let forbidden = (!cma).then(|| format!("{DISABLE_CMA} is set"));
        let own = forbidden.clone().or_else(|| probes.own_memory_refused());
        let other = forbidden.or_else(|| probes.memory_refused());
        Self {
            same_process: by_kernel(own.as_ref(), probes),
            same_host: by_kernel(other.as_ref(), probes),
            same_host_alloc: mapped(other.as_ref(), probes),
            other_host,
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

/// The path to memory that is not shared. `refused`: why the kernel refuses copies, if it does.
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

/// The interface that leaves the host with the highest known speed.
pub(crate) fn fastest(topology: &Topology) -> Option<&Interface> {
    let outward = |interface: &&Interface| {
        interface.kind != InterfaceKind::Loopback
            && interface.is_up()
            // A fake or foreign tree lists no addresses, so the state alone decides.
            && interface.operstate.as_deref() == Some("up")
    };
    let interfaces = topology.interfaces.iter().filter(outward);
    interfaces.max_by_key(|i| (i.kind == InterfaceKind::Physical, i.speed_mbps))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rdma::examples::{self, device, fabric};

    fn probes(memory: Option<&str>, shared: Result<(), String>) -> Probes {
        let read = memory.map(str::to_owned);
        Probes {
            process_memory: Ok(ProbeResult { read, ..ProbeResult::default() }),
            shared_memory: shared,
        }
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

    fn paths(topology: &Topology, rdma: &Rdma, config: &Config) -> Paths {
        let (probes, gpus) = (probes(None, Ok(())), Gpus::default());
        Paths::of(&Facts { topology, probes: &probes, gpus: &gpus, rdma }, config)
    }

    #[test]
    fn devices_lead_to_other_hosts() {
        let root = tempfile::TempDir::new().expect("a temporary folder");
        std::fs::create_dir_all(root.path().join("sys/class/infiniband/mlx5_0")).expect("a device");
        let topology = Topology::read(root.path()).expect("a topology");
        let auto = Config::default();
        let other_host = |rdma: &Rdma, config: &Config| paths(&topology, rdma, config).other_host;
        let verbs = |active| Rdma { verbs: Ok(vec![device("mlx5_0", active)]), ..examples::none() };
        let found = other_host(&verbs(true), &auto);
        assert_eq!(found.name, Some("verbs"));
        assert!(found.why.contains("mlx5_0") && found.why.contains("TCP"), "{found:?}");
        assert_ne!(other_host(&verbs(false), &auto).name, Some("verbs"));
        // EFA where verbs are of no use, Slingshot before all.
        let efa = Rdma { libfabric: Ok(fabric(&["tcp", "efa"])), ..verbs(false) };
        assert!(other_host(&efa, &auto).why.contains("efa over efa0"));
        let cxi = Rdma { libfabric: Ok(fabric(&["cxi"])), ..verbs(true) };
        assert!(other_host(&cxi, &auto).why.contains("cxi over cxi0"));
        // Providers that any machine has are not taken by themselves.
        let plain = Rdma { libfabric: Ok(fabric(&["tcp"])), ..examples::none() };
        assert_ne!(other_host(&plain, &auto).name, Some("libfabric"));
    }

    #[test]
    fn devices_that_are_forced_serve_one_host_too() {
        let root = tempfile::TempDir::new().expect("a temporary folder");
        let topology = Topology::read(root.path()).expect("a topology");
        let rdma = Rdma { libfabric: Ok(fabric(&["tcp"])), ..examples::none() };
        let forced = |transport| {
            let config = Config { transport, ..Config::default() };
            paths(&topology, &rdma, &config)
        };
        let libfabric = forced(Transport::Libfabric);
        let names = [libfabric.same_process, libfabric.same_host, libfabric.other_host];
        assert_eq!(names.map(|path| path.name), [Some("libfabric"); 3]);
        let udp = forced(Transport::Udp);
        let names = [udp.same_process, udp.same_host, udp.other_host];
        assert_eq!(names.map(|path| path.name), [Some("udp"); 3]);
        let verbs = forced(Transport::Verbs).same_host;
        assert_eq!(verbs.name, None);
        assert!(verbs.why.contains("no libibverbs") && verbs.why.contains(TRANSPORT), "{verbs:?}");
        assert!(forced(Transport::Efa).other_host.why.contains("no efa"));
    }

    #[test]
    fn settings_rule_over_the_machine() {
        let root = tempfile::TempDir::new().expect("a temporary folder");
        let topology = Topology::read(root.path()).expect("a topology");
        let paths = |config: &Config| paths(&topology, &examples::none(), config);
        let names = |config: &Config| {
            let paths = paths(config);
            [paths.same_process, paths.same_host, paths.same_host_alloc].map(|path| path.name)
        };
        assert_eq!(names(&Config::default()), ["cma", "cma", "mapped"].map(Some));
        let without = Config { cma: false, ..Config::default() };
        assert_eq!(names(&without), ["shm", "shm", "mapped"].map(Some));
        let tcp = Config { transport: Transport::Tcp, ..Config::default() };
        assert_eq!(names(&tcp), [Some("tcp"); 3]);
        let local = Config { transport: Transport::Local, ..Config::default() };
        let paths = paths(&local);
        assert_eq!(paths.gpu, None);
        assert_eq!(paths.other_host.name, None);
        assert!(paths.other_host.why.contains(TRANSPORT));
    }
}
