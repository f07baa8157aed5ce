//! The rail: a device at one of this host's addresses.

use std::{net::IpAddr, sync::Arc};

use smallvec::SmallVec;
use uccl_device::MemoryKind;
use uccl_fabric::{
    mem::Span,
    network::network_of,
    rail::{Channel, Rail, RailError, RailInfo, Registration, RemoteKey},
    region::Rights,
};
use uccl_tran::{
    choice::CHOICE_NAMES, control::CONTROL_NAMES, multipath::Techniques, recovery::LOSS_NAMES,
};
use uccl_wire::datagram::MAX_PATHS;

use crate::{
    channel::{UdpChannel, link_facts},
    counters::UdpCounters,
    device::Service,
    lengths::{lengths, mtu_of},
    settings::UdpSettings,
};

/// A device in software at one of this host's addresses: a rail over UDP.
pub struct UdpRail {
    info: RailInfo,
    ip: IpAddr,
    settings: Arc<UdpSettings>,
    service: Arc<Service>,
}

/// Registered memory.
struct UdpMemory {
    service: Arc<Service>,
    key: u64,
}

impl UdpRail {
    /// Opens sockets at an address of this host, and starts the thread that serves them.
    ///
    /// # Errors
    /// The settings name no technique or no number of paths that there is, or the address is not
    /// this host's.
    pub fn open(ip: IpAddr, settings: UdpSettings) -> Result<Self, RailError> {
        let refused = |why: String| Err(RailError::Unavailable(why));
        if !(1..=MAX_PATHS).contains(&settings.paths.into()) {
            return refused(format!("{} paths; there are 1 to {MAX_PATHS}", settings.paths));
        }
        let facts = link_facts(&settings, settings.datagram);
        // Credits need messages of their own, which datagrams do not have.
        let is_known = |made: &Techniques| made.control.granted_bytes().is_none();
        if Techniques::named(settings.techniques, &facts, 1, 0).filter(is_known).is_none() {
            let names = settings.techniques;
            return refused(format!(
                "techniques {names:?}; there are {CHOICE_NAMES:?}, {LOSS_NAMES:?} and \
                 {CONTROL_NAMES:?} without eqds"
            ));
        }
        let service = Service::start(ip, settings.paths, settings.offload).map_err(|e| {
            RailError::os(format!("opening UDP sockets at {ip}"), e.raw_os_error().unwrap_or(0))
        })?;
        let info = RailInfo {
            name: format!("udp:{ip}"),
            link: "udp".into(),
            network: network_of(ip),
            pci: None,
            speed_mbps: None,
            is_software: true,
        };
        Ok(Self { info, ip, settings: Arc::new(settings), service: Arc::new(service) })
    }

    /// Counts since the rail was opened.
    #[must_use]
    pub fn counters(&self) -> UdpCounters {
        self.service.device.state.lock().counters
    }

    /// Makes our end of a channel, with datagrams of at most this length.
    fn open_with(&self, datagram: u32) -> Result<Box<dyn Channel>, RailError> {
        let (service, settings) = (Arc::clone(&self.service), Arc::clone(&self.settings));
        Ok(Box::new(UdpChannel::open(service, settings, self.ip, datagram)?))
    }
}

impl Rail for UdpRail {
    fn info(&self) -> &RailInfo {
        &self.info
    }

    fn is_up(&self) -> bool {
        true
    }

    fn register(
        &self,
        span: Span,
        kind: MemoryKind,
        rights: Rights,
    ) -> Result<Box<dyn Registration>, RailError> {
        if !kind.is_host_accessible() {
            return Err(RailError::Unavailable(format!("UDP does not reach memory of {kind}")));
        }
        let key =
            getrandom::u64().map_err(|e| RailError::Unavailable(format!("no random key: {e}")))?;
        self.service.device.state.lock().memory.insert(key, span, rights);
        Ok(Box::new(UdpMemory { service: Arc::clone(&self.service), key }))
    }

    fn open(&self) -> Result<Box<dyn Channel>, RailError> {
        self.open_first(0)
    }

    fn open_first(&self, failed: u32) -> Result<Box<dyn Channel>, RailError> {
        let lengths = lengths(self.ip, mtu_of(self.ip), self.settings.datagram);
        let at = failed as usize % lengths.len();
        self.open_with(lengths.get(at).copied().unwrap_or(self.settings.datagram))
    }
}

impl Registration for UdpMemory {
    /// Waits for a copy that is being made, by the device's lock.
    fn end(&self) -> Result<(), RailError> {
        self.service.device.state.lock().memory.remove(self.key);
        Ok(())
    }

    fn local_key(&self) -> u64 {
        self.key
    }

    fn remote_key(&self) -> RemoteKey {
        RemoteKey { base: 0, key: SmallVec::from_slice(&self.key.to_le_bytes()) }
    }
}

impl Drop for UdpMemory {
    fn drop(&mut self) {
        // It does not fail.
        let _ = self.end();
    }
}
