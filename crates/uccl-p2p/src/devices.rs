//! Which devices an endpoint opens: those that move memory one-sidedly, as its settings have it.

use std::{path::Path, sync::Arc};

use uccl_fabric::{
    libfabric::{Devices, LibfabricRail, LibfabricSettings},
    rma::rail::{Rail, RailError},
    verbs::{self, DeviceName, VerbsSettings},
};

use crate::{
    config::{Config, Selection, Transport},
    engine::places,
};

/// What was opened, or why nothing was.
pub(crate) struct Opened {
    pub(crate) rails: Vec<Arc<dyn Rail>>,
    /// For people; empty where nothing is to be said.
    pub(crate) why_none: String,
}

/// Whether there may be some: answered without opening any.
pub(crate) fn possible(config: &Config) -> bool {
    match config.transport {
        Transport::Auto => has_devices("/sys/class/infiniband") || has_devices("/sys/class/cxi"),
        other => other.needs_rails(),
    }
}

/// Whether the kernel lists any in this folder.
fn has_devices(folder: &str) -> bool {
    Path::new(folder).read_dir().is_ok_and(|mut devices| devices.next().is_some())
}

/// Opens them. Where any link will do, the absence of a library or a device is a path not taken.
pub(crate) fn open(config: &Config) -> Opened {
    let opened = match config.transport {
        Transport::Auto => open_best(config),
        Transport::Verbs => open_verbs(config),
        Transport::Libfabric => open_libfabric(config, &config.libfabric),
        Transport::Cxi => open_libfabric(config, &LibfabricSettings::cxi()),
        Transport::Efa => open_libfabric(config, &LibfabricSettings::efa()),
        Transport::Local | Transport::Tcp => Ok(Vec::new()),
    };
    match opened {
        Ok(rails) => Opened { rails, why_none: "RDMA is not asked for".into() },
        Err(e) => {
            tracing::warn!(
                "RDMA is not used, data goes over other links: {e}; `uccl doctor` says what to do about it"
            );
            Opened { rails: Vec::new(), why_none: e.to_string() }
        }
    }
}

/// Verbs where they work; else the networks that only libfabric reaches, where their devices are.
fn open_best(config: &Config) -> Result<Vec<Arc<dyn Rail>>, RailError> {
    if has_devices("/sys/class/cxi") {
        return open_libfabric(config, &LibfabricSettings::cxi());
    }
    if has_devices("/sys/class/infiniband") {
        // EFA devices are among those of verbs, but have no connections.
        return open_verbs(config)
            .or_else(|e| open_libfabric(config, &LibfabricSettings::efa()).map_err(|_| e));
    }
    Ok(Vec::new())
}

/// With what is set, and for the rest what suits the provider.
fn open_libfabric(
    config: &Config,
    suitable: &LibfabricSettings,
) -> Result<Vec<Arc<dyn Rail>>, RailError> {
    let ours = &config.libfabric;
    let provider = suitable.provider.clone();
    let devices = match &ours.devices {
        // Slingshot's NICs belong to a GPU each.
        Devices::All if provider.as_deref() == Some("cxi") => {
            Devices::ForGpu(config.gpu_index as usize)
        }
        devices => devices.clone(),
    };
    let settings = LibfabricSettings {
        library: ours.library.clone(),
        provider,
        devices,
        threading: ours.threading,
        tx_size: ours.tx_size.or(suitable.tx_size),
        rx_size: ours.rx_size.or(suitable.rx_size),
        cq_size: ours.cq_size.or(suitable.cq_size),
        max_inflight: ours.max_inflight.min(suitable.max_inflight),
        silence: config.timeout,
        ..suitable.clone()
    };
    let rails = LibfabricRail::open_all(&settings)?;
    Ok(rails.into_iter().map(|rail| Arc::new(rail) as Arc<dyn Rail>).collect())
}

fn open_verbs(config: &Config) -> Result<Vec<Arc<dyn Rail>>, RailError> {
    let with = |devices| verbs::open(&VerbsSettings { devices, ..config.verbs.clone() });
    let near = nearest(config);
    let rails = if !config.verbs.devices.is_empty() {
        verbs::open(&config.verbs)
    } else if let Some(selection) = &config.rdma_devices {
        let selected = selected(config, selection)?;
        let is_near = |name: &DeviceName| near.iter().any(|near| near.device == name.device);
        let both: Vec<_> = selected.iter().filter(|name| is_near(name)).cloned().collect();
        with(if both.is_empty() { selected } else { both })
    } else if near.is_empty() {
        verbs::open(&config.verbs)
    } else {
        with(near).or_else(|e| {
            tracing::warn!(
                "the RDMA devices nearest to the GPU are of no use, others are tried, to which the way is longer: {e}"
            );
            verbs::open(&config.verbs)
        })
    }?;
    Ok(rails.into_iter().map(|rail| Arc::new(rail) as Arc<dyn Rail>).collect())
}

/// The devices nearest to the endpoint's GPU; none where there is no GPU.
fn nearest(config: &Config) -> Vec<DeviceName> {
    places::nearest_rdma(config.gpu_index).iter().filter_map(|name| name.parse().ok()).collect()
}

/// The ports that a selection takes, of those that carry traffic.
fn selected(config: &Config, selection: &Selection) -> Result<Vec<DeviceName>, RailError> {
    let all = verbs::list(config.verbs.library.as_deref())?;
    let ports = all.iter().flat_map(|device| device.ports.iter().map(move |port| (device, port)));
    let taken = ports
        .filter(|(device, port)| port.is_active && selection.takes(&device.name, Some(port.number)))
        .map(|(device, port)| DeviceName { device: device.name.clone(), port: Some(port.number) });
    let taken: Vec<_> = taken.collect();
    if taken.is_empty() {
        let all: Vec<_> = all.iter().map(|device| device.name.as_str()).collect();
        return Err(RailError::Unavailable(format!(
            "UCCL_IB_HCA={selection} leaves no RDMA port that is up; devices here: {}",
            if all.is_empty() { "none".to_owned() } else { all.join(", ") }
        )));
    }
    Ok(taken)
}
