//! Which devices an endpoint opens: those that move memory one-sidedly, as its settings have it.

use std::{path::Path, sync::Arc};

use uccl_fabric::{
    rma::rail::{Rail, RailError},
    verbs::{self, VerbsSettings},
};

use crate::{
    config::{Config, Transport},
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
        Transport::Auto => ["/sys/class/infiniband", "/sys/class/cxi"].iter().any(|folder| {
            Path::new(folder).read_dir().is_ok_and(|mut devices| devices.next().is_some())
        }),
        other => other.needs_rails(),
    }
}

/// Opens them. Where any link will do, the absence of a library or a device is a path not taken.
pub(crate) fn open(config: &Config) -> Opened {
    if !possible(config) {
        return Opened { rails: Vec::new(), why_none: "RDMA is not asked for".into() };
    }
    match open_verbs(config) {
        Ok(rails) => Opened { rails, why_none: String::new() },
        Err(e) => {
            tracing::debug!("without RDMA: {e}");
            Opened { rails: Vec::new(), why_none: e.to_string() }
        }
    }
}

fn open_verbs(config: &Config) -> Result<Vec<Arc<dyn Rail>>, RailError> {
    let near = VerbsSettings { devices: nearest(config), ..config.verbs.clone() };
    let rails = match verbs::open(&near) {
        Err(e) if config.verbs.devices.is_empty() && !near.devices.is_empty() => {
            tracing::debug!("the nearest RDMA devices are of no use, others are tried: {e}");
            verbs::open(&config.verbs)
        }
        opened => opened,
    }?;
    Ok(rails.into_iter().map(|rail| Arc::new(rail) as Arc<dyn Rail>).collect())
}

/// The devices that are named, or else those nearest to the endpoint's GPU; all, where there is no GPU.
fn nearest(config: &Config) -> Vec<verbs::DeviceName> {
    if !config.verbs.devices.is_empty() {
        return config.verbs.devices.clone();
    }
    places::nearest_rdma(config.gpu_index).iter().filter_map(|name| name.parse().ok()).collect()
}
