//! Network interfaces.

use std::{collections::BTreeMap, net::IpAddr, path::Path};

use serde::Serialize;

use crate::{
    pci::{PciAddress, PciTree, address_in},
    source::Source,
};

/// The kind of a network interface.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum InterfaceKind {
    /// The host's loopback interface.
    Loopback,
    /// A hardware device.
    Physical,
    /// Software: a bridge, a tunnel, one end of a veth pair.
    Virtual,
}

/// A network interface.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// Whether it is hardware, software or loopback.
    pub kind: InterfaceKind,
    /// The kernel driver of its device.
    pub driver: Option<String>,
    /// The longest packet it carries, in bytes.
    pub mtu_bytes: Option<u32>,
    /// Link speed in Mbit/s; unknown for most virtual devices.
    pub speed_mbps: Option<u32>,
    /// `up`, `down`, `unknown` (loopback's is), ….
    pub operstate: Option<String>,
    /// The PCI address of its device.
    pub pci: Option<PciAddress>,
    /// The NUMA node its device is attached to.
    pub numa_node: Option<u32>,
    /// Its addresses; empty when the topology is not the running machine's.
    pub addresses: Vec<IpAddr>,
}

/// `ARPHRD_LOOPBACK` of if_arp.h.
const TYPE_LOOPBACK: u32 = 772;

impl Interface {
    /// Whether it can carry traffic, as far as the kernel knows.
    pub fn is_up(&self) -> bool {
        match self.operstate.as_deref() {
            Some("up") => true,
            Some("unknown") => !self.addresses.is_empty(),
            _ => false,
        }
    }

    pub(crate) fn read_all(source: &Source, pci: &PciTree) -> Vec<Self> {
        let mut addresses = if source.is_live() { addresses() } else { BTreeMap::new() };
        source
            .names("sys/class/net")
            .into_iter()
            // The folder also holds plain files, such as bonding_masters.
            .filter(|name| source.path("sys/class/net").join(name).is_dir())
            .map(|name| {
                let addresses = addresses.remove(&name).unwrap_or_default();
                Self::read(source, pci, name, addresses)
            })
            .collect()
    }

    fn read(source: &Source, tree: &PciTree, name: String, addresses: Vec<IpAddr>) -> Self {
        let folder = Path::new("sys/class/net").join(&name);
        let device = source.resolved(folder.join("device"));
        let pci = device.as_deref().and_then(address_in);
        let kind = match (source.value(folder.join("type")), &device) {
            (Some(TYPE_LOOPBACK), _) => InterfaceKind::Loopback,
            (_, Some(_)) => InterfaceKind::Physical,
            (_, None) => InterfaceKind::Virtual,
        };
        Self {
            kind,
            driver: source.link_name(folder.join("device/driver")),
            mtu_bytes: source.value(folder.join("mtu")),
            // The file holds -1, 0 or u32::MAX if the driver does not know.
            speed_mbps: source
                .value(folder.join("speed"))
                .filter(|&mbps| mbps != 0 && mbps != u32::MAX),
            operstate: source.text(folder.join("operstate")),
            pci,
            numa_node: pci
                .and_then(|address| tree.numa_node(address))
                .or_else(|| source.value(folder.join("device/numa_node"))),
            addresses,
            name,
        }
    }
}

fn addresses() -> BTreeMap<String, Vec<IpAddr>> {
    let mut map: BTreeMap<String, Vec<IpAddr>> = BTreeMap::new();
    for interface in if_addrs::get_if_addrs().unwrap_or_default() {
        let ip = interface.ip();
        map.entry(interface.name).or_default().push(ip);
    }
    for addresses in map.values_mut() {
        addresses.sort();
        addresses.dedup();
    }
    map
}
