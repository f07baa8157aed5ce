//! How the ranks of a test reach each other.

use uccl_ep::cuda::{Config, Reach};
use uccl_p2p::Transport;

#[derive(Clone, Copy, Debug)]
pub(crate) enum Route {
    /// Direct access, which the group finds by itself.
    Direct,
    /// Direct access by fabric handles, as if each rank were on a host of its own.
    Fabric,
    /// By windows of the host, as if they were on this many nodes.
    ViaHost(usize, Transport),
    /// The same, with the last rank alone on a node.
    LastApart(Transport),
}

impl Route {
    /// A rank's part of a group with this route between its ranks.
    pub(crate) fn of(self, config: Config) -> Config {
        let (node, transport) = match self {
            Self::Direct => return config,
            Self::Fabric => {
                let node = Some(config.rank as u64);
                return Config { reach: Reach::Fabric, node, ..config };
            }
            Self::ViaHost(nodes, transport) => (config.rank * nodes / config.ranks, transport),
            Self::LastApart(transport) => (usize::from(config.rank + 1 == config.ranks), transport),
        };
        let bind = Some([127, 0, 0, 1].into());
        let network = uccl_p2p::Config { transport, bind, num_cpus: 1, ..Default::default() };
        let node = Some(node as u64);
        Config { reach: Reach::ViaHost, node, network: Some(network), ..config }
    }
}
