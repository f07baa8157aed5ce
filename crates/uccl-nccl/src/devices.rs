//! Devices and their properties.

use std::{
    collections::HashMap,
    ffi::{CStr, CString, c_int},
    fs,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    net::IpAddr,
    path::Path,
    ptr::null,
};

use parking_lot::Mutex;
use uccl_device::{Interface, InterfaceKind, Topology, carriers, usable_addresses};
use uccl_flow::Device;
use uccl_nccl_abi::{
    flags, memory,
    plan::{LOOPBACK_MBPS, UNKNOWN_MBPS, offered_mbps},
    properties::{PropertiesHead, PropertiesV8, PropertiesV9, PropertiesV11, VirtualDevice},
};

use crate::{fault::Fault, log, settings::Settings};

/// The longest message: 1 TiB, the most that NCCL takes.
const LONGEST: usize = 1 << 40;
/// The most communicators of a device, which also bounds NCCL's channels.
const MAX_COMMS: c_int = 65_536;

/// A device of NCCL's: an interface, or all of them.
#[derive(Debug)]
pub(crate) struct NetDevice {
    pub(crate) name: &'static CStr,
    /// The folder of an interface's device in /sys.
    pci_path: Option<&'static CStr>,
    pub(crate) speed: Bandwidth,
    pub(crate) flow: Device,
}

/// A device's speed in Mbit/s.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Bandwidth {
    /// The user's figure, which NCCL gets as it is.
    Told(u32),
    /// The kernel's figure, or loopback's.
    Known(u32),
    /// Neither says.
    Unknown,
}

impl Bandwidth {
    /// The speed that NCCL gets, which makes it take few channels; `seen` is the greatest that
    /// flows have had until now.
    ///
    /// Hosts may differ: NCCL brings the bandwidths and channels of its plan to the least of all
    /// ranks. That does not hold for a device's latency, which is why that is the same everywhere.
    pub(crate) fn offered_mbps(self, seen: Option<u32>) -> u32 {
        match self {
            Self::Told(mbps) => mbps,
            Self::Known(mbps) => offered_mbps(mbps),
            Self::Unknown => offered_mbps(seen.unwrap_or(0).max(UNKNOWN_MBPS)),
        }
    }
}

/// Finds the devices of this machine.
pub(crate) fn find(settings: &Settings) -> Result<Vec<NetDevice>, Fault> {
    of(&Topology::of_this_machine()?.interfaces, settings)
}

fn of(interfaces: &[Interface], settings: &Settings) -> Result<Vec<NetDevice>, Fault> {
    let selection = settings.interfaces.as_ref();
    let usable = |one: &&Interface| !addresses(one, settings).is_empty();
    let carriers = carriers(interfaces, selection.map(|(_, selection)| selection));
    let carriers: Vec<_> = carriers.into_iter().filter(usable).collect();
    if carriers.is_empty() {
        let there: Vec<_> = interfaces.iter().map(|one| one.name.as_str()).collect();
        let because = selection.map_or_else(String::new, |(name, selection)| {
            format!(", and is taken by {name}={selection}")
        });
        let there = there.join(", ");
        return Err(Fault::NoInterface(format!(
            "no network interface is up, has an address{because}; there are {there}"
        )));
    }
    if settings.device_each {
        return Ok(carriers.iter().map(|one| device(&[one], settings)).collect());
    }
    Ok(vec![device(&carriers, settings)])
}

fn addresses(interface: &Interface, settings: &Settings) -> Vec<IpAddr> {
    usable_addresses(interface).filter(|ip| settings.family.takes(*ip)).collect()
}

fn device(interfaces: &[&Interface], settings: &Settings) -> NetDevice {
    let names: Vec<_> = interfaces.iter().map(|one| one.name.as_str()).collect();
    let name = names.join("+");
    let addrs = interfaces.iter().flat_map(|one| addresses(one, settings)).collect();
    let speed = settings.speed_mbps.map_or_else(|| speed(interfaces, &name), Bandwidth::Told);
    let pci_path = match (settings.device_each, interfaces) {
        (true, [one]) => pci_path(&one.name),
        _ => None,
    };
    NetDevice { name: forever(&name), pci_path, speed, flow: Device { name, addrs } }
}

/// The sum of the interfaces' speeds.
fn speed(interfaces: &[&Interface], name: &str) -> Bandwidth {
    let of = |one: &&Interface| match one.kind {
        InterfaceKind::Loopback => Some(LOOPBACK_MBPS),
        _ => one.speed_mbps,
    };
    let known: u32 = interfaces.iter().filter_map(of).fold(0, u32::saturating_add);
    if known > 0 {
        return Bandwidth::Known(known.min(c_int::MAX as u32));
    }
    log::info(
        flags::NET,
        &format!(
            "the kernel does not know the speed of {name}: NCCL plans with {UNKNOWN_MBPS} Mbit/s until \
             more has been seen; UCCL_NCCL_SPEED_MBPS tells a better one"
        ),
    );
    Bandwidth::Unknown
}

fn pci_path(interface: &str) -> Option<&'static CStr> {
    let folder = fs::canonicalize(Path::new("/sys/class/net").join(interface).join("device"));
    folder.ok().and_then(|folder| folder.to_str().map(forever))
}

/// A text that lives as long as the process, as NCCL wants it; the same one for the same text.
fn forever(text: &str) -> &'static CStr {
    static TEXTS: Mutex<Option<HashMap<String, &'static CStr>>> = Mutex::new(None);
    let mut texts = TEXTS.lock();
    texts.get_or_insert_default().entry(text.to_owned()).or_insert_with(|| {
        // Names of interfaces have no zero byte.
        let owned = CString::new(text).unwrap_or_default();
        Box::leak(owned.into_boxed_c_str())
    })
}

impl NetDevice {
    fn guid(&self) -> u64 {
        let mut hash = DefaultHasher::new();
        (self.name, &self.flow.addrs).hash(&mut hash);
        hash.finish()
    }

    fn head(&self, speed_mbps: u32) -> PropertiesHead {
        PropertiesHead {
            name: self.name.as_ptr(),
            pci_path: self.pci_path.map_or(null(), CStr::as_ptr),
            guid: self.guid(),
            memory: memory::HOST,
            registration_is_global: 0,
            force_flush: 0,
            speed_mbps: speed_mbps as c_int,
            port: 0,
            // NCCL would calculate with each rank's own figure, and ranks would choose differently.
            latency_us: 0.0,
            max_comms: MAX_COMMS,
            max_recvs: uccl_flow::MAX_GROUP as c_int,
            device_type: 0,
            device_version: 0,
        }
    }
}

/// Properties of one version.
pub(crate) trait FromDevice {
    fn from_device(device: &NetDevice, number: c_int, speed_mbps: u32) -> Self;
}

impl FromDevice for PropertiesV8 {
    fn from_device(device: &NetDevice, _: c_int, speed_mbps: u32) -> Self {
        let head = device.head(speed_mbps);
        Self {
            name: head.name,
            pci_path: head.pci_path,
            guid: head.guid,
            memory: head.memory,
            registration_is_global: head.registration_is_global,
            speed_mbps: head.speed_mbps,
            port: head.port,
            latency_us: head.latency_us,
            max_comms: head.max_comms,
            max_recvs: head.max_recvs,
            device_type: head.device_type,
            device_version: head.device_version,
        }
    }
}

impl FromDevice for PropertiesV9 {
    fn from_device(device: &NetDevice, number: c_int, speed_mbps: u32) -> Self {
        Self {
            head: device.head(speed_mbps),
            virtual_device: alone(number),
            max_p2p_bytes: LONGEST,
            max_coll_bytes: LONGEST,
        }
    }
}

impl<const N: usize> FromDevice for PropertiesV11<N> {
    fn from_device(device: &NetDevice, number: c_int, speed_mbps: u32) -> Self {
        Self {
            head: device.head(speed_mbps),
            virtual_device: alone(number),
            max_p2p_bytes: LONGEST,
            max_coll_bytes: LONGEST,
            max_multi_request: 1,
            rail: -1,
            plane: -1,
        }
    }
}

/// A device that is made of itself.
fn alone<const N: usize>(number: c_int) -> VirtualDevice<N> {
    let mut devices = [0; N];
    devices[0] = number;
    VirtualDevice { count: 1, devices }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_one_device_over_all_interfaces() {
        let settings = Settings::from_env().expect("settings");
        let devices = find(&settings).expect("an interface, loopback at least");
        assert_eq!(devices.len(), 1);
        assert!(!devices[0].flow.addrs.is_empty());
        let properties = PropertiesV11::<8>::from_device(&devices[0], 0, 10_000);
        assert_eq!(properties.head.memory, memory::HOST);
        assert!(properties.head.pci_path.is_null(), "it is virtual");
        assert_eq!(forever("eth0").as_ptr(), forever("eth0").as_ptr());
    }

    #[test]
    fn nccl_gets_a_speed_that_takes_few_channels() {
        assert_eq!(Bandwidth::Told(80_000).offered_mbps(None), 80_000);
        assert_eq!(Bandwidth::Known(LOOPBACK_MBPS).offered_mbps(None), 48_000);
        assert_eq!(Bandwidth::Known(80_000).offered_mbps(Some(100_000)), 48_000);
        assert_eq!(Bandwidth::Unknown.offered_mbps(None), UNKNOWN_MBPS);
        assert_eq!(Bandwidth::Unknown.offered_mbps(Some(5_000)), UNKNOWN_MBPS, "a peer was slow");
        assert_eq!(Bandwidth::Unknown.offered_mbps(Some(42_000)), 24_000);
    }
}
