//! Which NICs are near to which memory, on machines as they are sold.

use std::collections::BTreeSet;

use uccl_device::{
    DeviceOrder, MachineGpu, NearNic, NicKind, NicState, PciAddress, PciDistance, Place, Topology,
    cuda::{GpuLink, GpuUuid, VisibleDevices, VisibleGpu},
};

use crate::{machine::Machine, pci};

/// Eight GPUs, each with a NIC on its own PCIe switch, four switches a socket, and a slow NIC for
/// management, like HGX H100 and H200 boxes. Names of NICs run against the order of the bus.
fn hgx() -> Machine {
    let machine = Machine::new();
    machine.numa_node(0, "0-55,112-167", "10 21");
    machine.numa_node(1, "56-111,168-223", "21 10");
    for index in 0..8_u32 {
        let (base, node) = (0x10 + 0x10 * index, index / 4);
        let switch = format!("pci0000:{base:02x}/0000:{base:02x}:01.0/0000:{:02x}:00.0", base + 1);
        let below = |port: u32, bus: u32| {
            format!("{switch}/0000:{:02x}:{port:02x}.0/0000:{bus:02x}:00.0", base + 2)
        };
        machine.gpu(&below(0, base + 3), &node.to_string());
        let name = format!("ens{}", 7 - index);
        let nic = machine.nic(&below(1, base + 4), &node.to_string(), &name);
        machine.rdma(&nic, &format!("mlx5_{index}"), "4: ACTIVE");
    }
    let management = machine.nic("pci0000:00/0000:00:1c.0/0000:01:00.0", "0", "eno1");
    machine.speed(&management, "eno1", 1000);
    machine
}

fn gpu_of(index: u32) -> Place {
    Place::Device(pci(&format!("0000:{:02x}:00.0", 0x13 + 0x10 * index)))
}

fn names(nics: &[NearNic]) -> Vec<&str> {
    nics.iter().map(|nic| nic.name.as_str()).collect()
}

fn first(topology: &Topology, place: Place, kind: NicKind) -> (String, Option<PciDistance>) {
    let nic = topology.nics_near(place, kind).into_iter().next().expect("a NIC");
    (nic.name, nic.distance)
}

#[test]
fn each_gpu_of_an_hgx_box_has_the_nic_on_its_switch() {
    let topology = hgx().read();
    for index in 0..8 {
        let pix = Some(PciDistance::Pix);
        let place = gpu_of(index);
        assert_eq!(first(&topology, place, NicKind::Rdma), (format!("mlx5_{index}"), pix));
        let name = format!("ens{}", 7 - index);
        assert_eq!(first(&topology, place, NicKind::Interface), (name, pix));
        let nearest = topology.nearest_nic(place).expect("a NIC");
        assert_eq!((nearest.kind, nearest.speed_mbps), (NicKind::Rdma, Some(400_000)));
        let nics = topology.nics_near(place, NicKind::Rdma);
        let distances: Vec<_> = nics.iter().filter_map(|nic| nic.distance).collect();
        assert!(distances.is_sorted(), "{nics:?}");
        let near = distances.iter().filter(|distance| **distance < PciDistance::Sys).count();
        assert_eq!((nics.len(), near), (8, 4));
    }
}

#[test]
fn host_memory_uses_the_nics_of_its_node() {
    let topology = hgx().read();
    let on_1 = topology.nics_near(Place::Node(1), NicKind::Rdma);
    assert_eq!(names(&on_1)[..4], ["mlx5_4", "mlx5_5", "mlx5_6", "mlx5_7"]);
    assert_eq!(on_1[3].distance, Some(PciDistance::Phb));
    assert_eq!(on_1[4].distance, Some(PciDistance::Sys));
    // As near as the others, and slower.
    let on_0 = topology.nics_near(Place::Node(0), NicKind::Interface);
    assert_eq!(names(&on_0)[3..5], ["ens4", "eno1"]);
    let anywhere = topology.nics_near(Place::Host, NicKind::Rdma);
    assert_eq!((names(&anywhere)[0], anywhere[0].distance), ("mlx5_0", None));
}

#[test]
fn a_nic_that_is_down_gives_way_to_the_next() {
    let machine = hgx();
    let switch = "sys/devices/pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:01.0/0000:14:00.0";
    machine
        .file(format!("{switch}/infiniband/mlx5_0/ports/1/state"), "1: DOWN")
        .file(format!("{switch}/net/ens7/operstate"), "down");
    let topology = machine.read();
    let rdma = topology.nics_near(gpu_of(0), NicKind::Rdma);
    assert_eq!((names(&rdma)[0], rdma[0].distance), ("mlx5_1", Some(PciDistance::Node)));
    let last = rdma.last().expect("a NIC");
    assert_eq!((last.name.as_str(), last.state), ("mlx5_0", NicState::Down));
    assert_eq!(last.distance, Some(PciDistance::Pix));
    assert_eq!(names(&topology.nics_near(gpu_of(0), NicKind::Interface)).last(), Some(&"ens7"));
}

/// GPUs, and as many NICs as are named, all below one host bridge.
fn one_bridge(gpus: usize, nics: &[&str]) -> Topology {
    let machine = Machine::new();
    machine.numa_node(0, "0-31", "10");
    for slot in 0..gpus {
        machine.gpu(&format!("pci0000:00/0000:00:{slot:02x}.0"), "0");
    }
    for (slot, name) in nics.iter().enumerate() {
        machine.nic(&format!("pci0000:00/0000:00:{:02x}.0", slot + 16), "0", name);
    }
    machine.read()
}

fn spread(topology: &Topology) -> Vec<String> {
    let gpus = topology.gpus.iter().map(|gpu| Place::Device(gpu.pci));
    gpus.map(|place| first(topology, place, NicKind::Interface).0).collect()
}

#[test]
fn gpus_share_out_nics_that_are_equally_near() {
    assert_eq!(spread(&one_bridge(4, &["d", "c", "b", "a"])), ["d", "c", "b", "a"]);
    assert_eq!(spread(&one_bridge(4, &["a", "b"])), ["a", "b", "a", "b"]);
    assert_eq!(spread(&one_bridge(4, &["a"])), ["a"; 4]);
    // Two for each: no two GPUs begin with the same NICs.
    let eight = one_bridge(4, &["a", "b", "c", "d", "e", "f", "g", "h"]);
    assert_eq!(spread(&eight), ["a", "c", "e", "g"]);
    let places = eight.gpus.iter().map(|gpu| Place::Device(gpu.pci));
    let firsts: BTreeSet<_> = places
        .flat_map(|place| eight.nics_near(place, NicKind::Interface).into_iter().take(2))
        .map(|nic| nic.name)
        .collect();
    assert_eq!(firsts.len(), 8);
}

#[test]
fn no_nic_is_first_for_many_more_gpus_than_another() {
    let all = ["a", "b", "c", "d", "e", "f", "g", "h"];
    for (gpus, count) in (1..=8).flat_map(|gpus| (1..=8).map(move |count| (gpus, count))) {
        let topology = one_bridge(gpus, &all[..count]);
        let firsts = spread(&topology);
        let uses =
            all[..count].iter().map(|nic| firsts.iter().filter(|first| first == nic).count());
        let (least, most) = uses.fold((gpus, 0), |(least, most), n| (least.min(n), most.max(n)));
        assert!(most - least <= 1, "{gpus} GPUs, {count} NICs: {firsts:?}");
        for gpu in &topology.gpus {
            let ranked = topology.nics_near(Place::Device(gpu.pci), NicKind::Interface);
            let mut names = names(&ranked);
            names.sort_unstable();
            assert_eq!(names, all[..count]);
        }
    }
}

#[test]
fn one_nic_serves_both_sockets() {
    let machine = Machine::of_two_sockets();
    let topology = machine.read();
    let eth0 = |distance| ("eth0".to_owned(), Some(distance));
    let of = |text: &str| first(&topology, Place::Device(pci(text)), NicKind::Interface);
    assert_eq!(of("0000:10:00.0"), eth0(PciDistance::Phb));
    assert_eq!(of("0000:80:00.0"), eth0(PciDistance::Sys));
    assert_eq!(first(&topology, Place::Node(1), NicKind::Interface), eth0(PciDistance::Sys));
    assert_eq!(topology.cpus_near(Place::Device(pci("0000:80:00.0"))).to_string(), "4-7");
}

#[test]
fn far_nodes_are_not_equally_far() {
    let machine = Machine::new();
    for (node, distances) in ["10 12 32", "12 10 32", "32 32 10"].iter().enumerate() {
        machine.numa_node(node as u32, &node.to_string(), distances);
    }
    machine.nic("pci0000:20/0000:20:00.0", "2", "a");
    machine.nic("pci0000:30/0000:30:00.0", "1", "b");
    let near = machine.read().nics_near(Place::Node(0), NicKind::Interface);
    assert_eq!(names(&near), ["b", "a"]);
    assert!(near.iter().all(|nic| nic.distance == Some(PciDistance::Sys)));
}

#[test]
fn a_cloud_vm_tells_little_and_is_served_still() {
    // Each device is below a host bridge of its own, on no node; the NIC is not even on the bus.
    let machine = Machine::new();
    machine.numa_node(0, "0-7", "10");
    machine.gpu("pci0001:00/0001:00:00.0", "-1");
    let nic = "sys/devices/LNXSYSTM:00/VMBUS:00/eth0-guid";
    machine
        .file(format!("{nic}/net/eth0/operstate"), "up")
        .file(format!("{nic}/net/eth0/type"), "1")
        .link(format!("{nic}/net/eth0/device"), "../..")
        .link("sys/class/net/eth0", machine.path(format!("{nic}/net/eth0")));
    let place = Place::Device(pci("0001:00:00.0"));
    let topology = machine.read();
    assert_eq!(first(&topology, place, NicKind::Interface), ("eth0".into(), None));
    assert_eq!(topology.nearest_nic(place).expect("a NIC").name, "eth0");
    assert_eq!(topology.node_of(place), Some(0));
    machine.nic("pci0002:00/0002:00:00.0", "-1", "eth1");
    let topology = machine.read();
    let nics = topology.nics_near(place, NicKind::Interface);
    assert_eq!((names(&nics), nics[0].distance), (vec!["eth1", "eth0"], Some(PciDistance::Node)));
    // A GPU that the bus does not show.
    let elsewhere = Place::Device(pci("0009:00:00.0"));
    assert_eq!(topology.nics_near(elsewhere, NicKind::Interface).len(), 2);
}

#[test]
fn software_and_loopback_are_the_last_resort_or_none() {
    let machine = Machine::new();
    let folder = "sys/devices/virtual/net";
    for (name, kind, state) in
        [("br0", "1", "up"), ("lo", "772", "unknown"), ("veth0", "1", "down")]
    {
        machine
            .file(format!("{folder}/{name}/type"), kind)
            .file(format!("{folder}/{name}/operstate"), state)
            .link(format!("sys/class/net/{name}"), machine.path(format!("{folder}/{name}")));
    }
    machine.file("sys/class/infiniband/rxe0/ports/1/state", "4: ACTIVE");
    assert_eq!(machine.read().nearest_nic(Place::Host), None);
    machine.nic("pci0000:00/0000:00:03.0", "-1", "zeth");
    let topology = machine.read();
    let nics = topology.nics_near(Place::Host, NicKind::Interface);
    assert_eq!(names(&nics), ["zeth", "br0", "veth0"]);
    assert_eq!(nics[1].state, NicState::Virtual);
    assert_eq!(topology.nearest_nic(Place::Host).expect("a NIC").name, "zeth");
}

fn uuid(index: u32) -> GpuUuid {
    GpuUuid([index as u8 + 1; 16])
}

fn order(topology: &Topology, visible: Option<&str>) -> Option<Vec<PciAddress>> {
    let gpus = topology.cuda_order(&VisibleDevices::parse(visible), DeviceOrder::FastestFirst)?;
    Some(gpus.iter().map(|gpu| gpu.pci).collect())
}

#[test]
fn ordinals_follow_the_gpus_that_a_process_sees() {
    let machine = hgx();
    let address = |index| match gpu_of(index) {
        Place::Device(pci) => pci,
        other => panic!("a GPU is a device: {other}"),
    };
    let topology = machine.read();
    assert_eq!(order(&topology, None).map(|all| all.len()), Some(8));
    assert_eq!(order(&topology, Some("6,1")), Some(vec![address(6), address(1)]));
    assert_eq!(order(&topology, Some("")), Some(vec![]));
    // In a container that was given three of them.
    for index in [2, 3, 5] {
        machine.in_driver(&address(index).to_string(), &uuid(index).to_string());
    }
    let topology = machine.read();
    assert_eq!(order(&topology, None), Some(vec![address(2), address(3), address(5)]));
    assert_eq!(order(&topology, Some("2,0")), Some(vec![address(5), address(2)]));
    let by_uuid = uuid(3).to_string();
    assert_eq!(order(&topology, Some(&by_uuid[..12])), Some(vec![address(3)]));
    assert_eq!(topology.gpus[2].model.as_deref(), Some("NVIDIA H100 80GB HBM3"));
}

#[test]
fn of_several_models_cuda_alone_knows_the_fastest() {
    let machine = Machine::new();
    machine.gpu("pci0000:10/0000:10:00.0", "0");
    let other = machine.gpu("pci0000:20/0000:20:00.0", "0");
    machine.file(other.join("device"), "0x20b0");
    let topology = machine.read();
    assert_eq!(order(&topology, None), None);
    let by_bus = topology.cuda_order(&VisibleDevices::All, DeviceOrder::PciBus).expect("told");
    assert_eq!(by_bus.len(), 2);
}

#[test]
fn driver_and_bus_are_joined() {
    let topology = hgx().read();
    // The process sees GPU 5 of the machine as its first, and one that the bus does not show.
    let mut fifth = VisibleGpu::new(0, uuid(5), pci("0000:63:00.0"));
    fifth.links = vec![Some(GpuLink::Itself), Some(GpuLink::Nvlink)];
    let ghost = VisibleGpu::new(1, uuid(9), pci("00ff:01:00.0"));
    let gpus = topology.machine_gpus(&[fifth, ghost]);
    let ordinals: Vec<_> = gpus.iter().map(|gpu| gpu.ordinal).collect();
    assert_eq!(ordinals[..3], [Some(0), Some(1), None]);
    assert_eq!(gpus.len(), 9);
    let MachineGpu { uuid: known, numa_node, cpus, rdma, links, .. } = &gpus[0];
    assert_eq!((*known, *numa_node), (Some(uuid(5)), Some(1)));
    assert_eq!((cpus.to_string().as_str(), rdma[0].name.as_str()), ("56-111,168-223", "mlx5_5"));
    assert_eq!(links[1], Some(GpuLink::Nvlink));
    assert_eq!((gpus[1].numa_node, gpus[1].cpus.len()), (None, 0));
    assert_eq!((gpus[2].pci, gpus[2].uuid), (pci("0000:13:00.0"), None));
    let json = serde_json::to_value(&gpus[0]).expect("JSON");
    assert_eq!(json["rdma"][0]["distance"], "PIX");
    assert_eq!(json["links"][1], "nvlink");
}
