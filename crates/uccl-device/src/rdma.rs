//! RDMA devices, as `/sys/class/infiniband` lists them (InfiniBand, RoCE, EFA).

use std::{fmt, net::Ipv6Addr, path::Path};

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
    /// Its PCI address; none for a software device.
    pub pci: Option<PciAddress>,
    /// The NUMA node it is attached to.
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
    /// Its addresses, by index. Unused entries of the table are left out.
    pub gids: Vec<RdmaGid>,
    /// The largest payload of a packet, in bytes, that the port's network interface allows. Over
    /// InfiniBand the subnet decides, and sysfs does not show it.
    pub mtu_bytes: Option<u32>,
}

/// The kind of packets that are sent to a GID.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize)]
#[non_exhaustive]
pub enum GidKind {
    /// InfiniBand, or RoCE directly over Ethernet, which no router forwards.
    #[serde(rename = "IB/RoCE v1")]
    InfiniBandOrRoceV1,
    /// RoCE over UDP.
    #[serde(rename = "RoCE v2")]
    RoceV2,
}

/// An address of a port.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[non_exhaustive]
pub struct RdmaGid {
    /// Its index in the port's table.
    pub index: u32,
    /// The address. An IPv4 address is mapped to IPv6.
    pub address: Ipv6Addr,
    /// The kind of packets that are sent to a GID.
    pub kind: Option<GidKind>,
    /// The network interface that it belongs to.
    pub interface: Option<String>,
}

impl fmt::Display for GidKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InfiniBandOrRoceV1 => "IB/RoCE v1",
            Self::RoceV2 => "RoCE v2",
        })
    }
}

impl fmt::Display for RdmaGid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.index, self.address)?;
        self.kind.map_or(Ok(()), |kind| write!(f, " ({kind})"))
    }
}

impl RdmaGid {
    /// A GID that belongs to no interface.
    pub fn new(index: u32, address: Ipv6Addr, kind: Option<GidKind>) -> Self {
        Self { index, address, kind, interface: None }
    }

    /// The GIDs of a port of this machine, in order; empty if there is no such port.
    pub fn of_port(device: &str, port: u32) -> Vec<Self> {
        let folder = Path::new("sys/class/infiniband").join(device);
        Self::read_all(&Source::new(Path::new("/")), &folder.join(format!("ports/{port}")))
    }

    /// Whether it stands for an IPv4 address and is reached over UDP. Such GIDs work across routers
    /// and exist on every RoCE network.
    pub fn is_routable_ipv4(&self) -> bool {
        self.kind == Some(GidKind::RoceV2) && self.address.to_ipv4_mapped().is_some()
    }
}

impl RdmaPort {
    /// Whether it can carry traffic.
    pub fn is_active(&self) -> bool {
        self.state.as_deref() == Some("ACTIVE")
    }

    /// Whether it is on an Ethernet.
    pub fn is_ethernet(&self) -> bool {
        self.link_layer.as_deref() == Some("Ethernet")
    }
}

impl RdmaDevice {
    /// Whether some port can carry traffic.
    pub fn is_active(&self) -> bool {
        self.ports.iter().any(RdmaPort::is_active)
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
        // The files hold, for example, "4: ACTIVE" and "100 Gb/sec (4X EDR)".
        let state = source.text(folder.join("state"));
        let rate = source.text(folder.join("rate"));
        let gids = RdmaGid::read_all(source, folder);
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
            mtu_bytes: gids.iter().find_map(|gid| payload_of(source, gid.interface.as_ref()?)),
            gids,
        }
    }
}

impl RdmaGid {
    fn read_all(source: &Source, port: &Path) -> Vec<Self> {
        let indices = source.names(port.join("gids"));
        let mut gids: Vec<_> = indices
            .iter()
            .filter_map(|index| Self::read(source, port, index.parse().ok()?))
            .collect();
        gids.sort_by_key(|gid| gid.index);
        gids
    }

    fn read(source: &Source, port: &Path, index: u32) -> Option<Self> {
        let address: Ipv6Addr = source.value(port.join(format!("gids/{index}")))?;
        // The kernel shows a table of fixed length, mostly of zeros.
        if address.is_unspecified() {
            return None;
        }
        let attribute = |name: &str| source.text(port.join(format!("gid_attrs/{name}/{index}")));
        let kind = match attribute("types").as_deref() {
            Some("IB/RoCE v1") => Some(GidKind::InfiniBandOrRoceV1),
            Some("RoCE v2") => Some(GidKind::RoceV2),
            _ => None,
        };
        Some(Self { index, address, kind, interface: attribute("ndevs") })
    }
}

/// How many bytes the kernel reserves for headers and checksum in an Ethernet packet
/// (`iboe_get_mtu`).
const ROCE_HEADERS: u32 = 96;

/// The largest payload of an RDMA packet over an interface, in bytes.
fn payload_of(source: &Source, interface: &str) -> Option<u32> {
    let mtu: u32 = source.value(format!("sys/class/net/{interface}/mtu"))?;
    [4096, 2048, 1024, 512, 256].into_iter().find(|payload| payload + ROCE_HEADERS <= mtu)
}
