//! Devices of RDMA verbs.

use std::sync::Arc;

use uccl_fabric::rail::{Rail, RailError};
use uccl_verbs::{DeviceName, VerbsSettings};

use crate::{
    config::{Config, Selection},
    drive::places,
};

/// Opens the devices that are named, else those nearest to the GPU, else all.
pub(super) fn open(config: &Config) -> Result<Vec<Arc<dyn Rail>>, RailError> {
    let with = |devices| uccl_verbs::open(&VerbsSettings { devices, ..config.verbs.clone() });
    let near = nearest(config);
    let rails = if !config.verbs.devices.is_empty() {
        uccl_verbs::open(&config.verbs)
    } else if let Some(selection) = &config.rdma_devices {
        let selected = selected(config, selection)?;
        let is_near = |name: &DeviceName| near.iter().any(|near| near.device == name.device);
        let both: Vec<_> = selected.iter().filter(|name| is_near(name)).cloned().collect();
        with(if both.is_empty() { selected } else { both })
    } else if near.is_empty() {
        uccl_verbs::open(&config.verbs)
    } else {
        with(near).or_else(|e| {
            tracing::warn!(
                "the RDMA devices nearest to the GPU are of no use, others are tried, to which the way is longer: {e}"
            );
            uccl_verbs::open(&config.verbs)
        })
    }?;
    Ok(rails.into_iter().map(|rail| Arc::new(rail) as Arc<dyn Rail>).collect())
}

/// The devices nearest to the endpoint's GPU; none where there is no GPU.
fn nearest(config: &Config) -> Vec<DeviceName> {
    places::nearest_rdma(config.gpu_index).iter().filter_map(|name| name.parse().ok()).collect()
}

/// The selected ports, of those that carry traffic.
fn selected(config: &Config, selection: &Selection) -> Result<Vec<DeviceName>, RailError> {
    let all = uccl_verbs::list(config.verbs.library.as_deref())?;
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
