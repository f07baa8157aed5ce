//! Finds libfabric's offers: to list them for users, and to choose rails.

use std::net::IpAddr;

use uccl_device::PciAddress;
use uccl_fabric::{network::is_link_local, rail::RailError};

use super::{
    info::{Info, InfoList, owned_text},
    library::Library,
    providers, raw,
    settings::{Devices, LibfabricSettings, Threading},
};

/// One combination of provider, domain and endpoint type that the library offers, in words.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Offer {
    /// The provider, with its layers: `tcp;ofi_rxm`.
    pub provider: String,
    /// The provider's version.
    pub version: (u32, u32),
    /// The fabric's name.
    pub fabric: String,
    /// The domain's name: a device or an interface.
    pub domain: String,
    /// Our address, if it is an IP address.
    pub address: Option<IpAddr>,
    /// `rdm`, `msg` or `dgram`. Rails are `rdm`.
    pub endpoint_type: &'static str,
    /// Its capabilities: `msg`, `rma`, ...
    pub caps: Vec<&'static str>,
    /// Its demands on memory registration: `local`, `prov_key`, ...
    pub mr_mode: Vec<&'static str>,
    /// Whether it moves data by itself (`auto`), or only while it is called (`manual`).
    pub progress: &'static str,
    /// The device's PCI address, if it is known.
    pub pci: Option<PciAddress>,
    /// Its speed in Mbit/s, if it is known.
    pub speed_mbps: Option<u64>,
}

/// The result of [`offers`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Listing {
    /// The library's file, as it was asked for.
    pub library: String,
    /// The library's version.
    pub version: (u32, u32),
    /// Its offers, each once.
    pub offers: Vec<Offer>,
}

/// Lists the library's offers on this host, whether or not they can be rails.
///
/// # Errors
/// When there is no library.
pub fn offers(settings: &LibfabricSettings) -> Result<Listing, RailError> {
    let library = Library::load(settings.library.as_deref())?;
    let mut hints = InfoList::hints(library)?;
    let parts = hints.parts().ok_or_else(no_parts)?;
    *parts.mode = !0;
    parts.domain.mr_mode = providers::modes("");
    let found = InfoList::query(library, &hints)?;
    let mut offers = Vec::new();
    for info in found.iter().flat_map(InfoList::iter) {
        let offer = Offer::of(info);
        if !offers.contains(&offer) {
            offers.push(offer);
        }
    }
    Ok(Listing { library: library.name().to_owned(), version: library.version(), offers })
}

impl Offer {
    fn of(info: Info<'_>) -> Self {
        let progress = info.domain().map_or(0, |domain| domain.data_progress);
        Self {
            provider: info.provider(),
            version: info.provider_version(),
            fabric: info.fabric_name(),
            domain: info.domain_name(),
            address: info.ip(),
            endpoint_type: match info.ep().map(|ep| ep.kind) {
                Some(raw::FI_EP_RDM) => "rdm",
                Some(raw::FI_EP_MSG) => "msg",
                Some(raw::FI_EP_DGRAM) => "dgram",
                _ => "other",
            },
            caps: words(info.caps(), CAPS),
            mr_mode: words(info.mr_mode() as u32 as u64, MR_MODES),
            progress: match progress {
                raw::FI_PROGRESS_AUTO => "auto",
                raw::FI_PROGRESS_MANUAL => "manual",
                _ => "unknown",
            },
            pci: info.pci(),
            speed_mbps: info.speed_mbps(),
        }
    }
}

/// One-sided access in both directions, and nothing else: with messages, `cxi` keeps 36 MiB of
/// locked memory for each endpoint.
const CAPS_OF_A_RAIL: u64 =
    raw::FI_RMA | raw::FI_READ | raw::FI_WRITE | raw::FI_REMOTE_READ | raw::FI_REMOTE_WRITE;

const CAPS: &[(u64, &str)] = &[
    (raw::FI_MSG, "msg"),
    (raw::FI_RMA, "rma"),
    (raw::FI_TAGGED, "tagged"),
    (raw::FI_ATOMIC, "atomic"),
    (raw::FI_RMA_EVENT, "rma_event"),
    (raw::FI_HMEM, "hmem"),
    (raw::FI_LOCAL_COMM, "local_comm"),
    (raw::FI_REMOTE_COMM, "remote_comm"),
];

const MR_MODES: &[(u64, &str)] = &[
    (raw::FI_MR_LOCAL as u64, "local"),
    (raw::FI_MR_RAW as u64, "raw"),
    (raw::FI_MR_VIRT_ADDR as u64, "virt_addr"),
    (raw::FI_MR_ALLOCATED as u64, "allocated"),
    (raw::FI_MR_PROV_KEY as u64, "prov_key"),
    (raw::FI_MR_RMA_EVENT as u64, "rma_event"),
    (raw::FI_MR_ENDPOINT as u64, "endpoint"),
    (raw::FI_MR_HMEM as u64, "hmem"),
];

fn words(bits: u64, names: &[(u64, &'static str)]) -> Vec<&'static str> {
    names.iter().filter(|(bit, _)| bits & bit != 0).map(|(_, name)| *name).collect()
}

/// Chooses the infos that become rails: best first, one for each domain.
pub(super) fn choose(
    library: &'static Library,
    settings: &LibfabricSettings,
) -> Result<Vec<InfoList>, RailError> {
    let provider = match &settings.provider {
        Some(provider) => provider.clone(),
        None => best_provider(library, settings)?,
    };
    let Some(found) = query(library, settings, Some(&provider))? else {
        return Err(absent(library, settings, &provider));
    };
    let infos: Vec<Info<'_>> = found.iter().filter(|info| info.provider() == provider).collect();
    if infos.is_empty() {
        return Err(absent(library, settings, &provider));
    }
    // After the query: the library knows its own settings only from its first query on.
    let demand = providers::demand(&provider, library.version(), |name| library.setting(name));
    if let Some(demand) = demand {
        return Err(RailError::Unavailable(format!("libfabric's provider {provider} {demand}")));
    }
    let chosen = choose_domains(&one_a_domain(&infos), &settings.devices, &provider)?;
    chosen.into_iter().map(Info::to_list).collect()
}

/// Asks the library for offers that a rail can use. Hints for GPU memory and queue sizes, which a
/// provider may not support, are left out one after another until there is an offer.
fn query(
    library: &'static Library,
    settings: &LibfabricSettings,
    provider: Option<&str>,
) -> Result<Option<InfoList>, RailError> {
    for (gpu, sizes) in [(true, true), (true, false), (false, true), (false, false)] {
        let has_sizes = settings.tx_size.is_some() || settings.rx_size.is_some();
        if gpu && !settings.gpu_memory || sizes && !has_sizes {
            continue;
        }
        let hints = hints(library, settings, provider, gpu, sizes)?;
        if let Some(found) = InfoList::query(library, &hints)? {
            if settings.gpu_memory && !gpu {
                // Not a warning: registering GPU memory will warn, if that ever happens.
                let provider = provider.unwrap_or("libfabric");
                tracing::info!("{provider} reaches no GPU memory here (no FI_HMEM)");
            }
            return Ok(Some(found));
        }
    }
    Ok(None)
}

fn hints(
    library: &'static Library,
    settings: &LibfabricSettings,
    provider: Option<&str>,
    gpu: bool,
    sizes: bool,
) -> Result<InfoList, RailError> {
    let mut hints = InfoList::hints(library)?;
    let parts = hints.parts().ok_or_else(no_parts)?;
    *parts.caps = CAPS_OF_A_RAIL;
    if gpu {
        *parts.caps |= raw::FI_HMEM;
    }
    *parts.mode = raw::FI_CONTEXT | raw::FI_CONTEXT2 | raw::FI_RX_CQ_DATA;
    parts.ep.kind = raw::FI_EP_RDM;
    // Without it, a write would complete when its bytes have left, not when they have arrived.
    parts.tx.op_flags = raw::FI_DELIVERY_COMPLETE;
    if sizes {
        parts.tx.size = settings.tx_size.unwrap_or(0);
        parts.rx.size = settings.rx_size.unwrap_or(0);
    }
    parts.domain.mr_mode = providers::modes(provider.unwrap_or_default());
    parts.domain.resource_mgmt = raw::FI_RM_ENABLED;
    parts.domain.threading = match settings.threading {
        Threading::Safe => raw::FI_THREAD_SAFE,
        Threading::Domain => raw::FI_THREAD_DOMAIN,
    };
    if let Some(provider) = provider {
        parts.fabric.prov_name = owned_text(provider);
    }
    Ok(hints)
}

fn no_parts() -> RailError {
    RailError::os("fi_allocinfo", libc::ENOMEM)
}

fn best_provider(
    library: &'static Library,
    settings: &LibfabricSettings,
) -> Result<String, RailError> {
    let found = query(library, settings, None)?;
    let names = found.iter().flat_map(InfoList::iter).map(Info::provider);
    let is_sound = |name: &String| {
        providers::demand(name, library.version(), |name| library.setting(name)).is_none()
    };
    let ranked = names.filter(is_sound).filter_map(|name| Some((providers::rank(&name)?, name)));
    let best = ranked.min();
    best.map(|(_, name)| name).ok_or_else(|| {
        RailError::Unavailable(format!(
            "{} has no provider that moves memory between hosts one-sidedly, of reliable datagrams and with \
             delivery that can be told. It has {}",
            library.name(),
            usable_providers(settings)
        ))
    })
}

fn absent(library: &Library, settings: &LibfabricSettings, provider: &str) -> RailError {
    let (major, minor) = library.version();
    RailError::Unavailable(format!(
        "{} (version {major}.{minor}) offers no {provider} with reliable datagrams and one-sided access here. \
         {}. It has {}",
        library.name(),
        providers::remedy(provider),
        usable_providers(settings)
    ))
}

/// The providers that could be asked for instead.
fn usable_providers(settings: &LibfabricSettings) -> String {
    let listing = offers(settings).map(|listing| listing.offers).unwrap_or_default();
    let usable = |offer: &&Offer| offer.endpoint_type == "rdm" && offer.caps.contains(&"rma");
    let mut names: Vec<_> = listing.iter().filter(usable).map(|o| o.provider.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    if names.is_empty() { "none at all".into() } else { names.join(", ") }
}

/// One info for each domain: the one with the address that reaches furthest. Addresses that are not
/// link-local come first, then the library's order counts.
fn one_a_domain<'a>(infos: &[Info<'a>]) -> Vec<Info<'a>> {
    let is_last = |info: &Info<'_>| info.ip().is_some_and(is_link_local);
    let mut sorted = infos.to_vec();
    sorted.sort_by_key(is_last);
    let mut names = Vec::new();
    sorted.retain(|info| {
        let name = info.domain_name();
        let is_new = !names.contains(&name);
        names.push(name);
        is_new
    });
    sorted
}

fn choose_domains<'a>(
    domains: &[Info<'a>],
    devices: &Devices,
    provider: &str,
) -> Result<Vec<Info<'a>>, RailError> {
    let is_loopback = |info: &Info<'_>| info.ip().is_some_and(|ip| ip.is_loopback());
    let mut far: Vec<_> = domains.iter().filter(|info| !is_loopback(info)).copied().collect();
    if far.is_empty() {
        far = domains.to_vec();
    }
    let names = |infos: &[Info<'_>]| {
        let names: Vec<_> = infos.iter().map(|info| info.domain_name()).collect();
        names.join(", ")
    };
    match devices {
        Devices::All => Ok(far),
        Devices::ForGpu(gpu) => Ok(far.get(gpu % far.len().max(1)).copied().into_iter().collect()),
        Devices::Index(index) => match far.get(*index) {
            Some(info) => Ok(vec![*info]),
            None => Err(RailError::Unavailable(format!(
                "there is no device {index} of {provider}; counted from 0 there are {}",
                names(&far)
            ))),
        },
        Devices::Named(wanted) => {
            let find = |name: &String| {
                let found = domains.iter().find(|info| info.domain_name() == *name);
                found.copied().ok_or_else(|| {
                    RailError::Unavailable(format!(
                        "{provider} has no domain {name}; it has {}",
                        names(domains)
                    ))
                })
            };
            wanted.iter().map(find).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Messages cost `cxi` locked memory, and keep other providers away that have none.
    #[test]
    fn a_rail_asks_for_one_sided_access_only() {
        let others = raw::FI_MSG | raw::FI_TAGGED | raw::FI_ATOMIC | raw::FI_RMA_EVENT;
        assert_eq!(CAPS_OF_A_RAIL & others, 0, "{:?}", words(CAPS_OF_A_RAIL, CAPS));
        assert_eq!(words(CAPS_OF_A_RAIL, CAPS), ["rma"]);
    }
}
