//! Which network one of this machine's addresses is on.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use if_addrs::IfAddr;

/// The network of one of this host's addresses, as `192.0.2.0/24`. Empty for an address that this host does not have,
/// and for a link-local one: every link has that network, so it identifies none.
pub fn network_of(ip: IpAddr) -> String {
    if is_link_local(ip) {
        return String::new();
    }
    let interfaces = if_addrs::get_if_addrs().unwrap_or_default();
    let found = interfaces.into_iter().find(|interface| interface.ip() == ip);
    found.map(|interface| name_of(&interface.addr)).unwrap_or_default()
}

/// Whether an address is valid on its own link only.
pub fn is_link_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

fn name_of(address: &IfAddr) -> String {
    match address {
        IfAddr::V4(v4) => {
            let network = Ipv4Addr::from_bits(v4.ip.to_bits() & v4.netmask.to_bits());
            format!("{network}/{}", v4.netmask.to_bits().count_ones())
        }
        IfAddr::V6(v6) => {
            let network = Ipv6Addr::from_bits(v6.ip.to_bits() & v6.netmask.to_bits());
            format!("{network}/{}", v6.netmask.to_bits().count_ones())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_a_network_and_a_stranger_is_none() {
        assert_eq!(network_of(Ipv4Addr::LOCALHOST.into()), "127.0.0.0/8");
        assert_eq!(network_of([203, 0, 113, 77].into()), "");
        assert_eq!(network_of([169, 254, 1, 1].into()), "");
    }
}
