//! Devices that libfabric has a provider for.

use std::sync::Arc;

use uccl_fabric::rail::{Rail, RailError};
use uccl_libfabric::{Devices, LibfabricRail, LibfabricSettings};

use crate::config::Config;

/// Opens libfabric's devices with the settings; `suitable` applies where nothing is set.
pub(super) fn open(
    config: &Config,
    suitable: &LibfabricSettings,
) -> Result<Vec<Arc<dyn Rail>>, RailError> {
    let ours = &config.libfabric;
    let provider = suitable.provider.clone();
    let devices = match &ours.devices {
        // With Slingshot, each NIC belongs to one GPU.
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
