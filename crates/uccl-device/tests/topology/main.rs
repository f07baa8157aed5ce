//! Topologies: a tree of files that stands for a machine, and the machine the test runs on.

mod machine;
mod nearest;
mod routes;

use std::path::{Path, PathBuf};

use machine::Machine;
use uccl_device::{Error, GidKind, GpuVendor, InterfaceKind, PciAddress, PciDistance, Topology};

const GPU0: &str = "pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:00.0/0000:13:00.0";
const NIC0: &str = "pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:01.0/0000:14:00.0";
const GPU1: &str = "pci0000:80/0000:80:01.0/0000:81:00.0";
const NIC1: &str = "pci0000:80/0000:80:03.0/0000:82:00.0";

/// Two sockets; GPU 0 and NIC 0 share a switch, GPU 1 and NIC 1 a host bridge.
fn two_sockets() -> Machine {
    let machine = Machine::new();
    for cpu in 0..8 {
        let folder = PathBuf::from(format!("sys/devices/system/cpu/cpu{cpu}/topology"));
        machine
            .file(folder.join("physical_package_id"), &(cpu / 4).to_string())
            .file(folder.join("core_id"), &(cpu % 2).to_string());
    }
    machine
        .file("sys/devices/system/cpu/online", "0-7")
        .file("proc/cpuinfo", "processor : 0\nmodel name\t: Imagined CPU 9000\n");
    machine.numa_node(0, "0-3", "10 21");
    machine.numa_node(1, "4-7", "21 10");
    machine.gpu(GPU0, "0");
    machine.gpu(GPU1, "1");
    let nic0 = machine.nic(NIC0, "0", "eth0");
    let nic1 = machine.nic(NIC1, "1", "eth1");
    machine.rdma(&nic0, "mlx5_0", "4: ACTIVE");
    machine.rdma(&nic1, "mlx5_1", "1: DOWN");
    machine
        .file("sys/devices/virtual/net/lo/type", "772")
        .file("sys/devices/virtual/net/lo/mtu", "65536")
        .file("sys/devices/virtual/net/lo/operstate", "unknown")
        .link("sys/class/net/lo", machine.path("sys/devices/virtual/net/lo"))
        .file("sys/class/net/bonding_masters", "");
    machine
}

fn kernel(machine: &Machine) {
    machine
        .file("proc/sys/kernel/osrelease", "6.1.0-test")
        .file("proc/sys/kernel/random/boot_id", "8f2e")
        .file("proc/sys/kernel/yama/ptrace_scope", "1")
        .file("proc/sys/net/core/rmem_max", "212992")
        .file("proc/sys/net/ipv4/tcp_rmem", "4096\t131072\t6291456")
        .file("proc/sys/net/ipv4/tcp_congestion_control", "bbr")
        .file("proc/sys/net/ipv4/tcp_allowed_congestion_control", "reno bbr")
        .file("proc/sys/net/ipv4/tcp_available_congestion_control", "reno bbr cubic")
        .file("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never")
        .file("dev/shm/anything", "")
        .link("proc/self/ns/pid", "pid:[4026531836]")
        .link("proc/self/ns/net", "net:[nonsense]");
}

fn pci(text: &str) -> PciAddress {
    text.parse().expect("a PCI address")
}

#[test]
fn cpus_and_numa_nodes_of_two_sockets() {
    let topology = two_sockets().read();
    assert_eq!(topology.cpus.model.as_deref(), Some("Imagined CPU 9000"));
    assert_eq!(topology.cpus.online.len(), 8);
    assert_eq!((topology.cpus.sockets, topology.cpus.cores), (Some(2), Some(4)));
    let nodes = &topology.numa_nodes;
    assert_eq!(nodes.len(), 2);
    assert_eq!(nodes[1].cpus.to_string(), "4-7");
    assert_eq!(nodes[1].memory_bytes, Some(1 << 30));
    assert_eq!(nodes[1].distances, [21, 10]);
}

#[test]
fn devices_of_two_sockets() {
    let topology = two_sockets().read();
    let gpus: Vec<_> = topology.gpus.iter().map(|gpu| (gpu.pci, gpu.numa_node)).collect();
    assert_eq!(gpus, [(pci("0000:13:00.0"), Some(0)), (pci("0000:81:00.0"), Some(1))]);
    assert_eq!(topology.gpus[0].vendor, GpuVendor::Nvidia);
    assert_eq!(topology.gpus[0].driver.as_deref(), Some("nvidia"));

    let names: Vec<_> = topology.interfaces.iter().map(|i| i.name.as_str()).collect();
    assert_eq!(names, ["eth0", "eth1", "lo"]);
    let eth0 = &topology.interfaces[0];
    assert_eq!(eth0.kind, InterfaceKind::Physical);
    assert_eq!(eth0.driver.as_deref(), Some("mlx5_core"));
    assert_eq!((eth0.mtu_bytes, eth0.speed_mbps), (Some(9000), Some(400_000)));
    assert_eq!((eth0.pci, eth0.numa_node), (Some(pci("0000:14:00.0")), Some(0)));
    assert!(eth0.is_up());
    let lo = &topology.interfaces[2];
    assert_eq!((lo.kind, lo.pci, lo.speed_mbps), (InterfaceKind::Loopback, None, None));

    assert_eq!(topology.rdma.len(), 2);
    let mlx = &topology.rdma[0];
    assert_eq!((mlx.pci, mlx.numa_node), (eth0.pci, Some(0)));
    assert_eq!(mlx.interfaces, ["eth0"]);
    assert_eq!(mlx.ports[0].rate_gbps, Some(400));
    assert!(mlx.is_active() && !topology.rdma[1].is_active());
}

#[test]
fn distances_follow_bridges_and_nodes() {
    let machine = two_sockets();
    let far =
        "pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:02.0/0000:15:00.0/0000:16:00.0/0000:17:00.0";
    machine.gpu(far, "0");
    machine.gpu("pci0000:20/0000:20:00.0", "0");
    machine.gpu("pci0000:30/0000:30:00.0", "-1");
    let topology = machine.read();
    let distance = |a, b| topology.distance(pci(a), pci(b));
    assert_eq!(distance("0000:13:00.0", "0000:14:00.0"), Some(PciDistance::Pix));
    assert_eq!(distance("0000:13:00.0", "0000:13:00.0"), Some(PciDistance::Pix));
    assert_eq!(distance("0000:13:00.0", "0000:17:00.0"), Some(PciDistance::Pxb));
    assert_eq!(distance("0000:81:00.0", "0000:82:00.0"), Some(PciDistance::Phb));
    assert_eq!(distance("0000:13:00.0", "0000:20:00.0"), Some(PciDistance::Node));
    assert_eq!(distance("0000:13:00.0", "0000:82:00.0"), Some(PciDistance::Sys));
    assert_eq!(distance("0000:13:00.0", "0000:30:00.0"), Some(PciDistance::Sys));
    assert_eq!(distance("0000:13:00.0", "0000:99:00.0"), None);
    assert!(PciDistance::Pix < PciDistance::Sys);
}

#[test]
fn kernel_facts_and_identity() {
    let machine = Machine::new();
    kernel(&machine);
    let topology = machine.read();
    let facts = &topology.kernel;
    assert_eq!(facts.release.as_deref(), Some("6.1.0-test"));
    assert_eq!(facts.ptrace_scope, Some(1));
    assert_eq!((facts.rmem_max_bytes, facts.tcp_rmem_max_bytes), (Some(212_992), Some(6_291_456)));
    assert_eq!(facts.congestion.default.as_deref(), Some("bbr"));
    assert_eq!(facts.congestion.allowed, ["reno", "bbr"]);
    assert_eq!(facts.congestion.available, ["reno", "bbr", "cubic"]);
    assert_eq!(facts.huge_pages.as_deref(), Some("madvise"));
    assert!(facts.shm.is_some_and(|shm| shm.size_bytes >= shm.free_bytes));
    assert_eq!(topology.host.boot_id.as_deref(), Some("8f2e"));
    assert_eq!(topology.host.pid_namespace, Some(4_026_531_836));
    assert_eq!(topology.host.net_namespace, None);
}

#[test]
fn an_empty_machine_is_unknown_not_an_error() {
    let topology = Machine::new().read();
    assert!(topology.cpus.online.is_empty() && topology.numa_nodes.is_empty());
    assert!(topology.interfaces.is_empty() && topology.rdma.is_empty() && topology.gpus.is_empty());
    assert!(topology.kernel.release.is_none() && topology.kernel.shm.is_none());
    assert!(topology.host.boot_id.is_none());
}

#[test]
fn broken_files_are_unknown_too() {
    let machine = two_sockets();
    machine
        .file("sys/devices/system/cpu/online", "all of them")
        .file("sys/devices/system/node/node1/meminfo", "MemTotal: lots")
        .file(Path::new("sys/devices").join(NIC0).join("net/eth0/mtu"), "-7")
        .file(Path::new("sys/devices").join(GPU0).join("class"), "0xzz");
    let topology = machine.read();
    assert!(topology.cpus.online.is_empty());
    assert_eq!(topology.numa_nodes[1].memory_bytes, None);
    assert_eq!(topology.interfaces[0].mtu_bytes, None);
    assert_eq!(topology.gpus.len(), 1);
}

#[test]
fn a_root_that_is_not_there_is_an_error() {
    let machine = Machine::new();
    let missing = machine.path("missing");
    match Topology::read(&missing) {
        Err(Error::Root { path, .. }) => assert_eq!(path, missing),
        other => panic!("expected an error, got {other:?}"),
    }
}

#[test]
fn this_machine() {
    let topology = Topology::of_this_machine().expect("a topology");
    assert!(topology.kernel.release.is_some());
    assert!(topology.host.boot_id.is_some());
    assert!(topology.host.same_processes(&topology.host));
    let lo = topology.interfaces.iter().find(|i| i.kind == InterfaceKind::Loopback);
    if let Some(lo) = lo.filter(|lo| lo.is_up()) {
        assert!(lo.addresses.iter().any(|ip| ip.is_loopback()), "{lo:?}");
    }
    let nodes: usize = topology.numa_nodes.iter().map(|node| node.cpus.len()).sum();
    assert!(nodes == 0 || nodes == topology.cpus.online.len(), "{topology:?}");
    let json = serde_json::to_value(&topology).expect("JSON");
    assert_eq!(json["kernel"]["release"].as_str(), topology.kernel.release.as_deref());
}

#[test]
fn addresses_of_rdma_ports_are_read() {
    let machine = Machine::new();
    machine
        .file("sys/class/infiniband/rxe0/ports/1/state", "4: ACTIVE")
        .file("sys/class/infiniband/rxe0/ports/1/link_layer", "Ethernet")
        .file("sys/class/infiniband/rxe0/ports/1/gids/2", "0000:0000:0000:0000:0000:0000:0000:0000")
        .file("sys/class/infiniband/rxe0/ports/1/gids/oops", "fe80::1")
        .file("sys/class/net/eth0/mtu", "4200");
    machine.gid("rxe0", 10, ("0000:0000:0000:0000:0000:ffff:0a4d:0001", "RoCE v2", "eth0"));
    machine.gid("rxe0", 0, ("fe80:0000:0000:0000:0077:00ff:fe00:0001", "IB/RoCE v1", "eth0"));
    let topology = machine.read();
    let port = &topology.rdma[0].ports[0];
    assert!(port.is_active() && port.is_ethernet());
    assert_eq!(port.mtu_bytes, Some(4096));
    let [local, ipv4] = &port.gids[..] else { panic!("{:?}", port.gids) };
    assert_eq!((local.index, local.kind), (0, Some(GidKind::InfiniBandOrRoceV1)));
    assert_eq!((ipv4.index, ipv4.interface.as_deref()), (10, Some("eth0")));
    assert_eq!(ipv4.address.to_ipv4_mapped(), Some([10, 77, 0, 1].into()));
    assert!(ipv4.is_routable_ipv4() && !local.is_routable_ipv4());
}

#[test]
fn an_ethernet_of_usual_packets_carries_1024_bytes() {
    let machine = Machine::new();
    machine
        .file("sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE")
        .file("sys/class/net/eth0/mtu", "1500");
    machine.gid("mlx5_0", 0, ("fe80::1", "RoCE v2", "eth0"));
    assert_eq!(machine.read().rdma[0].ports[0].mtu_bytes, Some(1024));
}
