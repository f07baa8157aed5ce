//! The interfaces that carry collectives over sockets.

use std::net::IpAddr;

use crate::{
    net::{Interface, InterfaceKind},
    selection::Selection,
};

/// Beginnings of the names of interfaces that join containers of one host: no other host is reached
/// by them.
const INSIDE: [&str; 3] = ["docker", "veth", "virbr"];

/// The interfaces that carry collectives: those of a selection, or without one all that are up and
/// have an address, but loopback and those between containers of this host; loopback if there is no
/// other.
#[must_use]
pub fn carriers<'a>(all: &'a [Interface], selection: Option<&Selection>) -> Vec<&'a Interface> {
    let works = |interface: &&Interface| {
        let has_address = usable_addresses(interface).next().is_some();
        interface.is_up() && has_address
    };
    let there = || all.iter().filter(works);
    if let Some(selection) = selection {
        return there().filter(|interface| selection.takes(&interface.name, None)).collect();
    }
    let is_loopback = |interface: &&Interface| interface.kind == InterfaceKind::Loopback;
    let is_inside =
        |interface: &&Interface| INSIDE.iter().any(|begin| interface.name.starts_with(begin));
    let outside: Vec<_> = there().filter(|one| !is_loopback(one) && !is_inside(one)).collect();
    if outside.is_empty() { there().filter(is_loopback).collect() } else { outside }
}

/// Addresses that a peer can use: those that hold on one link alone need its name beside them.
pub fn usable_addresses(interface: &Interface) -> impl Iterator<Item = IpAddr> + '_ {
    let is_usable = |ip: &&IpAddr| match ip {
        IpAddr::V4(ip) => !ip.is_link_local(),
        IpAddr::V6(ip) => !ip.is_unicast_link_local(),
    };
    interface.addresses.iter().filter(is_usable).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interface(name: &str, kind: InterfaceKind, address: &str) -> Interface {
        Interface {
            name: name.into(),
            kind,
            driver: None,
            mtu_bytes: None,
            speed_mbps: None,
            operstate: Some("up".into()),
            pci: None,
            numa_node: None,
            addresses: vec![address.parse().expect("an address")],
        }
    }

    fn machine() -> Vec<Interface> {
        vec![
            interface("docker0", InterfaceKind::Virtual, "172.17.0.1"),
            interface("eth0", InterfaceKind::Physical, "10.0.0.1"),
            interface("eth1", InterfaceKind::Physical, "fe80::1"),
            Interface {
                operstate: Some("down".into()),
                ..interface("eth2", InterfaceKind::Physical, "10.0.2.1")
            },
            interface("eth3", InterfaceKind::Physical, "10.0.3.1"),
            interface("lo", InterfaceKind::Loopback, "127.0.0.1"),
        ]
    }

    fn names(all: &[Interface], selection: Option<&str>) -> Vec<String> {
        let selection = selection.map(|text| text.parse().expect("a selection"));
        let found = carriers(all, selection.as_ref());
        found.into_iter().map(|interface| interface.name.clone()).collect()
    }

    #[test]
    fn interfaces_that_reach_other_hosts_carry_collectives() {
        let machine = machine();
        assert_eq!(names(&machine, None), ["eth0", "eth3"]);
        assert_eq!(names(&machine[5..], None), ["lo"]);
        assert_eq!(names(&machine[..1], None), [""; 0]);
    }

    #[test]
    fn a_selection_decides_alone() {
        let machine = machine();
        assert_eq!(names(&machine, Some("docker,lo")), ["docker0", "lo"]);
        assert_eq!(names(&machine, Some("^docker,lo")), ["eth0", "eth3"]);
        assert_eq!(names(&machine, Some("=eth2")), [""; 0], "it is down");
    }
}
