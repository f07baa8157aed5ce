//! The facts by which ranks decide whether they reach each other's GPU memory.

use uccl_device::cuda::Gpus;

use super::config::{Config, Reach};
use crate::shared::nodes::Node;

/// A rank's facts. The default is that of a rank that uses the host.
#[derive(Clone, Default)]
pub(super) struct Offer {
    /// Bytes that the ranks of a node share; none for a rank without a known node.
    node: Vec<u8>,
    /// Whether its window may have a fabric handle.
    has_fabric: bool,
}

impl Offer {
    /// The facts of a rank whose window is in its GPU's memory.
    pub(super) fn of(config: &Config) -> Self {
        // A rank without a known node takes part in the exchange, and fails later, so that the
        // others do not wait for it in vain.
        let node = Node::of_this_process(config.node).map(|node| node.to_bytes());
        let has_fabric = || {
            let device = Gpus::get().device(config.device);
            device.is_ok_and(|device| device.exports_fabric_handles())
        };
        Self {
            node: node.unwrap_or_default(),
            has_fabric: config.reach == Reach::Fabric && has_fabric(),
        }
    }

    /// As bytes: none for a rank that uses the host.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        match self.node.as_slice() {
            [] => Vec::new(),
            node => [node, &[u8::from(self.has_fabric)]].concat(),
        }
    }

    /// Whether ranks with these bytes and this one are all on one node, or all have fabric handles.
    pub(super) fn is_direct_with<'a>(&self, others: impl Iterator<Item = &'a [u8]>) -> bool {
        let (mut is_one_node, mut have_fabric) = (!self.node.is_empty(), self.has_fabric);
        for other in others {
            let (has_fabric, node) = other.split_last().unwrap_or((&0, &[]));
            is_one_node &= node == self.node;
            have_fabric &= *has_fabric == 1;
        }
        is_one_node || have_fabric
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(node: u8, has_fabric: bool) -> Offer {
        Offer { node: vec![node; 3], has_fabric }
    }

    fn is_direct(offers: &[Offer]) -> Vec<bool> {
        let bytes: Vec<_> = offers.iter().map(Offer::to_bytes).collect();
        let of = |offer: &Offer| offer.is_direct_with(bytes.iter().map(Vec::as_slice));
        offers.iter().map(of).collect()
    }

    #[test]
    fn all_ranks_are_direct_or_none_is() {
        assert_eq!(is_direct(&[offer(1, false), offer(1, true)]), [true; 2]);
        assert_eq!(is_direct(&[offer(1, true), offer(2, true), offer(2, true)]), [true; 3]);
        assert_eq!(is_direct(&[offer(1, true), offer(1, false), offer(2, true)]), [false; 3]);
        assert_eq!(is_direct(&[offer(1, true), Offer::default()]), [false; 2]);
        assert_eq!(is_direct(&[offer(1, false), offer(2, false)]), [false; 2]);
    }
}
