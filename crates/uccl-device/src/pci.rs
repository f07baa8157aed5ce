//! PCI addresses, and how far apart two of them are.

use std::{collections::BTreeMap, fmt, path::Path, str::FromStr};

use serde::{Serialize, Serializer};

use crate::{error::ParsePciAddressError, source::Source};

/// The address of a PCI device: domain, bus, device and function.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct PciAddress {
    /// Also called segment; more than 16 bits wide behind some host bridges.
    pub domain: u32,
    /// The bus.
    pub bus: u8,
    /// The device on the bus, below 32.
    pub device: u8,
    /// The function of the device, below 8.
    pub function: u8,
}

impl FromStr for PciAddress {
    type Err = ParsePciAddressError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse(text).ok_or_else(|| ParsePciAddressError(text.to_owned()))
    }
}

fn parse(text: &str) -> Option<PciAddress> {
    let hex = |digits: &str, widths: std::ops::RangeInclusive<usize>| {
        let plain = digits.bytes().all(|b| b.is_ascii_hexdigit());
        (plain && widths.contains(&digits.len())).then(|| u32::from_str_radix(digits, 16).ok())?
    };
    let (domain, rest) = text.split_once(':')?;
    let (bus, rest) = rest.split_once(':')?;
    let (device, function) = rest.split_once('.')?;
    let address = PciAddress {
        domain: hex(domain, 4..=8)?,
        bus: u8::try_from(hex(bus, 2..=2)?).ok()?,
        device: u8::try_from(hex(device, 2..=2)?).ok()?,
        function: u8::try_from(hex(function, 1..=1)?).ok()?,
    };
    (address.device < 32 && address.function < 8).then_some(address)
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

impl Serialize for PciAddress {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// How far apart two PCI devices are, nearest first, in the terms of `nvidia-smi topo` and NCCL.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum PciDistance {
    /// At most one PCIe switch between them.
    Pix,
    /// Several PCIe switches, no host bridge.
    Pxb,
    /// Through one host bridge: usually the CPU.
    Phb,
    /// Through several host bridges of one NUMA node.
    Node,
    /// Across NUMA nodes.
    Sys,
}

impl fmt::Display for PciDistance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pix => "PIX",
            Self::Pxb => "PXB",
            Self::Phb => "PHB",
            Self::Node => "NODE",
            Self::Sys => "SYS",
        })
    }
}

/// Every PCI device, and its path from its host bridge.
#[derive(Clone, Debug, Default)]
pub(crate) struct PciTree {
    devices: BTreeMap<PciAddress, Place>,
}

#[derive(Clone, Debug)]
struct Place {
    /// The host bridge as sysfs names it: `pci0000:00`.
    host_bridge: String,
    /// Bridges from the host bridge down, and the device itself last.
    chain: Vec<PciAddress>,
    numa_node: Option<u32>,
}

/// A PCIe switch is two bridges: its upstream port and one of its downstream ports.
const BELOW_ONE_SWITCH: usize = 2;

impl PciTree {
    pub(crate) fn read(source: &Source) -> Self {
        let folder = Path::new("sys/bus/pci/devices");
        let devices = source
            .names(folder)
            .into_iter()
            .filter_map(|name| {
                let address = name.parse().ok()?;
                let way = source.resolved(folder.join(&name))?;
                let (host_bridge, chain) = chain(&way)?;
                let numa_node = source.value::<u32>(folder.join(&name).join("numa_node"));
                Some((address, Place { host_bridge, chain, numa_node }))
            })
            .collect();
        Self { devices }
    }

    /// The NUMA node of a device. `None` if there is no such device, or if the kernel does not know
    /// (it reports -1).
    pub(crate) fn numa_node(&self, address: PciAddress) -> Option<u32> {
        self.devices.get(&address)?.numa_node
    }

    pub(crate) fn addresses(&self) -> impl Iterator<Item = PciAddress> {
        self.devices.keys().copied()
    }

    /// `one_node`: the machine has a single NUMA node, so that a node that the kernel does not name
    /// can only be that one.
    pub(crate) fn distance(
        &self,
        a: PciAddress,
        b: PciAddress,
        one_node: bool,
    ) -> Option<PciDistance> {
        let (a, b) = (self.devices.get(&a)?, self.devices.get(&b)?);
        if a.host_bridge != b.host_bridge {
            let same_node = match (a.numa_node, b.numa_node) {
                (Some(a), Some(b)) => a == b,
                _ => one_node,
            };
            return Some(if same_node { PciDistance::Node } else { PciDistance::Sys });
        }
        let shared = a.chain.iter().zip(&b.chain).take_while(|(a, b)| a == b).count();
        let below = (a.chain.len() - shared).max(b.chain.len() - shared);
        Some(match shared {
            0 => PciDistance::Phb,
            _ if below <= BELOW_ONE_SWITCH => PciDistance::Pix,
            _ => PciDistance::Pxb,
        })
    }
}

/// The host bridge and the addresses in a device's resolved path.
fn chain(path: &Path) -> Option<(String, Vec<PciAddress>)> {
    let mut names = path.iter().filter_map(|name| name.to_str());
    let host_bridge = names.find(|name| is_host_bridge(name))?.to_owned();
    let chain: Vec<_> = names.map_while(|name| name.parse().ok()).collect();
    (!chain.is_empty()).then_some((host_bridge, chain))
}

fn is_host_bridge(name: &str) -> bool {
    name.strip_prefix("pci").is_some_and(|rest| {
        rest.split_once(':').is_some_and(|(domain, bus)| {
            domain.len() >= 4
                && bus.len() == 2
                && (domain.bytes().chain(bus.bytes())).all(|b| b.is_ascii_hexdigit())
        })
    })
}

/// The PCI device that a device's resolved path leads through last.
pub(crate) fn address_in(path: &Path) -> Option<PciAddress> {
    path.iter().rev().find_map(|name| name.to_str()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written() {
        for text in ["0000:00:03.0", "0001:af:1f.7", "10000:e1:00.0"] {
            let address: PciAddress = text.parse().expect(text);
            assert_eq!(address.to_string(), text);
        }
        let upper: PciAddress = "0000:AF:00.0".parse().expect("upper case");
        assert_eq!(upper.to_string(), "0000:af:00.0");
        for wrong in ["", "0000:00:03", "00:03.0", "0000:00:20.0", "0000:00:03.8", "0000:0:+3.0"] {
            assert!(wrong.parse::<PciAddress>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn the_way_to_a_device_starts_at_its_host_bridge() {
        let path = Path::new("/sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0/virtio2/net/eth0");
        let (bridge, chain) = chain(path).expect("a PCI path");
        assert_eq!(bridge, "pci0000:3a");
        assert_eq!(chain.len(), 2);
        assert_eq!(address_in(path), Some(chain[1]));
        assert!(super::chain(Path::new("/sys/devices/virtual/net/lo")).is_none());
    }
}
