//! Settings for libfabric.

use std::{path::PathBuf, time::Duration};

use uccl_fabric::rail::RailError;

/// How libfabric is used. Nothing here reads the environment; the caller maps variables to fields.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LibfabricSettings {
    /// The library's file, or the folder that it is in. None: the system's search path is used.
    pub library: Option<PathBuf>,
    /// The provider, as `fi_info` writes it (`cxi`, `efa`, `tcp`, `tcp;ofi_rxm`). None: the best
    /// one that moves memory between hosts.
    pub provider: Option<String>,
    /// Which of the provider's domains become rails.
    pub devices: Devices,
    /// The side that makes calls from several threads safe.
    pub threading: Threading,
    /// Operations that the device's send queue holds. None: the provider's choice.
    pub tx_size: Option<usize>,
    /// The same for its receive queue.
    pub rx_size: Option<usize>,
    /// Completions that a completion queue holds. None: as many as can come.
    pub cq_size: Option<usize>,
    /// Most requests in flight on a channel.
    pub max_inflight: usize,
    /// Whether GPU memory is to be registered, where the provider can.
    pub gpu_memory: bool,
    /// A channel dies when requests are in flight and none has ended for this long; zero: never.
    /// Some providers (`shm`, `sockets`) never notice that a peer is gone.
    pub silence: Duration,
}

/// Which domains of a provider become rails.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Devices {
    /// All of them; loopback only if there is nothing else.
    #[default]
    All,
    /// The domains with these names, in this order.
    Named(Vec<String>),
    /// The one at this index, from 0, among those that [`All`](Devices::All) gives.
    Index(usize),
    /// One for this GPU: the one at the GPU's index modulo the number of domains that
    /// [`All`](Devices::All) gives.
    ForGpu(usize),
}

/// The side that makes calls from several threads safe.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Threading {
    /// The provider is thread-safe.
    #[default]
    Safe,
    /// We hold one lock for each rail, so the provider need not be thread-safe.
    Domain,
}

impl Default for LibfabricSettings {
    fn default() -> Self {
        Self {
            library: None,
            provider: None,
            devices: Devices::All,
            threading: Threading::Safe,
            tx_size: None,
            rx_size: None,
            cq_size: None,
            max_inflight: 256,
            gpu_memory: true,
            silence: Duration::from_secs(10),
        }
    }
}

impl LibfabricSettings {
    /// Settings for Slingshot: provider `cxi`, longer queues, and at most 32 requests in flight.
    pub fn cxi() -> Self {
        Self {
            provider: Some("cxi".into()),
            tx_size: Some(4096),
            rx_size: Some(4096),
            cq_size: Some(8192),
            max_inflight: 32,
            ..Self::default()
        }
    }

    /// Settings for AWS's adapters: provider `efa`, and short queues. For each endpoint `efa`
    /// allocates and registers one packet of some 9 KB for each entry of both queues
    /// (`efa_rdm_ep_create_buffer_pools`). The device's own length is thousands of entries, for
    /// each connection and device. Never run.
    pub fn efa() -> Self {
        Self {
            provider: Some("efa".into()),
            tx_size: Some(512),
            rx_size: Some(512),
            ..Self::default()
        }
    }

    /// Checks that the values make sense together.
    ///
    /// # Errors
    /// [`RailError::Unavailable`], which names the first wrong value and the allowed ones.
    pub fn validate(&self) -> Result<(), RailError> {
        let queue = |name: &str, size: Option<usize>| match size {
            Some(size) if !(1..=MAX_QUEUE).contains(&size) => {
                refuse(format!("{name} is {size}, and may be 1 to {MAX_QUEUE}"))
            }
            _ => Ok(()),
        };
        queue("the size of the send queue", self.tx_size)?;
        queue("the size of the receive queue", self.rx_size)?;
        queue("the size of the completion queue", self.cq_size)?;
        queue("the number of requests in flight", Some(self.max_inflight))?;
        if let Some(cq) = self.cq_size
            && cq < self.max_inflight
        {
            let inflight = self.max_inflight;
            return refuse(format!(
                "{inflight} requests in flight do not fit into a completion queue of {cq}"
            ));
        }
        let named = self.provider.as_deref();
        if named.is_some_and(|name| name.is_empty() || !name.bytes().all(|b| b.is_ascii_graphic()))
        {
            return refuse(format!("{:?} is no provider's name", named.unwrap_or_default()));
        }
        match &self.devices {
            Devices::Named(names) if names.is_empty() || names.iter().any(String::is_empty) => {
                refuse("the list of domains has an empty name".into())
            }
            _ => Ok(()),
        }
    }
}

/// The longest queue accepted. A larger size is surely a mistake.
const MAX_QUEUE: usize = 1 << 20;

fn refuse(why: String) -> Result<(), RailError> {
    Err(RailError::Unavailable(format!("libfabric's settings: {why}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_made_settings_are_valid() {
        for settings in
            [LibfabricSettings::default(), LibfabricSettings::cxi(), LibfabricSettings::efa()]
        {
            assert!(settings.validate().is_ok(), "{settings:?}");
        }
    }

    /// So that a channel posts as many requests as it may.
    #[test]
    fn queues_of_efa_are_short_and_hold_the_requests_in_flight() {
        let efa = LibfabricSettings::efa();
        for size in [efa.tx_size, efa.rx_size] {
            assert!(size.is_some_and(|size| (efa.max_inflight + 4..=1024).contains(&size)));
        }
    }

    #[test]
    fn a_setting_that_makes_no_sense_is_named() {
        let refused = |change: fn(&mut LibfabricSettings)| {
            let mut settings = LibfabricSettings::default();
            change(&mut settings);
            settings.validate().expect_err("refused").to_string()
        };
        assert!(refused(|s| s.max_inflight = 0).contains("in flight is 0"));
        assert!(refused(|s| s.tx_size = Some(0)).contains("send queue"));
        assert!(refused(|s| s.rx_size = Some(usize::MAX)).contains("receive queue"));
        assert!(refused(|s| s.cq_size = Some(10)).contains("256 requests"));
        assert!(refused(|s| s.provider = Some(String::new())).contains("provider"));
        assert!(refused(|s| s.provider = Some("t\0cp".into())).contains("provider"));
        assert!(refused(|s| s.devices = Devices::Named(Vec::new())).contains("domains"));
    }
}
