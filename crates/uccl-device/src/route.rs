//! The kernel's IPv4 routes, as far as they say which interfaces reach the same hosts.

use std::net::{IpAddr, Ipv4Addr};

use serde::Serialize;

use crate::{
    net::{Interface, InterfaceKind},
    nic::Place,
    source::Source,
    topology::Topology,
};

/// A route of the main table.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[non_exhaustive]
pub struct Route {
    /// The interface that it leaves by.
    pub interface: String,
    /// Where it leads to.
    pub destination: Ipv4Addr,
    /// Which bits of the destination count; none in the default route.
    pub mask: Ipv4Addr,
    /// Whether a gateway is on the way; else the hosts are on the link.
    pub gateway: bool,
    /// Lower is preferred.
    pub metric: u32,
}

const FLAG_UP: u32 = 1;
const FLAG_GATEWAY: u32 = 2;
const FLAG_REJECT: u32 = 0x200;

impl Route {
    pub(crate) fn read_all(source: &Source) -> Vec<Self> {
        let text = source.text("proc/net/route").unwrap_or_default();
        text.lines().skip(1).filter_map(Self::parse).collect()
    }

    /// From `eth0 00000000 0101A8C0 0003 0 0 100 00000000 0 0 0`: interface, destination, gateway, flags,
    /// two counters, metric, mask. Addresses are words as they lie in the kernel's memory.
    fn parse(line: &str) -> Option<Self> {
        let words: Vec<_> = line.split_whitespace().collect();
        let [interface, destination, _, flags, _, _, metric, mask, ..] = words.as_slice() else {
            return None;
        };
        let address = |text: &str| {
            let word = u32::from_str_radix(text, 16).ok()?;
            Some(Ipv4Addr::from(word.to_ne_bytes()))
        };
        let flags = u32::from_str_radix(flags, 16).ok()?;
        (flags & (FLAG_UP | FLAG_REJECT) == FLAG_UP).then_some(Self {
            interface: (*interface).to_owned(),
            destination: address(destination)?,
            mask: address(mask)?,
            gateway: flags & FLAG_GATEWAY != 0,
            metric: metric.parse().ok()?,
        })
    }

    fn is_default(&self) -> bool {
        self.mask.is_unspecified()
    }

    /// Whether an address is where it leads to, without a gateway.
    fn has_on_link(&self, ip: Ipv4Addr) -> bool {
        !self.gateway
            && !self.is_default()
            && ip.to_bits() & self.mask.to_bits() == self.destination.to_bits()
    }
}

impl Topology {
    /// The address, among those at which others reach this host as well as at `ip`, whose NIC is nearest
    /// to `place`; `ip` itself if there are none, or if none is known to be nearer than others.
    ///
    /// As well means: on another physical interface that is up, and either in the same network as `ip`, or
    /// both interfaces have a default route of the same metric. Of IPv6 routes nothing is known here.
    pub fn address_near(&self, place: Place, ip: IpAddr) -> IpAddr {
        let IpAddr::V4(chosen) = ip else { return ip };
        let usable =
            |interface: &Interface| interface.kind == InterfaceKind::Physical && interface.is_up();
        let mut usable_ones = self.interfaces.iter().filter(|interface| usable(interface));
        let Some(today) = usable_ones.find(|interface| interface.addresses.contains(&ip)) else {
            return ip;
        };
        let ranked = self.rank_interfaces(place, |interface| {
            usable(interface) && self.as_good_as(today, chosen, interface).is_some()
        });
        let nearest = match ranked.first() {
            Some(nic) if ranked.len() > 1 && nic.distance.is_some() => &nic.name,
            _ => return ip,
        };
        let nearest = self.interfaces.iter().find(|interface| interface.name == *nearest);
        nearest.and_then(|nearest| self.as_good_as(today, chosen, nearest)).map_or(ip, IpAddr::V4)
    }

    /// The address of `other` that others reach as well as `ip` of `today`.
    fn as_good_as(&self, today: &Interface, ip: Ipv4Addr, other: &Interface) -> Option<Ipv4Addr> {
        if today.name == other.name {
            return Some(ip);
        }
        let routes = |name: &str| {
            let name = name.to_owned();
            self.routes.iter().filter(move |route| route.interface == name)
        };
        let addresses = || {
            other.addresses.iter().filter_map(|ip| match ip {
                IpAddr::V4(ip) if !ip.is_loopback() && !ip.is_link_local() => Some(*ip),
                _ => None,
            })
        };
        let network = routes(&today.name).find(|route| route.has_on_link(ip));
        let same_network = network.and_then(|network| {
            let alike = |route: &&Route| {
                (route.destination, route.mask) == (network.destination, network.mask)
            };
            let theirs = routes(&other.name).find(alike)?;
            addresses().find(|ip| theirs.has_on_link(*ip))
        });
        let default = |name: &str| {
            routes(name).filter(|route| route.is_default()).map(|route| route.metric).min()
        };
        let same_default =
            default(&today.name).is_some() && default(&today.name) == default(&other.name);
        same_network.or_else(|| if same_default { addresses().next() } else { None })
    }
}
