//! Opens an endpoint's devices: those that move memory one-sidedly, as the settings choose them.
//!
//! Builds without a link give an error where the link is asked for.

#[cfg(feature = "libfabric")]
mod libfabric;
mod udp;
#[cfg(feature = "verbs")]
mod verbs;

use std::{path::Path, sync::Arc};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use uccl_fabric::rail::{Rail, RailError};
use uccl_libfabric::LibfabricSettings;
use uccl_rma::link_of;

use crate::{
    config::{Config, Transport},
    error::{Error, Result},
};

/// The opened devices, or the reason why there are none.
pub(crate) struct OpenedDevices {
    pub(crate) rails: Vec<Arc<dyn Rail>>,
    /// The reason, as text for people; empty if there is none.
    pub(crate) why_none: String,
}

/// Whether there may be devices. Opens none to answer.
pub(crate) fn possible(config: &Config) -> bool {
    match config.transport {
        Transport::Auto => has_devices("/sys/class/infiniband") || has_devices("/sys/class/cxi"),
        Transport::Udp => true,
        other => other.needs_rails(),
    }
}

/// Whether the kernel lists any device in this folder.
fn has_devices(folder: &str) -> bool {
    Path::new(folder).read_dir().is_ok_and(|mut devices| devices.next().is_some())
}

/// Lets this process lock as much memory as its hard limit allows. Devices lock registered memory,
/// and many systems start programs with a soft limit of some MiB below an unlimited hard one.
fn lock_more() {
    let limit = getrlimit(Resource::Memlock);
    if limit.current != limit.maximum {
        let raised = setrlimit(Resource::Memlock, Rlimit { current: limit.maximum, ..limit });
        if let Err(e) = raised {
            tracing::debug!("the limit for locked memory stays as it is: {e}");
        }
    }
}

/// Opens the devices. If none can be opened, [`OpenedDevices::why_none`] says why.
pub(crate) fn open(config: &Config) -> OpenedDevices {
    lock_more();
    let opened = match config.transport {
        Transport::Auto => open_best(config),
        Transport::Verbs => open_verbs(config),
        Transport::Libfabric => open_libfabric(config, &config.libfabric),
        Transport::Cxi => open_libfabric(config, &LibfabricSettings::cxi()),
        Transport::Efa => open_libfabric(config, &LibfabricSettings::efa()),
        Transport::Udp => udp::open(config),
        Transport::Local | Transport::Tcp | Transport::Fifo => Ok(Vec::new()),
    };
    match opened {
        Ok(rails) => OpenedDevices { rails, why_none: "RDMA is not asked for".into() },
        Err(e) => {
            let link = if config.transport == Transport::Udp { "UDP" } else { "RDMA" };
            tracing::warn!(
                "{link} is not used, data goes over other links: {e}; `uccl doctor` says what to do about it"
            );
            OpenedDevices { rails: Vec::new(), why_none: e.to_string() }
        }
    }
}

/// The path of transfers to a peer on another host, if that peer has devices of the same kind:
/// `verbs`, `libfabric`, `udp` or `tcp`. Opens the devices, and closes them.
///
/// # Errors
/// The settings allow none that works.
pub fn path_elsewhere(config: &Config) -> Result<&'static str> {
    if matches!(config.transport, Transport::Local | Transport::Fifo) {
        let why = format!("UCCL_P2P_TRANSPORT={} reaches this host alone", config.transport);
        return Err(Error::Invalid(why));
    }
    if !possible(config) {
        return Ok("tcp");
    }
    let OpenedDevices { rails, why_none } = open(config);
    match rails.is_empty() {
        false => Ok(link_of(&rails)),
        true if config.transport.needs_rails() => Err(Error::Invalid(why_none)),
        true => Ok("tcp"),
    }
}

/// Opens verbs devices where they work; else devices of the networks that only libfabric reaches,
/// where there are any.
fn open_best(config: &Config) -> Result<Vec<Arc<dyn Rail>>, RailError> {
    if has_devices("/sys/class/cxi") {
        return open_libfabric(config, &LibfabricSettings::cxi());
    }
    if has_devices("/sys/class/infiniband") {
        // EFA devices are listed among those of verbs, but cannot make connections.
        return open_verbs(config)
            .or_else(|e| open_libfabric(config, &LibfabricSettings::efa()).map_err(|_| e));
    }
    Ok(Vec::new())
}

#[cfg(feature = "verbs")]
fn open_verbs(config: &Config) -> Result<Vec<Arc<dyn Rail>>, RailError> {
    verbs::open(config)
}

#[cfg(not(feature = "verbs"))]
fn open_verbs(_: &Config) -> Result<Vec<Arc<dyn Rail>>, RailError> {
    Err(absent("verbs"))
}

/// Opens libfabric's devices with the settings; `suitable` applies where nothing is set.
#[cfg(feature = "libfabric")]
fn open_libfabric(
    config: &Config,
    suitable: &LibfabricSettings,
) -> Result<Vec<Arc<dyn Rail>>, RailError> {
    libfabric::open(config, suitable)
}

#[cfg(not(feature = "libfabric"))]
fn open_libfabric(_: &Config, _: &LibfabricSettings) -> Result<Vec<Arc<dyn Rail>>, RailError> {
    Err(absent("libfabric"))
}

#[cfg(not(all(feature = "verbs", feature = "libfabric")))]
fn absent(feature: &str) -> RailError {
    RailError::Unavailable(format!("this build has none of it: the feature `{feature}` is off"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_to_another_host_is_one_that_the_settings_allow() {
        let path = |transport| path_elsewhere(&Config { transport, ..Config::default() });
        assert_eq!(path(Transport::Tcp).expect("a path"), "tcp");
        assert_eq!(path(Transport::Udp).expect("a path"), "udp");
        for transport in [Transport::Local, Transport::Fifo] {
            let why = path(transport).expect_err("no path").to_string();
            assert!(why.contains(&transport.to_string()), "{why}");
        }
        let auto = path(Transport::Auto).expect("a path");
        assert!(["verbs", "libfabric", "tcp"].contains(&auto), "{auto}");
    }

    #[test]
    fn devices_may_lock_as_much_as_the_system_allows() {
        let before = getrlimit(Resource::Memlock);
        let little = before.maximum.unwrap_or(u64::MAX).min(64 << 10);
        let low = Rlimit { current: Some(little), ..before };
        setrlimit(Resource::Memlock, low).expect("lowered");
        let opened = open(&Config { transport: Transport::Tcp, ..Config::default() });
        let after = getrlimit(Resource::Memlock);
        setrlimit(Resource::Memlock, before).expect("as it was");
        assert!(opened.rails.is_empty());
        assert_eq!(after.current, before.maximum);
    }
}
