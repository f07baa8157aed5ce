//! The answers of the libraries for RDMA verbs and libfabric, as values that a test can construct.

use std::fmt::Write;

use serde::Serialize;
use uccl_libfabric as libfabric;
use uccl_p2p::Config;
use uccl_verbs as verbs;

/// The devices beside TCP that could carry data. An error says why a library is of no use.
pub(crate) struct Rdma {
    pub(crate) verbs: Result<Vec<VerbsDevice>, String>,
    pub(crate) libfabric: Result<Libfabric, String>,
}

/// A device that libibverbs lists.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct VerbsDevice {
    pub(crate) name: String,
    /// A software device: soft-RoCE.
    pub(crate) is_software: bool,
    /// The ports that carry traffic.
    pub(crate) active_ports: Vec<u8>,
    /// Why the engine cannot use it, if it cannot.
    pub(crate) unusable: Option<String>,
}

/// The part of libfabric's offer that the engine can use.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct Libfabric {
    /// The library's file and version.
    pub(crate) library: String,
    /// Each provider once, as the library has them.
    pub(crate) providers: Vec<Provider>,
}

/// A provider with endpoints that move memory one-sidedly (`FI_EP_RDM`, `FI_RMA`).
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct Provider {
    pub(crate) name: String,
    /// Its devices or interfaces.
    pub(crate) domains: Vec<String>,
}

impl Rdma {
    /// Loads the libraries, where they are installed, and queries them.
    pub(crate) fn look(config: &Config) -> Self {
        let devices = verbs::list(config.verbs.library.as_deref());
        Self {
            verbs: devices
                .map(|devices| devices.into_iter().map(VerbsDevice::from).collect())
                .map_err(|error| error.to_string()),
            libfabric: libfabric::offers(&config.libfabric)
                .map(Libfabric::from)
                .map_err(|error| error.to_string()),
        }
    }

    /// The libraries of another machine: errors, because they cannot be queried.
    pub(crate) fn elsewhere() -> Self {
        let why = || "the libraries of another machine cannot be asked".to_owned();
        Self { verbs: Err(why()), libfabric: Err(why()) }
    }

    /// The devices of verbs that can carry data.
    pub(crate) fn usable(&self) -> Vec<&VerbsDevice> {
        self.verbs.iter().flatten().filter(|device| device.is_usable()).collect()
    }

    /// Libfabric's entry for a provider, if it has one.
    pub(crate) fn provider(&self, name: &str) -> Option<&Provider> {
        self.libfabric.as_ref().ok()?.providers.iter().find(|provider| provider.name == name)
    }

    /// A line for each device and provider; none for a missing library that no device here needs.
    pub(crate) fn text(&self, has_devices: bool) -> String {
        let mut out = String::new();
        match &self.verbs {
            Ok(devices) => {
                for device in devices {
                    let _ = writeln!(out, "  {:<24} {}", device.name, device.state());
                }
            }
            Err(why) if has_devices => {
                let _ = writeln!(out, "  {:<24} {why}", "verbs");
            }
            Err(_) => {}
        }
        if let Ok(fabric) = &self.libfabric {
            let _ = writeln!(out, "  {:<24} {}", "libfabric", fabric.library);
            for provider in &fabric.providers {
                let _ = writeln!(out, "    {:<22} {}", provider.name, provider.domains.join(", "));
            }
        }
        out
    }
}

impl VerbsDevice {
    fn is_usable(&self) -> bool {
        self.unusable.is_none() && !self.active_ports.is_empty()
    }

    fn state(&self) -> String {
        match &self.unusable {
            Some(why) => format!("verbs: cannot be used: {why}"),
            None if self.active_ports.is_empty() => {
                "verbs: no port is active; is its cable in, its interface up?".to_owned()
            }
            None if self.is_software => "verbs: can be used; made of software".to_owned(),
            None => "verbs: can be used".to_owned(),
        }
    }
}

impl From<verbs::Device> for VerbsDevice {
    fn from(device: verbs::Device) -> Self {
        let active = device.ports.iter().filter(|port| port.is_active).map(|port| port.number);
        Self {
            active_ports: active.collect(),
            name: device.name,
            is_software: device.is_software,
            unusable: device.unusable,
        }
    }
}

impl From<libfabric::Listing> for Libfabric {
    fn from(listing: libfabric::Listing) -> Self {
        let mut providers: Vec<Provider> = Vec::new();
        let usable =
            |offer: &libfabric::Offer| offer.endpoint_type == "rdm" && offer.caps.contains(&"rma");
        for offer in listing.offers.into_iter().filter(usable) {
            match providers.iter_mut().find(|provider| provider.name == offer.provider) {
                Some(provider) if provider.domains.contains(&offer.domain) => {}
                Some(provider) => provider.domains.push(offer.domain),
                None => {
                    providers.push(Provider { name: offer.provider, domains: vec![offer.domain] })
                }
            }
        }
        let (major, minor) = listing.version;
        Self { library: format!("{} {major}.{minor}", listing.library), providers }
    }
}

/// Answers of the libraries for tests.
#[cfg(test)]
pub(crate) mod examples {
    use super::*;

    /// No library is there.
    pub(crate) fn none() -> Rdma {
        Rdma { verbs: Err("no libibverbs".into()), libfabric: Err("no libfabric".into()) }
    }

    /// A device of verbs, with or without an active port.
    pub(crate) fn device(name: &str, active: bool) -> VerbsDevice {
        let active_ports = if active { vec![1] } else { Vec::new() };
        VerbsDevice { name: name.into(), is_software: false, active_ports, unusable: None }
    }

    /// A libfabric that has these providers, each with one domain.
    pub(crate) fn fabric(names: &[&str]) -> Libfabric {
        let provider =
            |name: &&str| Provider { name: (*name).into(), domains: vec![format!("{name}0")] };
        let providers = names.iter().map(provider).collect();
        Libfabric { library: "libfabric.so.1 2.1".into(), providers }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        examples::{device, fabric},
        *,
    };

    #[test]
    fn a_device_that_cannot_be_used_is_shown_with_the_reason() {
        let iwarp = VerbsDevice { unusable: Some("iWARP".into()), ..device("siw0", true) };
        let verbs = Ok(vec![device("mlx5_0", true), device("mlx5_1", false), iwarp]);
        let rdma = Rdma { verbs, libfabric: Ok(fabric(&["tcp", "efa"])) };
        let usable: Vec<_> = rdma.usable().iter().map(|device| &device.name).collect();
        assert_eq!(usable, ["mlx5_0"]);
        let text = rdma.text(true);
        let line = |word: &str| text.lines().find(|line| line.contains(word)).expect(word);
        assert!(line("mlx5_0").ends_with("can be used"), "{text}");
        assert!(line("mlx5_1").contains("no port is active"), "{text}");
        assert!(line("siw0").ends_with("cannot be used: iWARP"), "{text}");
        assert!(line("efa").ends_with("efa0"), "{text}");
    }

    #[test]
    fn a_missing_library_is_told_of_only_where_a_device_needs_it() {
        assert_eq!(examples::none().text(false), "");
        assert!(examples::none().text(true).contains("no libibverbs"));
    }
}
