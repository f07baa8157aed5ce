//! A rail: a domain of one of libfabric's providers.

use std::{fs, path::Path, sync::Arc};

use uccl_device::MemoryKind;
use uccl_fabric::{
    mem::Span,
    network::network_of,
    rail::{Channel, Rail, RailError, RailInfo, Registration},
    region::Rights,
};

use super::{
    channel::LibfabricChannel,
    discover,
    domain::Domain,
    info::{Info, InfoList},
    library::Library,
    memory::{LibfabricRegistration, RegionLoans},
    settings::LibfabricSettings,
};

/// A provider with one of these in its name moves bytes in software, even if there is a NIC behind
/// it.
const SOFTWARE: [&str; 5] = ["tcp", "sockets", "udp", "net", "shm"];

/// A domain of one of libfabric's providers.
pub struct LibfabricRail {
    domain: Arc<Domain>,
    lendings: Arc<RegionLoans>,
    info: RailInfo,
}

impl LibfabricRail {
    /// Opens the domains that the settings choose; each becomes a rail. There is at least one.
    ///
    /// # Errors
    /// When there is no library, the provider or the domain does not exist, or the provider does
    /// not keep its promise when a registration ends. Each error names a remedy.
    pub fn open_all(settings: &LibfabricSettings) -> Result<Vec<Self>, RailError> {
        settings.validate()?;
        let library = Library::load(settings.library.as_deref())?;
        let chosen = discover::choose(library, settings)?;
        chosen.into_iter().map(|info| Self::open_one(library, info, settings)).collect()
    }

    fn open_one(
        library: &'static Library,
        list: InfoList,
        settings: &LibfabricSettings,
    ) -> Result<Self, RailError> {
        let info = describe(list.first());
        if list.first().is_down() {
            tracing::warn!(rail = info.name, "its port is down");
        }
        let domain = Arc::new(Domain::open(library, list, settings)?);
        tracing::debug!(
            rail = info.name,
            link = info.link,
            network = info.network,
            "opened a rail"
        );
        Ok(Self { domain, lendings: Arc::default(), info })
    }
}

fn describe(info: Info<'_>) -> RailInfo {
    let provider = info.provider();
    let network = match info.ip() {
        Some(ip) => network_of(ip),
        // All Slingshot NICs of a system are on one network.
        None if provider == "cxi" => info.fabric_name(),
        None => String::new(),
    };
    RailInfo {
        name: info.domain_name(),
        link: format!("libfabric:{provider}"),
        network,
        pci: info.pci(),
        speed_mbps: info.speed_mbps(),
        is_software: info.pci().is_none() || SOFTWARE.iter().any(|name| provider.contains(name)),
    }
}

impl Rail for LibfabricRail {
    fn info(&self) -> &RailInfo {
        &self.info
    }

    /// The kernel's state of the network interface of that name. Devices that are not interfaces
    /// count as up.
    fn is_up(&self) -> bool {
        let name = Path::new(&self.info.name);
        if name.components().count() != 1 {
            return true;
        }
        let state = fs::read_to_string(Path::new("/sys/class/net").join(name).join("operstate"));
        state
            .map_or(true, |state| !matches!(state.trim(), "down" | "lowerlayerdown" | "notpresent"))
    }

    fn register(
        &self,
        span: Span,
        kind: MemoryKind,
        rights: Rights,
    ) -> Result<Box<dyn Registration>, RailError> {
        let (domain, lendings) = (Arc::clone(&self.domain), Arc::clone(&self.lendings));
        Ok(Box::new(LibfabricRegistration::new(domain, lendings, span, kind, rights)?))
    }

    fn open(&self) -> Result<Box<dyn Channel>, RailError> {
        Ok(Box::new(LibfabricChannel::open(Arc::clone(&self.domain), Arc::clone(&self.lendings))?))
    }
}
