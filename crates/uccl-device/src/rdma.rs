//! RDMA devices: what `/sys/class/infiniband` lists (InfiniBand, RoCE, iWARP, EFA).

use std::path::Path;

use serde::Serialize;

use crate::{
    pci::{PciAddress, PciTree, address_in},
    source::Source,
};

/// An RDMA device.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct RdmaDevice {
    /// Its name: `mlx5_0`, `rxe0`.
    pub name: String,
    /// The kernel driver of its device.
    pub driver: Option<String>,
    /// Where it is on the PCI bus; none for a software device.
    pub pci: Option<PciAddress>,
    /// The NUMA node it hangs off.
    pub numa_node: Option<u32>,
    /// Its network interfaces.
    pub interfaces: Vec<String>,
    /// Its ports, from 1.
    pub ports: Vec<RdmaPort>,
}

/// A port of an RDMA device.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct RdmaPort {
    /// Its number.
    pub number: u32,
    /// `ACTIVE`, `DOWN`, `INIT`, ….
    pub state: Option<String>,
    /// Signalling rate in Gbit/s.
    pub rate_gbps: Option<u32>,
    /// `InfiniBand` or `Ethernet`.
    pub link_layer: Option<String>,
}

impl RdmaDevice {
    /// Whether some port can carry traffic.
    pub fn is_active(&self) -> bool {
        self.ports.iter().any(|port| port.state.as_deref() == Some("ACTIVE"))
    }

    pub(crate) fn read_all(source: &Source, pci: &PciTree) -> Vec<Self> {
        let names = source.names("sys/class/infiniband");
        names.into_iter().map(|name| Self::read(source, pci, name)).collect()
    }

    fn read(source: &Source, tree: &PciTree, name: String) -> Self {
        let folder = Path::new("sys/class/infiniband").join(&name);
        let pci = source.resolved(folder.join("device")).as_deref().and_then(address_in);
        let mut ports: Vec<_> = source
            .names(folder.join("ports"))
            .iter()
            .filter_map(|number| number.parse().ok())
            .map(|number| RdmaPort::read(source, &folder.join(format!("ports/{number}")), number))
            .collect();
        ports.sort_by_key(|port| port.number);
        Self {
            driver: source.link_name(folder.join("device/driver")),
            pci,
            numa_node: pci.and_then(|address| tree.numa_node(address)),
            interfaces: source.names(folder.join("device/net")),
            ports,
            name,
        }
    }
}

impl RdmaPort {
    fn read(source: &Source, folder: &Path, number: u32) -> Self {
        // "4: ACTIVE" and "100 Gb/sec (4X EDR)".
        let state = source.text(folder.join("state"));
        let rate = source.text(folder.join("rate"));
        Self {
            number,
            state: state.map(|text| match text.split_once(':') {
                Some((_, state)) => state.trim().to_owned(),
                None => text,
            }),
            rate_gbps: rate.and_then(|text| {
                let gbps: f64 = text.split_whitespace().next()?.parse().ok()?;
                (gbps > 0.0).then_some(gbps as u32)
            }),
            link_layer: source.text(folder.join("link_layer")),
        }
    }
}
