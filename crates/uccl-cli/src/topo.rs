//! `uccl topo`: this machine's devices, and the path that a transfer would take.

use std::{
    fmt::Write,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use clap::Args;
use serde::Serialize;
use termtree::Tree;
use uccl_device::{
    Gpu, GpuVendor, Interface, MachineGpu, NearNic, NumaNode, PciAddress, Place, RdmaDevice,
    RdmaGid, RdmaPort, Topology,
};
use uccl_p2p::Config;

use crate::{
    gpus::Gpus,
    matrix::matrix,
    paths::{Facts, PathChoices, Paths, Probes},
    rdma::{Libfabric, Rdma, VerbsDevice},
    units::{gbits, gib},
};

/// Show this machine's devices, and the path that a transfer would take.
#[derive(Args)]
pub(crate) struct TopoArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Read /sys and /proc of another machine below this folder; paths are the ones to expect there
    #[arg(long, value_name = "FOLDER", default_value = "/", hide = true)]
    root: PathBuf,
}

#[derive(Serialize)]
struct Report<'a> {
    topology: &'a Topology,
    /// The GPUs, with the facts of the driver and of the bus.
    gpus: Vec<GpuReport>,
    /// Why no GPU can be used, where the machine has some.
    no_gpu: Option<String>,
    /// The CUDA version that the driver supports.
    cuda_version: Option<String>,
    distances: Vec<Distance>,
    /// The devices that the library for RDMA verbs lists.
    verbs: &'a [VerbsDevice],
    /// Why that library is of no use, if it is.
    no_verbs: Option<&'a str>,
    /// Libfabric's library and providers.
    libfabric: Option<&'a Libfabric>,
    /// Why libfabric is of no use, if it is.
    no_libfabric: Option<&'a str>,
    paths: &'a Paths,
}

#[derive(Serialize)]
struct GpuReport {
    #[serde(flatten)]
    gpu: MachineGpu,
    /// The NIC that it uses first.
    nearest_nic: Option<NearNic>,
}

/// From a GPU to a device that leaves the host.
#[derive(Serialize)]
struct Distance {
    gpu: PciAddress,
    to: String,
    distance: String,
}

pub(crate) fn run(args: &TopoArgs) -> Result<()> {
    let topology = Topology::read(&args.root)?;
    let config = Config::from_env().context("an environment variable is not understood")?;
    let here = args.root == Path::new("/");
    let gpus = if here { Gpus::look() } else { Gpus::elsewhere() };
    let rdma = if here { Rdma::look(&config) } else { Rdma::elsewhere() };
    let probes = Probes::run();
    let facts = Facts { topology: &topology, probes: &probes, gpus: &gpus, rdma: &rdma };
    let mut paths = Paths::of(&facts, &config);
    if here {
        paths.choose(&PathChoices::ask(&config, &gpus));
    }
    match args.json {
        true => println!("{}", serde_json::to_string_pretty(&report(&facts, &paths))?),
        false => print!("{}", text(&facts, &paths)),
    }
    Ok(())
}

fn report<'a>(facts: &Facts<'a>, paths: &'a Paths) -> Report<'a> {
    let Facts { topology, gpus, rdma, .. } = *facts;
    let joined = topology.machine_gpus(&gpus.visible);
    let none = !joined.is_empty() && gpus.visible.is_empty();
    Report {
        topology,
        no_gpu: none.then(|| gpus.why_none(topology)),
        cuda_version: gpus.version.map(|(major, minor)| format!("{major}.{minor}")),
        distances: distances(topology),
        paths,
        verbs: rdma.verbs.as_deref().unwrap_or_default(),
        no_verbs: rdma.verbs.as_ref().err().map(String::as_str),
        libfabric: rdma.libfabric.as_ref().ok(),
        no_libfabric: rdma.libfabric.as_ref().err().map(String::as_str),
        gpus: joined
            .into_iter()
            .map(|gpu| GpuReport { nearest_nic: topology.nearest_nic(Place::Device(gpu.pci)), gpu })
            .collect(),
    }
}

fn text(facts: &Facts<'_>, paths: &Paths) -> String {
    let Facts { topology, gpus, rdma, .. } = *facts;
    let mut out = host(topology).to_string();
    out.push_str(&matrix(topology, &topology.machine_gpus(&gpus.visible)));
    let rdma = rdma.text(!topology.rdma.is_empty());
    if !rdma.is_empty() {
        let _ = write!(out, "\nRDMA\n{rdma}");
    }
    out.push_str("\npaths\n");
    let mut line = |peer: &str, path: &crate::paths::Path| {
        let _ = writeln!(out, "  {peer:<24} {:<8} {}", path.name.unwrap_or("none"), path.why);
    };
    line("same process", &paths.same_process);
    line("same host", &paths.same_host);
    line("same host, alloc memory", &paths.same_host_alloc);
    line("other host", &paths.other_host);
    if let Some(gpu) = &paths.gpu {
        gpu.named().into_iter().for_each(|(peer, path)| line(peer, path));
    }
    out
}

fn host(topology: &Topology) -> Tree<String> {
    let kernel = topology.kernel.release.as_deref().unwrap_or("?");
    let name = topology.host.hostname.as_deref().unwrap_or("this host");
    let mut below = vec![Tree::new(cpus(topology))];
    // Devices of an unknown NUMA node are children of the machine itself.
    let homeless = |node: Option<u32>| {
        node.is_none_or(|node| topology.numa_nodes.iter().all(|known| known.id != node))
    };
    below.extend(topology.numa_nodes.iter().map(|node| numa_node(topology, node)));
    below.extend(devices(topology, homeless));
    Tree::new(format!("{name}  Linux {kernel}")).with_leaves(below)
}

fn cpus(topology: &Topology) -> String {
    let cpus = &topology.cpus;
    let model = cpus.model.as_deref().unwrap_or("CPU");
    let mut text = format!("{model}  {} CPUs", cpus.online.len());
    for (count, what) in [(cpus.cores, "core"), (cpus.sockets, "socket")] {
        if let Some(count) = count {
            let plural = if count == 1 { "" } else { "s" };
            let _ = write!(text, ", {count} {what}{plural}");
        }
    }
    text
}

fn numa_node(topology: &Topology, node: &NumaNode) -> Tree<String> {
    let memory = node.memory_bytes.map_or_else(String::new, |bytes| format!("  {}", gib(bytes)));
    Tree::new(format!("node {}  CPUs {}{memory}", node.id, node.cpus))
        .with_leaves(devices(topology, |on| on == Some(node.id)))
}

/// The devices of the wanted NUMA nodes.
fn devices(topology: &Topology, wanted: impl Fn(Option<u32>) -> bool) -> Vec<Tree<String>> {
    let gpus = topology.gpus.iter().filter(|gpu| wanted(gpu.numa_node)).map(gpu);
    let rdma = topology.rdma.iter().filter(|rdma| wanted(rdma.numa_node)).map(rdma);
    let interfaces = topology.interfaces.iter().filter(|i| wanted(i.numa_node)).map(interface);
    gpus.map(Tree::new).chain(rdma).chain(interfaces.map(Tree::new)).collect()
}

fn gpu(gpu: &Gpu) -> String {
    let vendor = match gpu.vendor {
        GpuVendor::Amd => "AMD",
        GpuVendor::Nvidia => "NVIDIA",
        _ => "other vendor",
    };
    let model = gpu.device_id.map_or_else(String::new, |id| format!(" [{id:04x}]"));
    let driver = gpu.driver.as_deref().unwrap_or("no driver");
    format!("gpu {}  {vendor}{model}  {driver}", gpu.pci)
}

fn rdma(rdma: &RdmaDevice) -> Tree<String> {
    let mut text = format!("rdma {}", rdma.name);
    for part in [rdma.driver.clone(), rdma.pci.map(|pci| pci.to_string())].into_iter().flatten() {
        let _ = write!(text, "  {part}");
    }
    Tree::new(text).with_leaves(rdma.ports.iter().map(port))
}

fn port(port: &RdmaPort) -> Tree<String> {
    let parts = [
        port.state.clone(),
        port.rate_gbps.map(|gbps| format!("{gbps} Gbit/s")),
        port.link_layer.clone(),
        port.mtu_bytes.map(|mtu| format!("mtu {mtu}")),
    ];
    let parts: Vec<_> = parts.into_iter().flatten().collect();
    let text = format!("port {}  {}", port.number, parts.join("  "));
    Tree::new(text).with_leaves(port.gids.iter().map(gid))
}

fn gid(gid: &RdmaGid) -> String {
    let kind = gid.kind.map(|kind| kind.to_string());
    let parts: Vec<_> = [kind.as_deref(), gid.interface.as_deref()].into_iter().flatten().collect();
    // An IPv4-mapped GID is printed as an IPv4 address.
    let address = match gid.address.to_ipv4_mapped() {
        Some(ipv4) => ipv4.to_string(),
        None => gid.address.to_string(),
    };
    format!("gid {}  {address}  {}", gid.index, parts.join("  "))
}

fn interface(interface: &Interface) -> String {
    let parts = [
        interface.driver.clone(),
        interface.pci.map(|pci| pci.to_string()),
        interface.operstate.clone().filter(|state| state != "unknown"),
        interface.speed_mbps.map(gbits),
        interface.mtu_bytes.map(|mtu| format!("mtu {mtu}")),
    ];
    let addresses = interface.addresses.iter().map(ToString::to_string);
    let parts: Vec<_> = parts.into_iter().flatten().chain(addresses).collect();
    format!("nic {}  {}", interface.name, parts.join("  "))
}

fn distances(topology: &Topology) -> Vec<Distance> {
    let rdma = topology.rdma.iter().map(|rdma| (&rdma.name, rdma.pci));
    let nics = topology.interfaces.iter().map(|nic| (&nic.name, nic.pci));
    let devices: Vec<_> = rdma.chain(nics).filter_map(|(name, pci)| Some((name, pci?))).collect();
    let pairs = topology.gpus.iter().flat_map(|gpu| devices.iter().map(move |to| (gpu.pci, to)));
    let distance = |(gpu, (name, pci)): (PciAddress, &(&String, PciAddress))| {
        let distance = topology.distance(gpu, *pci)?.to_string();
        Some(Distance { gpu, to: (*name).clone(), distance })
    };
    pairs.filter_map(distance).collect()
}
