//! Where an endpoint's GPU and its memory are on this machine: which CPUs, NICs and addresses are
//! near.
//!
//! The machine is read once in a process, at the first question, and the result is kept. This never
//! initialises CUDA: until someone else has, the PCI bus and the environment say which GPU an index
//! means.

use std::{collections::HashMap, net::IpAddr, sync::OnceLock, thread, time::Duration};

use parking_lot::Mutex;
use uccl_device::{
    CpuList, InterfaceKind, MemoryKind, NearNic, Place, Topology,
    affinity::{allowed_cpus, keep_on},
    numa,
};
use uccl_fabric::mem::Span;

use crate::config::Config;

/// Threads that may spin at a time: a caller and a worker at each end of a connection within this
/// machine.
const SPINNERS: usize = 4;
/// With fewer processors than that, a worker that spins for longer keeps callers of its process
/// from running.
const CROWDED_SPIN: Duration = Duration::from_micros(10);

/// How long workers spin before they sleep, on lanes that callers use as well.
pub(crate) fn spin_beside_callers(config: &Config) -> Duration {
    let crowded = thread::available_parallelism().is_ok_and(|cpus| cpus.get() < SPINNERS);
    if crowded { config.spin.min(CROWDED_SPIN) } else { config.spin }
}

/// The first version of Linux's `struct sched_attr`.
#[derive(Default)]
#[repr(C)]
struct SchedAttr {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime_ns: u64,
    deadline_ns: u64,
    period_ns: u64,
}

/// The time slice that a worker asks for; the kernel grants no shorter one.
const TURN_NS: u64 = 100_000;
/// How late a worker may be woken from a nap.
const LATE_NS: libc::c_ulong = 1_000;

/// Asks for short time slices, and so for early ones: the calling thread does little at a time, and
/// others spin until it is done. Linux grants that from 6.12 on. It is not needed where a kernel
/// refuses.
pub(crate) fn be_prompt() {
    let size = size_of::<SchedAttr>() as u32;
    let mut own = SchedAttr { size, ..SchedAttr::default() };
    // SAFETY: about the calling thread alone; the structure is as long as is said, and lives
    // through the calls.
    unsafe {
        libc::prctl(libc::PR_SET_TIMERSLACK, LATE_NS);
        let known = libc::syscall(libc::SYS_sched_getattr, 0, &raw mut own, size, 0) == 0;
        if known && own.policy == libc::SCHED_OTHER as u32 {
            own.runtime_ns = TURN_NS;
            libc::syscall(libc::SYS_sched_setattr, 0, &raw const own, 0);
        }
    }
}

struct Machine {
    topology: Topology,
    /// Answers that were given before.
    nearest: Mutex<HashMap<Place, Option<NearNic>>>,
}

/// The machine, read at the first call; `None` where nothing can be read.
fn machine() -> Option<&'static Machine> {
    static MACHINE: OnceLock<Option<Machine>> = OnceLock::new();
    let read = || {
        let topology = Topology::of_this_machine().ok()?;
        Some(Machine { topology, nearest: Mutex::default() })
    };
    MACHINE.get_or_init(read).as_ref()
}

/// Whether memory can be on more than one node.
fn has_several_nodes() -> bool {
    static SEVERAL: OnceLock<bool> = OnceLock::new();
    *SEVERAL.get_or_init(|| numa::online_nodes().len() > 1)
}

/// Where the GPU with this index is, if there is one.
pub(crate) fn of_gpu(index: u32) -> Option<Place> {
    machine()?.topology.gpu_address(index).map(Place::Device)
}

/// The PCI address of the GPU with this index, if there is one.
pub(crate) fn pci_address(index: u32) -> Option<String> {
    machine()?.topology.gpu_address(index).map(|address| address.to_string())
}

/// The NUMA node of the first page of host memory, where there are several nodes and the kernel
/// tells.
pub(crate) fn node_of(kind: MemoryKind, span: Span) -> Option<u32> {
    let asks = kind.device().is_none() && span.len > 0 && has_several_nodes();
    asks.then(|| numa::node_at(span.addr))?
}

/// The NIC nearest to memory of this kind on this node, for an endpoint of this GPU. Host memory on
/// an unknown node counts as near the endpoint's GPU.
pub(crate) fn nearest_nic(kind: MemoryKind, node: Option<u32>, gpu: u32) -> Option<NearNic> {
    let machine = machine()?;
    let place = match (kind.device(), node) {
        (Some(device), _) => of_gpu(device),
        (None, Some(node)) => Some(Place::Node(node)),
        (None, None) => of_gpu(gpu),
    };
    machine.nearest_nic(place.unwrap_or(Place::Host))
}

/// All RDMA devices that are equally near to a GPU and nearest to it; none if there is no such GPU.
#[cfg(feature = "verbs")]
pub(crate) fn nearest_rdma(gpu: u32) -> Vec<String> {
    use uccl_device::{NicKind, NicState};

    let near = || {
        let nics = machine()?.topology.nics_near(of_gpu(gpu)?, NicKind::Rdma);
        let up: Vec<_> = nics.into_iter().filter(|nic| nic.state == NicState::Up).collect();
        let nearest = up.first()?.distance;
        Some(up.into_iter().filter(|nic| nic.distance == nearest).map(|nic| nic.name).collect())
    };
    near().unwrap_or_default()
}

impl Machine {
    fn nearest_nic(&self, place: Place) -> Option<NearNic> {
        let mut known = self.nearest.lock();
        let nearest = known.entry(place);
        nearest.or_insert_with(|| self.topology.nearest_nic(place)).clone()
    }
}

/// The address to give to peers. `ip` is the address that the routes suggest; an address on a NIC
/// nearer to the GPU is taken instead if others reach that as well. Interfaces come and go, so they
/// are read at each call.
pub(crate) fn address_near(gpu: u32, ip: IpAddr) -> IpAddr {
    let near = || {
        let known = &machine()?.topology.interfaces;
        let physical = known.iter().filter(|nic| nic.kind == InterfaceKind::Physical).count();
        let place = if physical > 1 { of_gpu(gpu)? } else { return None };
        Some(Topology::of_this_machine().ok()?.address_near(place, ip))
    };
    near().unwrap_or(ip)
}

/// The CPUs to keep an endpoint's workers on; `None` leaves them where they are.
pub(crate) fn cpus_for_workers(config: &Config) -> Option<CpuList> {
    if !config.numa_affinity || !has_several_nodes() {
        return None;
    }
    let (place, allowed) = (of_gpu(config.gpu_index)?, allowed_cpus()?);
    near_and_enough(&machine()?.topology, place, &allowed, config.num_cpus)
}

/// The CPUs near a place, of those that the process may use. `None` if these are all CPUs that it
/// may use, or if they are too few for the workers while other CPUs would have nothing to do.
fn near_and_enough(
    topology: &Topology,
    place: Place,
    allowed: &CpuList,
    workers: usize,
) -> Option<CpuList> {
    let near = topology.cpus_near(place);
    let both: CpuList = near.iter().filter(|cpu| allowed.contains(*cpu)).collect();
    (both.len() >= workers && both != *allowed).then_some(both)
}

/// Keeps the calling thread on these CPUs, and returns those on which it may run now.
pub(crate) fn settle(cpus: &CpuList) -> Option<CpuList> {
    match keep_on(cpus) {
        Ok(kept) if !kept.is_empty() => {
            tracing::debug!("a worker keeps to CPUs {kept}");
            allowed_cpus()
        }
        Ok(_) => None,
        Err(e) => {
            tracing::debug!("a worker cannot keep to CPUs {cpus}: {e}");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use tempfile::TempDir;

    use super::*;

    fn cpus(text: &str) -> CpuList {
        text.parse().expect("a list")
    }

    /// A machine with these nodes and one GPU, on the last node.
    fn with_gpu(nodes: &[&str]) -> (Topology, Place) {
        let root = TempDir::new().expect("a temporary folder");
        let file = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap_or(Path::new("/"))).expect("folders");
            fs::write(path, text).expect("a file");
        };
        for (node, cpus) in nodes.iter().enumerate() {
            file(&format!("sys/devices/system/node/node{node}/cpulist"), cpus);
        }
        let gpu = "sys/devices/pci0000:80/0000:80:00.0";
        for (name, text) in [("class", "0x030200"), ("vendor", "0x10de")] {
            file(&format!("{gpu}/{name}"), text);
        }
        file(&format!("{gpu}/numa_node"), &(nodes.len() - 1).to_string());
        let bus = root.path().join("sys/bus/pci/devices");
        fs::create_dir_all(&bus).expect("a folder");
        let link = bus.join("0000:80:00.0");
        std::os::unix::fs::symlink(root.path().join(gpu), link).expect("a link");
        let topology = Topology::read(root.path()).expect("a topology");
        let place = Place::Device(topology.gpus[0].pci);
        (topology, place)
    }

    #[test]
    fn workers_keep_to_the_allowed_cpus_of_their_gpus_node() {
        let (topology, place) = with_gpu(&["0-3", "4-7"]);
        let kept = |allowed, workers| near_and_enough(&topology, place, &cpus(allowed), workers);
        assert_eq!(kept("0-7", 4), Some(cpus("4-7")));
        assert_eq!(kept("2-5", 2), Some(cpus("4-5")));
        // All CPUs are near, no CPU is near, and too few are near.
        assert_eq!(kept("4-5", 1), None);
        assert_eq!(kept("0-3", 1), None);
        assert_eq!(kept("0-4", 4), None);
        // No CPU is near a place on no known node.
        assert_eq!(near_and_enough(&topology, Place::Host, &cpus("0-7"), 1), None);
    }

    #[test]
    fn a_nic_is_asked_for_once_and_then_known() {
        let (topology, place) = with_gpu(&["0-3"]);
        let mut machine = Machine { topology, nearest: Mutex::default() };
        assert_eq!(machine.nearest_nic(place), None);
        machine.topology = Topology::of_this_machine().expect("a topology");
        assert_eq!((machine.nearest_nic(place), machine.nearest.lock().len()), (None, 1));
        let expected = machine.topology.nearest_nic(Place::Host);
        assert_eq!(machine.nearest_nic(Place::Host), expected);
        assert_eq!(machine.nearest.lock().len(), 2);
    }

    #[test]
    fn without_a_gpu_the_address_stays() {
        let ip = "192.0.2.77".parse().expect("an address");
        assert_eq!(address_near(u32::MAX, ip), ip);
        assert_eq!(of_gpu(u32::MAX), None);
    }
}
