//! Findings on RDMA devices: reasons why they cannot be used, or are slow.

use std::{
    fs::{self, File},
    io,
    path::Path,
};

use rustix::process::{Resource, getrlimit};
use uccl_device::{GpuVendor, RdmaDevice, RdmaPort, Topology};

use super::{Finding, Level};
use crate::libraries;

const VERBS: &str = "libibverbs.so.1";
const FABRIC: &str = "libfabric.so.1";
const OVER_TCP: &str = "other hosts are reached over TCP";
const UNUSABLE: &str = "the RDMA devices cannot be used";

/// Facts beside the topology.
pub(super) struct Facts {
    /// Bytes that this process may lock; none for no limit.
    pub(super) locked_bytes: Option<u64>,
    pub(super) has_verbs: bool,
    pub(super) has_fabric: bool,
    /// Files of the libraries that know one kind of device each: `libmlx5.so.1`,
    /// `librxe-rdmav34.so`.
    pub(super) providers: Vec<String>,
    /// Whether a program may open devices: the first of /dev/infiniband/uverbs*, or the kernel's
    /// error.
    pub(super) device_file: Result<String, NoDeviceFile>,
    pub(super) peer_memory: PeerMemory,
}

/// Why no device can be opened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum NoDeviceFile {
    Missing,
    Refused(String, String),
}

/// The kernel's support for NICs that reach GPU memory by themselves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PeerMemory {
    /// The module nvidia-peermem is loaded.
    pub(super) module: bool,
    /// The driver's kernel part is the open one, which exports dma-bufs.
    pub(super) dma_buf: bool,
}

impl Facts {
    pub(super) fn gather() -> Self {
        let verbs = libraries::find(VERBS);
        let folder = verbs.as_deref().and_then(Path::parent).map(Path::to_owned);
        let driver = fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
        Self {
            // An endpoint raises the soft limit to the hard one.
            locked_bytes: getrlimit(Resource::Memlock).maximum,
            has_fabric: libraries::find(FABRIC).is_some(),
            providers: folder.map(|folder| providers(&folder)).unwrap_or_default(),
            has_verbs: verbs.is_some(),
            device_file: device_file(),
            peer_memory: PeerMemory {
                module: Path::new("/sys/module/nvidia_peermem").exists(),
                dma_buf: driver.contains("Open Kernel Module"),
            },
        }
    }

    /// A process that may lock all it likes, on a machine without libraries and devices.
    #[cfg(test)]
    pub(super) fn none() -> Self {
        Self {
            locked_bytes: None,
            has_verbs: false,
            has_fabric: false,
            providers: Vec::new(),
            device_file: Err(NoDeviceFile::Missing),
            peer_memory: PeerMemory { module: false, dma_buf: false },
        }
    }
}

/// The names of the libraries beside libibverbs that are its providers, or may be.
fn providers(folder: &Path) -> Vec<String> {
    let names = |folder: &Path| -> Vec<String> {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
    };
    let mut all = names(folder);
    all.extend(names(&folder.join("libibverbs")));
    all
}

fn device_file() -> Result<String, NoDeviceFile> {
    let entries = fs::read_dir("/dev/infiniband").into_iter().flatten().flatten();
    let is_device = |name: &String| name.starts_with("uverbs");
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let name = names.filter(is_device).min().ok_or(NoDeviceFile::Missing)?;
    let path = format!("/dev/infiniband/{name}");
    let open: io::Result<File> = File::options().read(true).write(true).open(&path);
    match open {
        Ok(_) => Ok(path),
        Err(error) => Err(NoDeviceFile::Refused(path, error.to_string())),
    }
}

pub(super) fn examine(topology: &Topology, facts: &Facts) -> Vec<Finding> {
    let devices = &topology.rdma;
    let mut findings = vec![locked_memory(devices, facts), ports(devices)];
    if !devices.is_empty() {
        findings.push(device_files(facts));
        findings.extend(addresses(devices));
    }
    findings.push(verbs(devices, facts));
    findings.extend(missing_providers(devices, facts));
    findings.push(fabric(devices, facts));
    findings.extend(gpu_memory(topology, facts.peer_memory));
    findings
}

/// Devices lock the buffers that are registered with them.
const LITTLE_LOCKED: u64 = 1 << 30;

fn locked_memory(devices: &[RdmaDevice], facts: &Facts) -> Finding {
    const ABOUT: &str = "locked memory";
    match facts.locked_bytes {
        Some(limit) if limit < LITTLE_LOCKED && !devices.is_empty() => {
            Finding::new(ABOUT, Level::Slow, format!("at most {} KiB", limit >> 10))
                .cost("RDMA cannot register large buffers")
                .remedy(
                    "ulimit -l unlimited, LimitMEMLOCK=infinity in the service, or --ulimit \
                     memlock=-1 for a container",
                )
        }
        Some(limit) if devices.is_empty() => {
            Finding::fine(ABOUT, format!("at most {} KiB; no device needs more", limit >> 10))
        }
        Some(limit) => Finding::fine(ABOUT, format!("at most {} MiB", limit >> 20)),
        None => Finding::fine(ABOUT, "no limit"),
    }
}

/// All ports, with the names of their devices.
fn all_ports(devices: &[RdmaDevice]) -> impl Iterator<Item = (String, &RdmaPort)> {
    devices.iter().flat_map(|device| {
        device.ports.iter().map(|port| (format!("{}:{}", device.name, port.number), port))
    })
}

fn ports(devices: &[RdmaDevice]) -> Finding {
    const ABOUT: &str = "RDMA";
    const REMEDY: &str = "see rdma link and ibstat: ip link set <interface> up, cable, switch port, \
                          and on InfiniBand a subnet manager";
    let named = |active: bool| {
        let ports = all_ports(devices).filter(|(_, port)| port.is_active() == active);
        ports.map(|(name, _)| name).collect::<Vec<_>>().join(", ")
    };
    let names: Vec<_> = devices.iter().map(|device| device.name.as_str()).collect();
    match (named(true), named(false)) {
        _ if devices.is_empty() => Finding::new(ABOUT, Level::Note, "no device").cost(OVER_TCP),
        (active, _) if active.is_empty() => {
            Finding::new(ABOUT, Level::Slow, format!("no port of {} is active", names.join(", ")))
                .cost(OVER_TCP)
                .remedy(REMEDY)
        }
        (active, down) if down.is_empty() => Finding::fine(ABOUT, active),
        (active, down) => Finding::new(ABOUT, Level::Note, format!("{active}; {down} not active"))
            .cost("those ports carry nothing")
            .remedy(REMEDY),
    }
}

fn device_files(facts: &Facts) -> Finding {
    const ABOUT: &str = "RDMA device files";
    let broken = |seen: String| Finding::new(ABOUT, Level::Slow, seen).cost(UNUSABLE);
    match &facts.device_file {
        Ok(path) => Finding::fine(ABOUT, path),
        Err(NoDeviceFile::Missing) => broken("there is no /dev/infiniband/uverbs*".into()).remedy(
            "modprobe ib_uverbs; in a container, pass the files on (docker: --device \
             /dev/infiniband)",
        ),
        Err(NoDeviceFile::Refused(path, why)) => broken(format!("{path} cannot be opened: {why}"))
            .remedy(format!(
                "let this user read and write {path} (rdma-core's udev rules do); in a container, \
                 --device /dev/infiniband"
            )),
    }
}

/// Whether every active port on an Ethernet has an address that is reached across routers.
fn addresses(devices: &[RdmaDevice]) -> Option<Finding> {
    const ABOUT: &str = "RDMA addresses";
    let roce = || all_ports(devices).filter(|(_, port)| port.is_active() && port.is_ethernet());
    roce().next()?;
    let without: Vec<_> = roce()
        .filter(|(_, port)| !port.gids.iter().any(uccl_device::RdmaGid::is_routable_ipv4))
        .map(|(name, _)| name)
        .collect();
    Some(match without.is_empty() {
        true => Finding::fine(ABOUT, "every RoCE port has an IPv4 GID of RoCE v2"),
        false => {
            Finding::new(ABOUT, Level::Slow, format!("{} without IPv4 GID", without.join(", ")))
                .cost("only peers on the same Ethernet are reached from there, if any are")
                .remedy(
                    "give the port's interface an IPv4 address (ip addr add), and let the device \
                     speak RoCE v2 (cma_roce_mode)",
                )
        }
    })
}

fn verbs(devices: &[RdmaDevice], facts: &Facts) -> Finding {
    const ABOUT: &str = "verbs";
    match (facts.has_verbs, devices.is_empty()) {
        (true, _) => Finding::fine(ABOUT, format!("{VERBS} is there")),
        (false, true) => {
            Finding::new(ABOUT, Level::Note, format!("{VERBS} is not there; no device needs it"))
        }
        (false, false) => Finding::new(ABOUT, Level::Slow, format!("{VERBS} is not there"))
            .cost(UNUSABLE)
            .remedy("install libibverbs1 and ibverbs-providers (rdma-core)"),
    }
}

/// The name of the library that knows a device, without `lib`, by the device's driver or its own
/// usual name.
fn provider_of(device: &RdmaDevice) -> Option<&'static str> {
    const BY_NAME: [(&str, &str); 13] = [
        ("bnxt", "bnxt_re"),
        ("cxgb4", "cxgb4"),
        ("efa", "efa"),
        ("erdma", "erdma"),
        ("hfi1", "hfi1verbs"),
        ("hns", "hns"),
        ("i40iw", "irdma"),
        ("ice", "irdma"),
        ("irdma", "irdma"),
        ("mana", "mana"),
        ("mlx", "mlx"),
        ("rxe", "rxe"),
        ("siw", "siw"),
    ];
    let known = |name: &str| {
        let (_, provider) = BY_NAME.iter().find(|(prefix, _)| name.starts_with(prefix))?;
        Some(match *provider {
            "mlx" if name.starts_with("mlx4") => "mlx4",
            "mlx" => "mlx5",
            other => other,
        })
    };
    device.driver.as_deref().and_then(known).or_else(|| known(&device.name))
}

fn missing_providers(devices: &[RdmaDevice], facts: &Facts) -> Option<Finding> {
    const ABOUT: &str = "verbs providers";
    if !facts.has_verbs || devices.is_empty() {
        return None;
    }
    let has = |provider: &str| {
        let starts = [format!("lib{provider}-"), format!("lib{provider}.so")];
        facts.providers.iter().any(|file| starts.iter().any(|start| file.starts_with(start)))
    };
    let lacks = |device: &&RdmaDevice| provider_of(device).is_some_and(|provider| !has(provider));
    let missing: Vec<_> = devices.iter().filter(lacks).map(|device| device.name.as_str()).collect();
    Some(match missing.is_empty() {
        true => Finding::fine(ABOUT, "there for every device that is known here"),
        false => Finding::new(ABOUT, Level::Slow, format!("none for {}", missing.join(", ")))
            .cost("libibverbs does not show these devices")
            .remedy("install ibverbs-providers (rdma-core), or the provider of the NIC's vendor"),
    })
}

fn fabric(devices: &[RdmaDevice], facts: &Facts) -> Finding {
    const ABOUT: &str = "libfabric";
    let needs = |device: &&RdmaDevice| provider_of(device) == Some("efa");
    let needing: Vec<_> = devices.iter().filter(needs).map(|device| device.name.as_str()).collect();
    match (facts.has_fabric, needing.is_empty()) {
        (true, _) => Finding::fine(ABOUT, format!("{FABRIC} is there")),
        (false, true) => Finding::new(
            ABOUT,
            Level::Note,
            format!("{FABRIC} is not there; CXI and EFA would need it, and nothing else"),
        ),
        (false, false) => Finding::new(ABOUT, Level::Slow, format!("{FABRIC} is not there"))
            .cost(format!("{} cannot be used", needing.join(", ")))
            .remedy("install libfabric1, or the vendor's (EFA's installer has one)"),
    }
}

/// Whether NICs may reach the memory of NVIDIA's GPUs by themselves.
fn gpu_memory(topology: &Topology, offers: PeerMemory) -> Option<Finding> {
    const ABOUT: &str = "RDMA and GPU memory";
    let gpus = topology.gpus.iter().any(|gpu| gpu.vendor == GpuVendor::Nvidia);
    let nics = topology.rdma.iter().any(|device| device.pci.is_some());
    if !gpus || !nics {
        return None;
    }
    Some(match offers {
        PeerMemory { module: true, .. } => Finding::fine(ABOUT, "nvidia-peermem is loaded"),
        PeerMemory { dma_buf: true, .. } => {
            Finding::fine(ABOUT, "the driver's open kernel modules export dma-bufs")
        }
        _ => Finding::new(ABOUT, Level::Slow, "neither nvidia-peermem nor dma-bufs")
            .cost("data goes through the host's memory between GPU and NIC")
            .remedy(
                "modprobe nvidia-peermem, or install the driver with its open kernel modules \
                 (Turing and later, kernel 5.12)",
            ),
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tempfile::TempDir;

    use super::*;

    const RXE: &str = "sys/class/infiniband/rxe0/ports/1";

    /// A machine with one RoCE device that lacks nothing.
    fn machine() -> (TempDir, Facts) {
        let root = TempDir::new().expect("a temporary folder");
        let facts = Facts {
            has_verbs: true,
            has_fabric: true,
            providers: vec!["librxe-rdmav34.so".into()],
            device_file: Ok("/dev/infiniband/uverbs0".into()),
            ..Facts::none()
        };
        for (path, text) in [
            ("state", "4: ACTIVE"),
            ("link_layer", "Ethernet"),
            ("gids/1", "0000:0000:0000:0000:0000:ffff:0a4d:0001"),
            ("gid_attrs/types/1", "RoCE v2"),
            ("gid_attrs/ndevs/1", "eth0"),
        ] {
            write(&root, &format!("{RXE}/{path}"), text);
        }
        (root, facts)
    }

    fn write(root: &TempDir, path: &str, text: &str) {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().expect("a parent")).expect("folders");
        fs::write(path, text).expect("a file");
    }

    fn all(root: &TempDir, facts: &Facts) -> Vec<Finding> {
        examine(&Topology::read(root.path()).expect("a topology"), facts)
    }

    /// The one finding that is not fine.
    fn fault(root: &TempDir, facts: &Facts) -> Finding {
        let mut faults = all(root, facts);
        faults.retain(|finding| finding.level != Level::Fine);
        assert_eq!(faults.len(), 1, "{faults:?}");
        let fault = faults.remove(0);
        assert!(!fault.cost.is_empty() && !fault.remedy.is_empty(), "{fault:?}");
        fault
    }

    #[test]
    fn a_good_machine_has_nothing_to_say() {
        let (root, facts) = machine();
        let findings = all(&root, &facts);
        assert!(findings.iter().all(|finding| finding.level == Level::Fine), "{findings:?}");
        assert_eq!(findings.len(), 7);
    }

    #[test]
    fn a_machine_without_devices_lacks_nothing() {
        let root = TempDir::new().expect("a temporary folder");
        let findings = all(&root, &Facts { locked_bytes: Some(8 << 20), ..Facts::none() });
        assert!(findings.iter().all(|finding| finding.level <= Level::Note), "{findings:?}");
        assert_eq!(findings.len(), 4);
    }

    #[test]
    fn each_thing_that_is_missing_is_told_alone() {
        let (root, _) = machine();
        let with = |change: fn(&mut Facts)| {
            let (_, mut facts) = machine();
            change(&mut facts);
            fault(&root, &facts)
        };
        let locked = with(|facts| facts.locked_bytes = Some(8 << 20));
        assert!(locked.seen.contains("8192 KiB") && locked.remedy.contains("ulimit -l"));
        let files = with(|facts| facts.device_file = Err(NoDeviceFile::Missing));
        assert!(files.remedy.contains("modprobe ib_uverbs"), "{files:?}");
        let refused = NoDeviceFile::Refused("/dev/infiniband/uverbs0".into(), "EPERM".into());
        let (_, mut facts) = machine();
        facts.device_file = Err(refused);
        assert!(fault(&root, &facts).seen.contains("EPERM"));
        assert_eq!(with(|facts| facts.has_verbs = false).about, "verbs");
        let provider = with(|facts| facts.providers = vec!["libmlx5.so.1".into()]);
        assert_eq!(provider.seen, "none for rxe0");
    }

    #[test]
    fn ports_that_are_down_are_named() {
        let (root, facts) = machine();
        write(&root, "sys/class/infiniband/rxe1/ports/1/state", "1: DOWN");
        let some = fault(&root, &facts);
        assert_eq!((some.level, some.seen.as_str()), (Level::Note, "rxe0:1; rxe1:1 not active"));
        write(&root, &format!("{RXE}/state"), "1: DOWN");
        assert_eq!(fault(&root, &facts).seen, "no port of rxe0, rxe1 is active");
    }

    #[test]
    fn a_port_without_an_ipv4_address_is_named() {
        let (root, facts) = machine();
        write(&root, &format!("{RXE}/gid_attrs/types/1"), "IB/RoCE v1");
        let found = fault(&root, &facts);
        assert_eq!(found.seen, "rxe0:1 without IPv4 GID");
        // InfiniBand needs none.
        write(&root, &format!("{RXE}/link_layer"), "InfiniBand");
        assert!(all(&root, &facts).iter().all(|finding| finding.level == Level::Fine));
    }

    #[test]
    fn libfabric_is_missed_where_a_device_needs_it() {
        let (root, mut facts) = machine();
        write(&root, "sys/class/infiniband/efa_0/ports/1/state", "4: ACTIVE");
        facts.providers.push("libefa.so.1".into());
        facts.has_fabric = false;
        assert_eq!(fault(&root, &facts).cost, "efa_0 cannot be used");
    }
}
