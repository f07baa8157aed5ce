//! Finds which of this host's addresses is near to a piece of memory, among those that others can
//! reach equally well.

use std::net::{IpAddr, Ipv4Addr};

use crate::{
    net::{Interface, InterfaceKind},
    nic::Place,
    route::Route,
    topology::Topology,
};

impl Topology {
    /// Among the addresses at which others reach this host as well as at `ip`, the one with the NIC
    /// nearest to `place`. It is `ip` itself if there are no others, or if none is known to be
    /// nearer.
    ///
    /// "As well" means: the address is on another physical interface that is up, and either in the
    /// same network as `ip`, or both interfaces have a default route with the same metric. IPv6
    /// routes are not known here.
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

    /// The address of interface `other` that others reach as well as `ip` of interface `today`.
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
