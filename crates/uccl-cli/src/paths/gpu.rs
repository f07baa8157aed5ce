//! Which path data in a GPU's memory would take.

use serde::Serialize;
use uccl_device::{NicKind, NicState, Place, Topology, cuda::GpuLink};

use super::{Path, Paths};
use crate::gpus::Gpus;

/// Paths from a GPU's memory.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct GpuPaths {
    /// To a GPU's memory on this host.
    pub(crate) same_host: Path,
    /// To a peer's own host memory on this host.
    pub(crate) host_memory: Path,
    /// To host memory on this host that a peer got from the engine's alloc.
    pub(crate) alloc_memory: Path,
    /// To any memory elsewhere.
    pub(crate) other_host: Path,
}

impl GpuPaths {
    /// The paths with their names, in the order of the output.
    pub(crate) fn named(&self) -> [(&'static str, &Path); 4] {
        [
            ("GPU to GPU, same host", &self.same_host),
            ("GPU to host memory", &self.host_memory),
            ("GPU to alloc memory", &self.alloc_memory),
            ("GPU to other host", &self.other_host),
        ]
    }

    /// They follow from the host memory's: a GPU copies where the CPU would, and elsewhere its
    /// memory is staged through the host's.
    pub(super) fn of(topology: &Topology, gpus: &Gpus, host: &Paths) -> Option<Self> {
        if topology.gpus.is_empty() && gpus.visible.is_empty() {
            return None;
        }
        if gpus.visible.is_empty() {
            let none = Path::none(gpus.why_none(topology));
            return Some(Self {
                same_host: none.clone(),
                host_memory: none.clone(),
                alloc_memory: none.clone(),
                other_host: none,
            });
        }
        Some(Self {
            same_host: gpu_to_gpu(gpus, host),
            host_memory: gpu_to_host(host),
            alloc_memory: gpu_to_alloc(host),
            other_host: gpu_to_other_host(topology, gpus, host),
        })
    }
}

const REACHED: &str = "NICs reach GPU memory by dma-buf or nvidia-peermem";
const STAGED: &str = "staged through pinned memory";

/// A GPU's path is TCP where the host's own memory takes TCP; else it depends on shared memory.
fn gpu_to_gpu(gpus: &Gpus, host: &Paths) -> Path {
    let alloc = &host.same_host_alloc;
    match alloc.name {
        Some(link @ ("tcp" | "udp")) => {
            return Path::new(link, format!("{STAGED}; {}", alloc.why));
        }
        Some("verbs" | "libfabric") | None => return alloc.clone(),
        Some(_) => {}
    }
    let count = |wanted| {
        let links = gpus.visible.iter().flat_map(|gpu| &gpu.links);
        // Each pair is there from both sides.
        links.filter(|link| **link == Some(wanted)).count() / 2
    };
    let links = [
        (count(GpuLink::Nvlink), "over NVLink"),
        (count(GpuLink::Pcie), "over PCIe"),
        (count(GpuLink::None), "without peer access, through the host"),
    ];
    let links: Vec<_> = links
        .iter()
        .filter(|(pairs, _)| *pairs > 0)
        .map(|(pairs, how)| format!("{pairs} pair{} {how}", if *pairs == 1 { "" } else { "s" }))
        .collect();
    let links = if links.is_empty() { "one GPU".to_owned() } else { links.join(", ") };
    Path::new("cuda_ipc", format!("a GPU copies between the two processes ({links})"))
}

fn gpu_to_host(host: &Paths) -> Path {
    match host.same_host.name {
        Some("cma") => Path::new(
            "cma",
            "in chunks through locked buffers: the kernel copies one while a GPU copies the next; \
             what is locked is copied by its owner's GPU",
        ),
        Some(link @ ("tcp" | "udp")) => {
            Path::new(link, format!("{STAGED}; {}", host.same_host.why))
        }
        Some("verbs" | "libfabric") | None => host.same_host.clone(),
        _ => Path::none(format!(
            "a GPU does not reach memory of the peer's own; use memory from alloc ({})",
            host.same_host.why
        )),
    }
}

fn gpu_to_alloc(host: &Paths) -> Path {
    match host.same_host_alloc.name {
        Some("mapped") => {
            Path::new("mapped", "a GPU copies to and from the memory, which is locked")
        }
        Some("verbs" | "libfabric") | None => host.same_host_alloc.clone(),
        _ => Path {
            why: format!("{STAGED}; {}", host.same_host_alloc.why),
            ..host.same_host_alloc.clone()
        },
    }
}

fn gpu_to_other_host(topology: &Topology, gpus: &Gpus, host: &Paths) -> Path {
    match host.other_host.name {
        None => return host.other_host.clone(),
        Some("tcp" | "udp") => {}
        Some(_) => {
            let why = format!("{}; {REACHED}", host.other_host.why);
            return Path { why, ..host.other_host.clone() };
        }
    }
    let near = gpus.visible.iter().filter_map(|gpu| {
        let nics = topology.nics_near(Place::Device(gpu.pci), NicKind::Interface);
        let nic = nics.into_iter().find(|nic| nic.state == NicState::Up)?;
        let distance = nic.distance.map_or_else(|| "?".to_owned(), |distance| distance.to_string());
        Some(format!("GPU{} {} {distance}", gpu.ordinal, nic.name))
    });
    let near: Vec<_> = near.collect();
    let nearest = match near.is_empty() {
        true => String::new(),
        false => format!("; nearest: {}", near.join(", ")),
    };
    Path { why: format!("{STAGED}, {}{nearest}", host.other_host.why), ..host.other_host.clone() }
}

#[cfg(test)]
mod tests {
    use uccl_p2p::{Config, Transport};

    use super::*;
    use crate::{
        gpus::examples::{Machine, no_library, two},
        paths::{Facts, Probes},
        probe::ProbeResult,
        rdma::examples::none,
    };

    fn paths(gpus: &Gpus, probes: &Probes, transport: Transport) -> GpuPaths {
        let machine = Machine::two_sockets();
        machine.interface(1, "eth7");
        let topology = machine.read();
        let config = Config { transport, ..Config::default() };
        let facts = Facts { topology: &topology, probes, gpus, rdma: &none() };
        Paths::of(&facts, &config).gpu.expect("there are GPUs")
    }

    fn probes(refused: Option<&str>) -> Probes {
        let read = refused.map(str::to_owned);
        Probes {
            process_memory: Ok(ProbeResult { read, ..ProbeResult::default() }),
            shared_memory: Ok(()),
        }
    }

    fn names(paths: &GpuPaths) -> [Option<&'static str>; 4] {
        paths.named().map(|(_, path)| path.name)
    }

    #[test]
    fn settings_rule_over_the_paths_of_gpus() {
        let gpus = two(GpuLink::Nvlink);
        let best = paths(&gpus, &probes(None), Transport::Auto);
        assert_eq!(names(&best), ["cuda_ipc", "cma", "mapped", "tcp"].map(Some));
        assert!(best.same_host.why.contains("1 pair over NVLink"), "{best:?}");
        assert!(best.other_host.why.starts_with("staged through pinned memory"), "{best:?}");
        assert!(best.other_host.why.ends_with("nearest: GPU0 eth7 SYS, GPU1 eth7 PHB"), "{best:?}");
        let tcp = paths(&gpus, &probes(None), Transport::Tcp);
        assert_eq!(names(&tcp), [Some("tcp"); 4]);
        assert!(tcp.same_host.why.contains("UCCL_P2P_TRANSPORT"), "{tcp:?}");
        let local = paths(&gpus, &probes(None), Transport::Local);
        assert_eq!(names(&local), [Some("cuda_ipc"), Some("cma"), Some("mapped"), None]);
        let refused = paths(&gpus, &probes(Some("EPERM")), Transport::Auto);
        assert_eq!(names(&refused), [Some("cuda_ipc"), None, Some("mapped"), Some("tcp")]);
        assert!(refused.host_memory.why.contains("EPERM"), "{refused:?}");
    }

    #[test]
    fn without_a_driver_there_is_no_path_and_a_reason() {
        let paths = paths(&no_library(), &probes(None), Transport::Auto);
        assert_eq!(names(&paths), [None; 4]);
        assert!(paths.other_host.why.contains("libcuda.so.1"), "{paths:?}");
    }
}
