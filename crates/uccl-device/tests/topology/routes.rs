//! The address of a host that others get, so that its NIC is near to a GPU.

use std::net::IpAddr;

use uccl_device::{Place, Topology};

use crate::{machine::Machine, pci};

const HEAD: &str =
    "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT";

/// A word as the kernel writes an address.
fn word(address: [u8; 4]) -> String {
    format!("{:08X}", u32::from_ne_bytes(address))
}

/// A line for a default route, and one for the network that the interface is on.
fn routes(name: &str, network: [u8; 4], metric: Option<u32>) -> String {
    let (none, mask) = (word([0; 4]), word([255, 255, 255, 0]));
    let on_link = format!("{name}\t{}\t{none}\t0001\t0\t0\t100\t{mask}\t0\t0\t0\n", word(network));
    let gateway = word([network[0], network[1], network[2], 1]);
    let default = metric.map(|metric| {
        format!("{name}\t{none}\t{gateway}\t0003\t0\t0\t{metric}\t{none}\t0\t0\t0\n")
    });
    default.unwrap_or_default() + &on_link
}

/// Two sockets with a GPU and a NIC each, and these routes. `eth0` has 10.0.0.5, `eth1` the other.
fn machine(lines: &[String], second: [u8; 4]) -> Topology {
    let machine = Machine::of_two_sockets();
    machine.nic("pci0000:80/0000:80:02.0", "1", "eth1");
    machine.file("proc/net/route", &format!("{HEAD}\n{}", lines.concat()));
    let mut topology = machine.read();
    topology.interfaces[0].addresses = vec![FIRST];
    topology.interfaces[1].addresses = vec![second.into()];
    topology
}

const FIRST: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 5));

fn far() -> Place {
    Place::Device(pci("0000:80:00.0"))
}

fn near() -> Place {
    Place::Device(pci("0000:10:00.0"))
}

#[test]
fn an_address_in_the_same_network_is_as_good() {
    let lines = [routes("eth0", [10, 0, 0, 0], Some(100)), routes("eth1", [10, 0, 0, 0], None)];
    let topology = machine(&lines, [10, 0, 0, 6]);
    assert_eq!(topology.routes.len(), 3);
    assert_eq!(topology.address_near(far(), FIRST), IpAddr::from([10, 0, 0, 6]));
    assert_eq!(topology.address_near(near(), FIRST), FIRST);
    // For memory of no known place one is as near as the other.
    assert_eq!(topology.address_near(Place::Host, FIRST), FIRST);
}

#[test]
fn a_default_route_of_the_same_metric_is_as_good() {
    let both =
        |metric| [routes("eth0", [10, 0, 0, 0], Some(100)), routes("eth1", [10, 1, 0, 0], metric)];
    let second = [10, 1, 0, 5];
    assert_eq!(machine(&both(Some(100)), second).address_near(far(), FIRST), IpAddr::from(second));
    assert_eq!(machine(&both(Some(101)), second).address_near(far(), FIRST), FIRST);
    assert_eq!(machine(&both(None), second).address_near(far(), FIRST), FIRST);
}

#[test]
fn an_address_that_cannot_be_used_is_not_told() {
    let lines =
        [routes("eth0", [10, 0, 0, 0], Some(100)), routes("eth1", [10, 0, 0, 0], Some(100))];
    let mut topology = machine(&lines, [10, 0, 0, 6]);
    topology.interfaces[1].operstate = Some("down".into());
    assert_eq!(topology.address_near(far(), FIRST), FIRST);
    let mut topology = machine(&lines, [169, 254, 1, 1]);
    assert_eq!(topology.address_near(far(), FIRST), FIRST);
    // An address that is on no device of this machine, and IPv6, remain the same.
    for other in ["192.168.7.7", "fd00::1"] {
        let other = other.parse().expect("an address");
        topology.interfaces[0].addresses.push("fd00::1".parse().expect("an address"));
        assert_eq!(topology.address_near(far(), other), other);
    }
}

#[test]
fn one_interface_is_no_choice_and_broken_lines_are_none() {
    let lines = [routes("eth0", [10, 0, 0, 0], Some(100)), "eth1 nonsense\n\n eth1 1 2 3\n".into()];
    let topology = machine(&lines, [10, 0, 0, 6]);
    assert_eq!((topology.routes.len(), topology.address_near(far(), FIRST)), (2, FIRST));
    assert!(Machine::new().read().routes.is_empty());
}
