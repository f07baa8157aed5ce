//! Lists the RDMA devices and their ports, for the code that opens them and for users.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use uccl_device::{PciAddress, RdmaGid};
use uccl_fabric::{network::network_of, rail::RailError};
use uccl_wire::verbs::LinkLayer;

use super::{
    context::{Context, DeviceEntry, DeviceList},
    ffi::{
        Verbs,
        abi::{self, DeviceAttr, PortAttr},
    },
};

/// A device that libibverbs lists.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Device {
    /// Its name: `mlx5_0`, `rxe0`.
    pub name: String,
    /// Its PCI address. None for a software device.
    pub pci: Option<PciAddress>,
    /// Whether it is a software device (soft-RoCE).
    pub is_software: bool,
    /// Its ports.
    pub ports: Vec<Port>,
    /// Why it cannot be used, if it cannot.
    pub unusable: Option<String>,
}

/// A port of a device.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Port {
    /// Its number, from 1.
    pub number: u8,
    /// `ACTIVE`, `DOWN`, `INIT`, ….
    pub state: String,
    /// Whether it carries traffic.
    pub is_active: bool,
    /// Whether it is on InfiniBand or Ethernet (RoCE).
    pub link_layer: LinkLayer,
    /// InfiniBand's local address; 0 over Ethernet.
    pub lid: u16,
    /// The longest packet, in bytes.
    pub mtu_bytes: u32,
    /// Its speed in Mbit/s, where it is known. None for software devices, which report an invented
    /// speed.
    pub speed_mbps: Option<u64>,
    /// Its table of GIDs.
    pub gids: Vec<RdmaGid>,
    pub(super) mtu: u8,
    pub(super) max_message: u64,
    pub(super) needs_global: bool,
    pub(super) pkeys: Vec<u16>,
}

impl Port {
    /// The network interfaces of its GIDs, each once.
    pub fn interfaces(&self) -> Vec<&str> {
        let mut names: Vec<_> =
            self.gids.iter().filter_map(|gid| gid.interface.as_deref()).collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    /// The network that the port is on, according to one of its GIDs: InfiniBand's subnet, or the
    /// network of the interface's address. Empty if it cannot be told.
    pub fn network(&self, gid: &RdmaGid) -> String {
        match self.link_layer {
            LinkLayer::InfiniBand => {
                let prefix =
                    u64::from_be_bytes(std::array::from_fn(|index| gid.address.octets()[index]));
                format!("ib:{prefix:016x}")
            }
            LinkLayer::Ethernet => network_of(gid.address.to_canonical()),
        }
    }
}

/// Lists the devices, with the present state of their ports. A device that cannot be opened is
/// listed with the reason.
///
/// # Errors
/// [`RailError::Unavailable`] if libibverbs or the kernel's support is missing. The message names
/// the remedy.
pub fn list(library: Option<&str>) -> Result<Vec<Device>, RailError> {
    let list = DeviceList::get(Verbs::load(library)?)?;
    Ok(list.iter().map(|listed| OpenDevice::open(&listed).device).collect())
}

/// A listed device. It is open if it can be used.
pub(super) struct OpenDevice {
    pub(super) device: Device,
    pub(super) usable: Option<(Arc<Context>, DeviceAttr)>,
}

impl OpenDevice {
    pub(super) fn open(listed: &DeviceEntry<'_>) -> Self {
        let name = listed.name();
        let pci = pci_of(&folder_of(&name));
        let mut device =
            Device { name, pci, is_software: pci.is_none(), ports: Vec::new(), unusable: None };
        let opened = listed.open().and_then(|context| {
            let attr = context.query_device()?;
            device.is_software |= is_made_of_software(&attr);
            for number in 1..=attr.phys_port_cnt {
                device.ports.push(port(&device, number, &context.query_port(number)?));
            }
            Ok((context, attr))
        });
        match (opened, unsupported(listed.transport())) {
            (Ok(opened), None) => Self { device, usable: Some(opened) },
            (Err(error), _) => Self::unusable(device, error.to_string()),
            (Ok(_), Some(why)) => Self::unusable(device, why),
        }
    }

    fn unusable(mut device: Device, why: String) -> Self {
        device.unusable = Some(why);
        Self { device, usable: None }
    }
}

/// Why no device with this transport can be used.
fn unsupported(transport: i32) -> Option<String> {
    match transport {
        abi::TRANSPORT_IB => None,
        abi::TRANSPORT_IWARP => {
            Some("it is an iWARP device, which is not supported: TCP is used over its port".into())
        }
        _ => Some(
            "it offers no reliable connections (its transport is neither InfiniBand nor RoCE)"
                .to_owned(),
        ),
    }
}

/// Whether the vendor is that of `rdma_rxe`. Such a device is software even where it belongs to a
/// NIC.
fn is_made_of_software(attr: &DeviceAttr) -> bool {
    matches!(attr.vendor_id, 0xff_ffff | 0x62_6d74)
}

pub(super) fn port(device: &Device, number: u8, attr: &PortAttr) -> Port {
    let folder = folder_of(&device.name).join(format!("ports/{number}"));
    let ethernet = attr.link_layer == abi::LINK_LAYER_ETHERNET;
    let mtu = attr.active_mtu.clamp(1, 5) as u8;
    Port {
        number,
        state: state_name(attr.state).to_owned(),
        is_active: is_active(attr),
        link_layer: if ethernet { LinkLayer::Ethernet } else { LinkLayer::InfiniBand },
        lid: attr.lid,
        mtu_bytes: 128 << mtu,
        speed_mbps: if device.is_software { None } else { speed(&folder) },
        gids: RdmaGid::of_port(&device.name, number.into()),
        mtu,
        max_message: attr.max_msg_sz.into(),
        needs_global: attr.flags & abi::GRH_REQUIRED != 0,
        pkeys: pkeys_of(&folder.join("pkeys")),
    }
}

/// A port's table of partition keys, from a folder with a file for each. Empty if it cannot be
/// read.
fn pkeys_of(folder: &Path) -> Vec<u16> {
    let read = |index: usize| {
        let text = fs::read_to_string(folder.join(index.to_string())).ok()?;
        u16::from_str_radix(text.trim().trim_start_matches("0x"), 16).ok()
    };
    (0..).map_while(read).collect()
}

/// The index of the partition key to use: the one asked for, unless that place is empty. Then it is
/// the first key of a full member, or else the first of any.
pub(super) fn pkey_index(asked: u16, table: &[u16]) -> u16 {
    // The lower bits name the partition, and the highest is set if the port is a full member.
    let is_key = |key: &u16| key & 0x7fff != 0;
    if table.get(usize::from(asked)).is_none_or(is_key) {
        return asked;
    }
    let first = |full: bool| table.iter().position(|key| is_key(key) && (key >> 15 == 1 || !full));
    let found = first(true).or_else(|| first(false));
    found.and_then(|index| u16::try_from(index).ok()).unwrap_or(asked)
}

pub(super) fn is_active(attr: &PortAttr) -> bool {
    matches!(attr.state, abi::PORT_ACTIVE | abi::PORT_ACTIVE_DEFER)
}

fn state_name(state: u32) -> &'static str {
    match state {
        1 => "DOWN",
        2 => "INIT",
        3 => "ARMED",
        4 => "ACTIVE",
        5 => "ACTIVE_DEFER",
        _ => "unknown",
    }
}

fn folder_of(device: &str) -> PathBuf {
    Path::new("/sys/class/infiniband").join(device)
}

fn pci_of(device: &Path) -> Option<PciAddress> {
    let way = fs::canonicalize(device.join("device")).ok()?;
    way.iter().rev().find_map(|name| name.to_str()?.parse().ok())
}

/// From a line such as "100 Gb/sec (4X EDR)".
fn speed(port: &Path) -> Option<u64> {
    let text = fs::read_to_string(port.join("rate")).ok()?;
    let gbps: f64 = text.split_whitespace().next()?.parse().ok()?;
    (gbps > 0.0).then_some((gbps * 1000.0) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_infiniband_network_is_its_subnet() {
        let port = Port {
            number: 1,
            state: "ACTIVE".to_owned(),
            is_active: true,
            link_layer: LinkLayer::InfiniBand,
            lid: 7,
            mtu_bytes: 4096,
            speed_mbps: None,
            gids: Vec::new(),
            mtu: 5,
            max_message: 1 << 30,
            needs_global: false,
            pkeys: Vec::new(),
        };
        let address = std::net::Ipv6Addr::new(0xfec0, 0, 0, 2, 1, 2, 3, 4);
        let gid = RdmaGid::new(0, address, None);
        assert_eq!(port.network(&gid), "ib:fec0000000000002");
    }

    #[test]
    fn an_empty_place_of_the_table_names_no_partition() {
        let folder = tempfile::tempdir().expect("a folder");
        for (index, key) in ["0x0000", "0x7fff", "0x8001", "0xffff"].iter().enumerate() {
            fs::write(folder.path().join(index.to_string()), format!("{key}\n")).expect("a key");
        }
        let table = pkeys_of(folder.path());
        assert_eq!(table, [0, 0x7fff, 0x8001, 0xffff]);
        assert_eq!([0, 1, 3].map(|asked| pkey_index(asked, &table)), [2, 1, 3]);
        assert_eq!((pkey_index(0, &[0, 0x7fff, 0]), pkey_index(0, &[0, 0])), (1, 0));
        assert_eq!((pkey_index(0, &[]), pkey_index(9, &table)), (0, 9), "not known");
        assert!(pkeys_of(&folder.path().join("none")).is_empty());
    }

    #[test]
    fn unsupported_transports_are_refused_with_the_reason() {
        assert!(unsupported(abi::TRANSPORT_IB).is_none());
        assert!(unsupported(2).is_some_and(|why| why.contains("no reliable connections")));
        assert!(unsupported(abi::TRANSPORT_IWARP).is_some_and(|why| why.contains("TCP is used")));
    }
}
