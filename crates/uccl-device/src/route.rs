//! The kernel's IPv4 routes.

use std::net::Ipv4Addr;

use serde::Serialize;

use crate::source::Source;

/// A route of the main table.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[non_exhaustive]
pub struct Route {
    /// The interface that it leaves by.
    pub interface: String,
    /// The network that it leads to.
    pub destination: Ipv4Addr,
    /// Which bits of the destination count. None do in the default route.
    pub mask: Ipv4Addr,
    /// Whether it goes through a gateway. If not, the hosts are on the interface's own link.
    pub gateway: bool,
    /// Lower is preferred.
    pub metric: u32,
}

const FLAG_UP: u32 = 1;
const FLAG_GATEWAY: u32 = 2;
const FLAG_REJECT: u32 = 0x200;

impl Route {
    pub(crate) fn read_all(source: &Source) -> Vec<Self> {
        let text = source.text("proc/net/route").unwrap_or_default();
        text.lines().skip(1).filter_map(Self::parse).collect()
    }

    /// Parses a line such as `eth0 00000000 0101A8C0 0003 0 0 100 00000000 0 0 0`: interface,
    /// destination, gateway, flags, two counters, metric, mask. An address is printed as the word
    /// that its bytes form in the kernel's memory.
    fn parse(line: &str) -> Option<Self> {
        let words: Vec<_> = line.split_whitespace().collect();
        let [interface, destination, _, flags, _, _, metric, mask, ..] = words.as_slice() else {
            return None;
        };
        let address = |text: &str| {
            let word = u32::from_str_radix(text, 16).ok()?;
            Some(Ipv4Addr::from(word.to_ne_bytes()))
        };
        let flags = u32::from_str_radix(flags, 16).ok()?;
        (flags & (FLAG_UP | FLAG_REJECT) == FLAG_UP).then_some(Self {
            interface: (*interface).to_owned(),
            destination: address(destination)?,
            mask: address(mask)?,
            gateway: flags & FLAG_GATEWAY != 0,
            metric: metric.parse().ok()?,
        })
    }

    pub(crate) fn is_default(&self) -> bool {
        self.mask.is_unspecified()
    }

    /// Whether the route leads to this address without a gateway.
    pub(crate) fn has_on_link(&self, ip: Ipv4Addr) -> bool {
        !self.gateway
            && !self.is_default()
            && ip.to_bits() & self.mask.to_bits() == self.destination.to_bits()
    }
}
