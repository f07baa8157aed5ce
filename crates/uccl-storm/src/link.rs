//! The links of a storm, and the settings of an endpoint for each.

use std::time::Duration;

use clap::ValueEnum;
use uccl_p2p::{Checksum, Config, Transport};

/// The path of the data.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Link {
    /// Copies between the two processes' memory.
    Cma,
    /// Rings in shared memory.
    Rings,
    /// Memory that both processes map.
    Mapped,
    /// Copies by the owner of the memory, on request.
    Owner,
    Tcp,
    /// RDMA verbs, where there is a device.
    Verbs,
    /// libfabric with the provider that `UCCL_TEST_LIBFABRIC` names, or tcp;ofi_rxm.
    Libfabric,
}

impl Link {
    /// The links that every machine has.
    pub(crate) const EVERYWHERE: [Self; 5] =
        [Self::Cma, Self::Tcp, Self::Rings, Self::Mapped, Self::Owner];

    /// Settings of an endpoint. Those that do not make up the link are random.
    pub(crate) fn config(self, rng: &mut fastrand::Rng) -> Config {
        let mut config = Config {
            bind: Some([127, 0, 0, 1].into()),
            port: Some(0),
            num_cpus: rng.usize(1..=3),
            timeout: Duration::from_millis(rng.u64(1500..3000)),
            transfer_timeout: Duration::from_secs(20),
            spin: Duration::from_micros([0, 20, 100][rng.usize(0..3)]),
            checksum: [Checksum::Auto, Checksum::On, Checksum::Off][rng.usize(0..3)],
            tcp_streams: rng.usize(0..=4),
            ..Config::default()
        };
        config.transport = match self {
            Self::Cma | Self::Rings | Self::Mapped | Self::Owner => Transport::Local,
            Self::Tcp => Transport::Tcp,
            Self::Verbs => Transport::Verbs,
            Self::Libfabric => Transport::Libfabric,
        };
        match self {
            Self::Rings => config.cma = false,
            Self::Mapped => config.cma = rng.bool(),
            Self::Owner => config.ask_owners = true,
            Self::Verbs => {
                config.bind = std::env::var("UCCL_STORM_BIND").ok().and_then(|ip| ip.parse().ok())
            }
            Self::Libfabric => {
                let provider = std::env::var("UCCL_TEST_LIBFABRIC");
                config.libfabric.provider = Some(provider.unwrap_or_else(|_| "tcp;ofi_rxm".into()));
            }
            Self::Cma | Self::Tcp => {}
        }
        config
    }

    /// Whether memory is taken from [`uccl_p2p::Endpoint::alloc`].
    pub(crate) fn maps_memory(self) -> bool {
        self == Self::Mapped
    }
}
