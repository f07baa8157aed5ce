//! Networks: their ports, and the routes through them.

use crate::{
    faults::LinkFaults,
    port::{Port, PortParams},
};

/// The shape of a network.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Topology {
    /// All hosts are at one switch, with a queue towards each of them.
    OneSwitch {
        /// How many hosts there are.
        hosts: u16,
    },
    /// Hosts are at leaves, and each leaf has a link to each spine. A leaf hashes a packet to a
    /// spine by the ends of its flow and its entropy (ECMP).
    LeafSpine {
        /// How many leaves there are.
        leaves: u16,
        /// Hosts of each leaf.
        hosts_per_leaf: u16,
        /// How many spines there are.
        spines: u16,
    },
}

impl Topology {
    /// How many hosts there are.
    #[must_use]
    pub fn hosts(&self) -> u16 {
        match *self {
            Self::OneSwitch { hosts } => hosts,
            Self::LeafSpine { leaves, hosts_per_leaf, .. } => leaves * hosts_per_leaf,
        }
    }

    /// The most links on a way from host to host.
    #[must_use]
    pub fn most_hops(&self) -> u64 {
        match self {
            Self::OneSwitch { .. } => 2,
            Self::LeafSpine { .. } => 4,
        }
    }
}

/// The properties of all links of a network.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Links {
    /// The speed of a link, in bytes per second.
    pub bytes_per_s: f64,
    /// The delay of a link, in nanoseconds.
    pub delay_ns: u64,
    /// The speed of the switch's links to hosts, or of the links between switches where there are
    /// some, as part of the others'.
    pub bottleneck: f64,
    /// Bytes that may wait at a port of a switch.
    pub queue_bytes: u64,
    /// The queue from which on some packets are marked, and from which on all are, in bytes.
    pub mark: Option<(u64, u64)>,
    /// Faults that every packet may meet once: at the port of its host.
    pub faults: LinkFaults,
    /// Faults of the first links between switches, or of the first links to hosts where there are
    /// none between switches.
    pub fabric_faults: LinkFaults,
    /// How many links these are.
    pub faulty_links: u16,
    /// The speed of these links, as part of their own.
    pub faulty_speed: f64,
}

/// The ports that a packet passes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Route {
    pub(crate) ports: [u16; 4],
    pub(crate) len: u8,
}

/// The ports of a network by number: those of the hosts, of the leaves to the hosts, of the leaves
/// to the spines, of the spines to the leaves.
pub(crate) fn ports(topology: &Topology, links: &Links) -> Vec<Port> {
    let hosts = topology.hosts();
    let plain = |bytes_per_s, capacity, faults, is_switch: bool| PortParams {
        bytes_per_s,
        delay_ns: links.delay_ns,
        capacity,
        mark: links.mark.filter(|_| is_switch),
        faults,
    };
    let slow = links.bytes_per_s * links.bottleneck;
    let (between, to_host) = match *topology {
        Topology::OneSwitch { .. } => (0, slow),
        Topology::LeafSpine { leaves, spines, .. } => (leaves * spines, links.bytes_per_s),
    };
    let fabric = |nth: u16, bytes_per_s: f64| match nth < links.faulty_links {
        true => {
            plain(bytes_per_s * links.faulty_speed, links.queue_bytes, links.fabric_faults, true)
        }
        false => plain(bytes_per_s, links.queue_bytes, LinkFaults::default(), true),
    };
    let none = LinkFaults::default();
    let own = (0..hosts).map(|_| plain(links.bytes_per_s, u64::MAX, links.faults, false));
    let down = (0..hosts).map(|nth| match between {
        0 => fabric(nth, to_host),
        _ => plain(to_host, links.queue_bytes, none, true),
    });
    let up = (0..between).map(|nth| fabric(nth, slow));
    let all = own.chain(down).chain(up.clone()).chain(up);
    all.map(|params| Port::new(&params)).collect()
}

/// The route from host to host of packets with this entropy.
pub(crate) fn route(topology: &Topology, from: u16, to: u16, entropy: u64) -> Route {
    let hosts = topology.hosts();
    match *topology {
        Topology::LeafSpine { leaves, hosts_per_leaf, spines }
            if from / hosts_per_leaf != to / hosts_per_leaf =>
        {
            let (leaf, other) = (from / hosts_per_leaf, to / hosts_per_leaf);
            let ends = u64::from(from) << 32 | u64::from(to) << 16;
            let spine = (mix(ends ^ mix(entropy)) % u64::from(spines)) as u16;
            // Both directions of a link have the same number, so they share their faults.
            let up = 2 * hosts + spine * leaves + leaf;
            let down = 2 * hosts + leaves * spines + spine * leaves + other;
            Route { ports: [from, up, down, hosts + to], len: 4 }
        }
        _ => Route { ports: [from, hosts + to, 0, 0], len: 2 },
    }
}

/// A hash of 64 bits (the finalizer of SplitMix64).
fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entropies_reach_all_spines_and_one_entropy_reaches_one() {
        let topology = Topology::LeafSpine { leaves: 4, hosts_per_leaf: 4, spines: 8 };
        let spines: std::collections::BTreeSet<_> =
            (0..64).map(|entropy| route(&topology, 1, 9, entropy).ports[1]).collect();
        assert_eq!(spines.len(), 8);
        let (once, again) = (route(&topology, 1, 9, 5), route(&topology, 1, 9, 5));
        assert_eq!((once.ports, once.len), (again.ports, 4));
        assert_eq!(route(&topology, 1, 2, 5).len, 2, "hosts of one leaf");
    }
}
