//! The address of this host that peers get.

use std::net::{IpAddr, Ipv4Addr, UdpSocket};

use uccl_device::Interface;

use crate::{
    config::{Config, Selection},
    drive::places,
    error::{Error, Result},
};

/// The address that an endpoint with these settings gives to its peers. It is the address that the
/// endpoint is bound to, if any. Otherwise it is one at which peers reach this host: on a selected
/// interface, or, if peers reach several equally well, on the NIC nearest to the endpoint's GPU.
///
/// # Errors
/// [`Error::Invalid`]: no selected interface has an address.
pub fn told_ip(config: &Config) -> Result<IpAddr> {
    if let Some(ip) = config.bind.filter(|ip| !ip.is_unspecified()) {
        return Ok(ip);
    }
    let ip = reachable_ip();
    match &config.interfaces {
        Some(selection) => {
            let machine = uccl_device::Topology::of_this_machine();
            let interfaces = machine.map(|machine| machine.interfaces).unwrap_or_default();
            selected_ip(selection, &interfaces, ip)
        }
        None => Ok(places::address_near(config.gpu_index, ip)),
    }
}

/// An address of a selected interface: `ip` if it is one. Otherwise IPv4 comes before IPv6, and an
/// address that only this host reaches comes last.
fn selected_ip(selection: &Selection, interfaces: &[Interface], ip: IpAddr) -> Result<IpAddr> {
    let usable =
        |interface: &&Interface| interface.is_up() && selection.takes(&interface.name, None);
    let mut ips: Vec<IpAddr> = interfaces
        .iter()
        .filter(usable)
        .flat_map(|interface| interface.addresses.clone())
        .collect();
    ips.retain(|ip| !is_link_local(ip));
    ips.sort_by_key(|known| (*known != ip, known.is_loopback(), known.is_ipv6()));
    ips.first().copied().ok_or_else(|| {
        let all: Vec<_> = interfaces.iter().map(|interface| interface.name.as_str()).collect();
        Error::Invalid(format!(
            "UCCL_SOCKET_IFNAME={selection}: no such network interface is up and has an address; there are {}",
            all.join(", ")
        ))
    })
}

fn is_link_local(ip: &IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local())
}

/// The address at which others would reach this host: the source address of the default route.
pub fn reachable_ip() -> IpAddr {
    let from = |bind: &str, to: &str| {
        let socket = UdpSocket::bind(bind).ok()?;
        // Chooses a route and an address; sends nothing.
        socket.connect(to).ok()?;
        let ip = socket.local_addr().ok()?.ip();
        (!ip.is_unspecified() && !ip.is_loopback()).then_some(ip)
    };
    from("0.0.0.0:0", "192.0.2.1:9")
        .or_else(|| from("[::]:0", "[2001:db8::1]:9"))
        .or_else(first_interface_ip)
        .unwrap_or(Ipv4Addr::LOCALHOST.into())
}

/// An address of an interface that is up, on a host without a default route.
fn first_interface_ip() -> Option<IpAddr> {
    let machine = uccl_device::Topology::of_this_machine().ok()?;
    let up = machine.interfaces.iter().filter(|interface| interface.is_up());
    let mut ips: Vec<IpAddr> = up.flat_map(|interface| interface.addresses.clone()).collect();
    ips.retain(|ip| !ip.is_loopback() && !is_link_local(ip));
    ips.sort_by_key(IpAddr::is_ipv6);
    ips.first().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_are_told_an_address_of_a_selected_interface() {
        let loopback =
            Config { interfaces: Some("lo".parse().expect("a name")), ..Config::default() };
        assert!(told_ip(&loopback).expect("every host has one").is_loopback());
        let bound = Config { bind: Some([192, 0, 2, 7].into()), ..loopback };
        assert_eq!(told_ip(&bound).expect("the bound one"), IpAddr::from([192, 0, 2, 7]));
        let none =
            Config { interfaces: Some("no-such".parse().expect("a name")), ..Config::default() };
        let refused = told_ip(&none).expect_err("no such interface").to_string();
        assert!(refused.contains("no-such") && refused.contains("lo"), "{refused}");
    }
}
