//! Which network one of this machine's addresses is on.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use if_addrs::IfAddr;

/// The network of one of this host's addresses, as `192.0.2.0/24`. Empty for an address that this
/// host does not have, and for a link-local one: every link has that network, so it identifies
/// none.
pub fn network_of(ip: IpAddr) -> String {
    if is_link_local(ip) {
        return String::new();
    }
    let interfaces = if_addrs::get_if_addrs().unwrap_or_default();
    let found = interfaces.into_iter().find(|interface| interface.ip() == ip);
    found.map(|interface| name_of(&interface.addr)).unwrap_or_default()
}

/// Whether one of this host's addresses is on a network that contains another address.
pub fn shares_network(ours: IpAddr, theirs: IpAddr) -> bool {
    if is_link_local(ours) {
        return is_link_local(theirs);
    }
    let interfaces = if_addrs::get_if_addrs().unwrap_or_default();
    let found = interfaces.into_iter().find(|interface| interface.ip() == ours);
    found.is_some_and(|interface| contains(&interface.addr, theirs))
}

/// Whether an address is on the network of an interface's address.
fn contains(ours: &IfAddr, theirs: IpAddr) -> bool {
    match (ours, theirs) {
        (IfAddr::V4(v4), IpAddr::V4(ip)) => {
            (v4.ip.to_bits() ^ ip.to_bits()) & v4.netmask.to_bits() == 0
        }
        (IfAddr::V6(v6), IpAddr::V6(ip)) => {
            (v6.ip.to_bits() ^ ip.to_bits()) & v6.netmask.to_bits() == 0
        }
        _ => false,
    }
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
        let shares = |theirs: [u8; 4]| shares_network(Ipv4Addr::LOCALHOST.into(), theirs.into());
        assert!(shares([127, 9, 9, 9]) && !shares([128, 0, 0, 1]));
        assert!(!shares_network(Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()));
        assert!(!shares_network([203, 0, 113, 77].into(), [203, 0, 113, 78].into()), "not ours");
    }
}
