//! How the ranks of a test reach each other.

use uccl_ep::cuda::{Config, Reach};
use uccl_p2p::Transport;

#[derive(Clone, Copy, Debug)]
pub(crate) enum Route {
    /// Direct access, which the group finds by itself.
    Direct,
    /// By windows of the host, as if they were on this many nodes.
    ViaHost(usize, Transport),
}

impl Route {
    /// A rank's part of a group with this route between its ranks.
    pub(crate) fn of(self, config: Config) -> Config {
        let Self::ViaHost(nodes, transport) = self else { return config };
        let bind = Some([127, 0, 0, 1].into());
        let network = uccl_p2p::Config { transport, bind, num_cpus: 1, ..Default::default() };
        let node = Some((config.rank * nodes / config.ranks) as u64);
        Config { reach: Reach::ViaHost, node, network: Some(network), ..config }
    }
}
