//! Ranks NICs by how near they are to a piece of memory.

use std::{cmp::Reverse, fmt};

use serde::Serialize;

use crate::{
    net::{Interface, InterfaceKind},
    pci::{PciAddress, PciDistance},
    rdma::RdmaDevice,
    topology::Topology,
};

/// Where a piece of memory is, for the search for NICs near it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Place {
    /// On the device at this address: a GPU's memory.
    Device(PciAddress),
    /// On a NUMA node: the host's memory.
    Node(u32),
    /// In the host's memory, on a node that is not known.
    Host,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device(pci) => write!(f, "{pci}"),
            Self::Node(node) => write!(f, "node {node}"),
            Self::Host => f.write_str("host"),
        }
    }
}

/// Which of the kernel's lists a NIC is on. Many NICs are on both, under two names.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum NicKind {
    /// Network interfaces.
    Interface,
    /// RDMA devices.
    Rdma,
}

/// The state of a NIC; the best first.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum NicState {
    /// A device with its link up.
    Up,
    /// A software interface with its link up: a bridge, a veth, soft-RoCE.
    Virtual,
    /// Its link is down.
    Down,
}

/// A NIC as it is seen from a piece of memory.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize)]
#[non_exhaustive]
pub struct NearNic {
    /// Its name: `mlx5_0`, `eth0`.
    pub name: String,
    /// Which list the name is on.
    pub kind: NicKind,
    /// Its PCI address.
    pub pci: Option<PciAddress>,
    /// How far it is from the memory; `None` for a NIC that is on no PCI bus and no NUMA node.
    pub distance: Option<PciDistance>,
    /// Whether it can be used.
    pub state: NicState,
    /// Its speed in Mbit/s, if the kernel reports it.
    pub speed_mbps: Option<u32>,
}

/// A NIC without its distance, which is computed later.
struct Nic<'a> {
    name: &'a str,
    kind: NicKind,
    pci: Option<PciAddress>,
    numa_node: Option<u32>,
    state: NicState,
    speed_mbps: Option<u32>,
}

/// NICs with the same merit are as good as each other for the memory they are compared for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Merit {
    state: NicState,
    /// NICs at an unknown distance come last.
    unknown: bool,
    distance: Option<PciDistance>,
    /// The distance between NUMA nodes (ACPI SLIT): some are nearer to each other than others.
    node_distance: u32,
    speed_mbps: Reverse<u32>,
}

impl<'a> Nic<'a> {
    fn of_interface(interface: &'a Interface) -> Option<Self> {
        let state = match (interface.kind, interface.is_up()) {
            (InterfaceKind::Loopback, _) => return None,
            (_, false) => NicState::Down,
            (InterfaceKind::Physical, true) => NicState::Up,
            (_, true) => NicState::Virtual,
        };
        Some(Self {
            name: &interface.name,
            kind: NicKind::Interface,
            pci: interface.pci,
            numa_node: interface.numa_node,
            state,
            speed_mbps: interface.speed_mbps,
        })
    }

    fn of_rdma(device: &'a RdmaDevice) -> Self {
        let state = match (device.is_active(), device.pci) {
            (false, _) => NicState::Down,
            (true, Some(_)) => NicState::Up,
            (true, None) => NicState::Virtual,
        };
        let fastest = device.ports.iter().filter_map(|port| port.rate_gbps).max();
        Self {
            name: &device.name,
            kind: NicKind::Rdma,
            pci: device.pci,
            numa_node: device.numa_node,
            state,
            speed_mbps: fastest.map(|gbps| gbps.saturating_mul(1000)),
        }
    }
}

impl Topology {
    /// The NICs of a kind, in the order in which memory at `place` should use them.
    ///
    /// NICs that are up come first, then the near ones ([`PciDistance`]), then the fast ones.
    /// Equally good NICs are in the order of the PCI bus, with an exception: GPUs for which the
    /// same NICs are best share them out. Each of these GPUs begins with other NICs, so that they
    /// do not all use the first. Every process of a machine gets the same answer, whichever GPUs it
    /// sees.
    ///
    /// Virtual NICs come after devices, and NICs that are down come last. Loopback is not listed.
    pub fn nics_near(&self, place: Place, kind: NicKind) -> Vec<NearNic> {
        self.rank(place, &self.nics(kind))
    }

    /// The NIC that memory at `place` should use: a usable RDMA device if there is one, else a
    /// usable network interface.
    pub fn nearest_nic(&self, place: Place) -> Option<NearNic> {
        [NicKind::Rdma, NicKind::Interface].into_iter().find_map(|kind| {
            let nearest = self.nics_near(place, kind).into_iter().next();
            nearest.filter(|nic| nic.state == NicState::Up)
        })
    }

    /// Like [`Self::nics_near`], for these network interfaces only.
    pub(crate) fn rank_interfaces(
        &self,
        place: Place,
        wanted: impl Fn(&Interface) -> bool,
    ) -> Vec<NearNic> {
        let wanted = self.interfaces.iter().filter(|interface| wanted(interface));
        self.rank(place, &wanted.filter_map(Nic::of_interface).collect::<Vec<_>>())
    }

    fn nics(&self, kind: NicKind) -> Vec<Nic<'_>> {
        match kind {
            NicKind::Interface => self.interfaces.iter().filter_map(Nic::of_interface).collect(),
            NicKind::Rdma => self.rdma.iter().map(Nic::of_rdma).collect(),
        }
    }

    fn rank(&self, place: Place, nics: &[Nic<'_>]) -> Vec<NearNic> {
        let mut order = self.order(place, nics);
        let best = self.best(&order);
        let turn = self.turn(place, nics, &order[..best]);
        if let Some(first) = order.get_mut(..best) {
            first.rotate_left(turn);
        }
        let near = |(merit, nic): &(Merit, &Nic<'_>)| NearNic {
            name: nic.name.to_owned(),
            kind: nic.kind,
            pci: nic.pci,
            distance: merit.distance,
            state: nic.state,
            speed_mbps: nic.speed_mbps,
        };
        order.iter().map(near).collect()
    }

    fn order<'a, 'n>(&self, place: Place, nics: &'a [Nic<'n>]) -> Vec<(Merit, &'a Nic<'n>)> {
        let mut order: Vec<_> = nics.iter().map(|nic| (self.merit(place, nic), nic)).collect();
        order.sort_by_key(|(merit, nic)| (*merit, nic.pci.is_none(), nic.pci, nic.name));
        order
    }

    /// How many NICs at the beginning are as good as the first.
    fn best(&self, order: &[(Merit, &Nic<'_>)]) -> usize {
        let first = order.first().map(|(merit, _)| *merit);
        order.iter().take_while(|(merit, _)| Some(*merit) == first).count()
    }

    /// How many of its best NICs a GPU leaves to the GPUs before it that have the same ones.
    fn turn(&self, place: Place, nics: &[Nic<'_>], best: &[(Merit, &Nic<'_>)]) -> usize {
        let Place::Device(pci) = place else { return 0 };
        let alike = |other: PciAddress| {
            let order = self.order(Place::Device(other), nics);
            let count = self.best(&order);
            count == best.len() && order.iter().zip(best).all(|(a, b)| a.1.name == b.1.name)
        };
        if best.len() < 2 || !self.gpus.iter().any(|gpu| gpu.pci == pci) {
            return 0;
        }
        let sharers: Vec<_> =
            self.gpus.iter().map(|gpu| gpu.pci).filter(|pci| alike(*pci)).collect();
        let index = sharers.iter().position(|sharer| *sharer == pci).unwrap_or(0);
        let each = (best.len() / sharers.len().max(1)).max(1);
        index * each % best.len()
    }

    fn merit(&self, place: Place, nic: &Nic<'_>) -> Merit {
        let distance = self.distance_to_nic(place, nic);
        let (from, to) = (self.node_of(place), nic.numa_node);
        Merit {
            state: nic.state,
            unknown: distance.is_none(),
            distance,
            node_distance: from.zip(to).map_or(0, |(from, to)| self.node_distance(from, to)),
            speed_mbps: Reverse(nic.speed_mbps.unwrap_or(0)),
        }
    }

    fn distance_to_nic(&self, place: Place, nic: &Nic<'_>) -> Option<PciDistance> {
        if let (Place::Device(here), Some(there)) = (place, nic.pci)
            && let Some(distance) = self.distance(here, there)
        {
            return Some(distance);
        }
        // Through one host bridge at best, as the CPU is between a node's memory and a device.
        let near = match place {
            Place::Device(_) => PciDistance::Node,
            Place::Node(_) | Place::Host => PciDistance::Phb,
        };
        let only = self.only_node();
        let (from, to) = (self.node_of(place)?, nic.numa_node.or(only)?);
        // The distance of a NIC that is on no bus and no node is unknown.
        (nic.pci.is_some() || nic.numa_node.is_some()).then_some(if from == to {
            near
        } else {
            PciDistance::Sys
        })
    }

    /// The NUMA node that a place is on. On a machine with a single node, it is that node.
    pub fn node_of(&self, place: Place) -> Option<u32> {
        let known = match place {
            Place::Device(pci) => self.pci().numa_node(pci),
            Place::Node(node) => Some(node),
            Place::Host => None,
        };
        known.or(self.only_node())
    }

    fn only_node(&self) -> Option<u32> {
        match self.numa_nodes.as_slice() {
            [node] => Some(node.id),
            _ => None,
        }
    }

    /// The distance between two NUMA nodes; 0 if the kernel does not report it.
    fn node_distance(&self, from: u32, to: u32) -> u32 {
        let Some(node) = self.numa_nodes.iter().find(|node| node.id == from) else { return 0 };
        let place = self.numa_nodes.iter().position(|node| node.id == to);
        place.and_then(|place| node.distances.get(place)).copied().unwrap_or(0)
    }
}
