//! Lengths of datagrams that an interface and the networks behind it take.

use std::{fs, net::IpAddr};

use uccl_wire::datagram::MIN_DATAGRAM;

/// MTUs of networks that are tried after that of the interface: jumbo frames, Ethernet, tunnels
/// over it, and the least of IPv6 (RFC 8200).
const MTUS: [u32; 4] = [9000, 1500, 1400, 1280];
/// The MTU where none is known.
const ETHERNET: u32 = 1500;

/// Bytes of IP's and UDP's headers.
fn overhead(ip: IpAddr) -> u32 {
    if ip.is_ipv4() { 28 } else { 48 }
}

/// The MTU of the interface with this address.
pub(crate) fn mtu_of(ip: IpAddr) -> u32 {
    let interfaces = if_addrs::get_if_addrs().unwrap_or_default();
    let own = interfaces.into_iter().find(|interface| interface.ip() == ip);
    let read = |name: String| fs::read_to_string(format!("/sys/class/net/{name}/mtu")).ok();
    let mtu = own.and_then(|own| read(own.name)).and_then(|text| text.trim().parse().ok());
    mtu.unwrap_or(ETHERNET)
}

/// Lengths to try one after another, the longest first.
pub(crate) fn lengths(ip: IpAddr, mtu: u32, most: u32) -> Vec<u32> {
    let longest = mtu.saturating_sub(overhead(ip)).min(most).max(MIN_DATAGRAM);
    let shorter = MTUS.into_iter().map(|mtu| mtu - overhead(ip)).filter(|len| *len < longest);
    [longest].into_iter().chain(shorter).collect()
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use super::*;

    #[test]
    fn shorter_lengths_follow_the_interface_s() {
        let (v4, v6) = (Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into());
        assert_eq!(lengths(v4, 65_536, 16_456), [16_456, 8972, 1472, 1372, 1252]);
        assert_eq!(lengths(v6, 1500, 16_456), [1452, 1352, 1232]);
        assert_eq!(lengths(v4, 1000, 16_456), [972]);
        assert_eq!(lengths(v4, 0, 0), [MIN_DATAGRAM]);
    }

    #[test]
    fn loopback_has_a_long_mtu() {
        assert!(mtu_of(Ipv4Addr::LOCALHOST.into()) >= 1280);
        assert_eq!(mtu_of(Ipv4Addr::new(203, 0, 113, 77).into()), ETHERNET, "not this host's");
    }
}
