//! Which of a port's GIDs to use.

use std::{
    fs,
    net::{IpAddr, Ipv6Addr},
    path::Path,
};

use uccl_device::{GidKind, RdmaGid};
use uccl_wire::verbs::LinkLayer;

/// The rank of a GID; less is better. RoCE v2 comes first because it can be routed, and IPv4
/// because most fabrics are set up for it.
fn rank(gid: &RdmaGid, layer: LinkLayer) -> u8 {
    match (gid.kind, gid.address.to_canonical(), layer) {
        (Some(GidKind::RoceV2), IpAddr::V4(_), _) => 0,
        (Some(GidKind::RoceV2), IpAddr::V6(ip), _) if !ip.is_unicast_link_local() => 1,
        (Some(GidKind::RoceV2), IpAddr::V6(_), _) => 2,
        (_, _, LinkLayer::InfiniBand) => 3,
        (_, _, LinkLayer::Ethernet) => 4,
    }
}

/// Whether the interface of a GID carries traffic; less is better.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Link {
    /// It does, as far as is known.
    Usable,
    /// It is down.
    Down,
    /// It is not in our network namespace: that of the host, or of another container.
    Elsewhere,
}

impl Link {
    /// Looks up the interface in this folder, in which the kernel lists network interfaces.
    pub(super) fn of(gid: &RdmaGid, interfaces: &Path) -> Self {
        let Some(name) = &gid.interface else { return Self::Usable };
        match fs::read_to_string(interfaces.join(name).join("operstate")) {
            Ok(state) if matches!(state.trim(), "down" | "lowerlayerdown" | "notpresent") => {
                Self::Down
            }
            Ok(_) => Self::Usable,
            Err(_) => Self::Elsewhere,
        }
    }
}

/// The GIDs with which a peer may be reached, the best first: the requested one, or else all. Where
/// the first does not reach a peer, another may: the table shows neither routes nor the rules of
/// switches.
///
/// # Errors
/// When the port does not have the GID asked for, or has none at all.
pub(super) fn candidates(
    table: &[RdmaGid],
    layer: LinkLayer,
    asked: Option<u8>,
    link: impl Fn(&RdmaGid) -> Link,
) -> Result<Vec<&RdmaGid>, String> {
    if let Some(index) = asked {
        let found = table.iter().find(|gid| gid.index == u32::from(index));
        return found.map(|gid| vec![gid]).ok_or_else(|| {
            let known: Vec<_> = table.iter().map(ToString::to_string).collect();
            format!("the port has no GID at index {index}; it has {}", known.join(", "))
        });
    }
    // An index has 8 bits in a request.
    let mut usable: Vec<_> = table.iter().filter(|gid| u8::try_from(gid.index).is_ok()).collect();
    // Of equals, the first comes first: an InfiniBand port's own GID is at 0.
    match layer {
        LinkLayer::Ethernet => {
            usable.sort_by_cached_key(|gid| (link(gid), rank(gid, layer), gid.index));
        }
        LinkLayer::InfiniBand => usable.sort_by_key(|gid| (rank(gid, layer), gid.index)),
    }
    match usable.is_empty() {
        true => Err("the port has no GID: has its interface an address?".to_owned()),
        false => Ok(usable),
    }
}

/// The candidate with which to answer a peer of this address: of the same kind of address, and of a
/// network that has the peer in it, as far as there are such. `is_near` tests whether the network
/// of one of our addresses contains another.
pub(super) fn towards(
    candidates: &[RdmaGid],
    peer: Ipv6Addr,
    is_near: impl Fn(IpAddr, IpAddr) -> bool,
) -> Option<&RdmaGid> {
    let (theirs, kind) = (peer.to_canonical(), kind_of(peer.to_canonical()));
    candidates.iter().min_by_key(|gid| {
        let ours = gid.address.to_canonical();
        // The first of equals is taken.
        (kind_of(ours) != kind, !is_near(ours, theirs))
    })
}

/// Addresses of one kind reach each other: IPv4, IPv6, and IPv6 on one link.
fn kind_of(ip: IpAddr) -> u8 {
    match ip {
        IpAddr::V4(_) => 0,
        IpAddr::V6(ip) if !ip.is_unicast_link_local() => 1,
        IpAddr::V6(_) => 2,
    }
}

/// A GID's index in the port's table, and the GID.
pub(super) fn place_of(gid: &RdmaGid) -> (u8, [u8; 16]) {
    // Those with greater indices are no candidates.
    (u8::try_from(gid.index).unwrap_or_default(), gid.address.octets())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(index: u32, text: &str, kind: GidKind) -> RdmaGid {
        RdmaGid::new(index, text.parse().expect("an address"), Some(kind))
    }

    fn usable(_: &RdmaGid) -> Link {
        Link::Usable
    }

    #[test]
    fn the_best_gid_is_chosen() {
        use GidKind::{InfiniBandOrRoceV1, RoceV2};
        let mut table = vec![
            gid(0, "fe80::1", InfiniBandOrRoceV1),
            gid(1, "fe80::1", RoceV2),
            gid(2, "::ffff:10.0.0.1", InfiniBandOrRoceV1),
            gid(3, "2001:db8::1", RoceV2),
            gid(4, "::ffff:10.0.0.1", RoceV2),
            gid(5, "::ffff:10.0.1.1", RoceV2),
        ];
        let order = |table: &[RdmaGid], layer, asked| {
            let found = candidates(table, layer, asked, usable);
            found.map(|gids| gids.iter().map(|gid| gid.index).collect::<Vec<_>>())
        };
        for best in [vec![4, 5, 3, 1, 0, 2], vec![3, 1, 0, 2], vec![1, 0, 2], vec![0]] {
            table.truncate(best.len());
            assert_eq!(order(&table, LinkLayer::Ethernet, None), Ok(best));
        }
        let ib = [gid(0, "fe80::1", InfiniBandOrRoceV1), gid(1, "fec0::1", InfiniBandOrRoceV1)];
        let order = |asked| order(&ib, LinkLayer::InfiniBand, asked);
        assert_eq!((order(None), order(Some(1))), (Ok(vec![0, 1]), Ok(vec![1])));
        let said = order(Some(7)).expect_err("not in the table");
        assert!(said.contains("index 7") && said.contains("0: fe80::1 (IB/RoCE v1)"), "{said}");
        assert!(candidates(&[], LinkLayer::Ethernet, None, usable).is_err());
        let far = [gid(256, "fe80::1", RoceV2)];
        assert!(candidates(&far, LinkLayer::Ethernet, None, usable).is_err());
    }

    #[test]
    fn an_interface_that_is_down_or_elsewhere_comes_last() {
        let folder = tempfile::tempdir().expect("a folder");
        for (name, state) in [("eth0", "down"), ("eth1", "unknown"), ("eth2", "up")] {
            let interface = folder.path().join(name);
            fs::create_dir(&interface).expect("an interface");
            fs::write(interface.join("operstate"), format!("{state}\n")).expect("its state");
        }
        let of = |index, address, interface: &str| {
            let interface = Some(interface.to_owned()).filter(|name| !name.is_empty());
            let mut gid = gid(index, address, GidKind::RoceV2);
            gid.interface = interface;
            gid
        };
        let table = [
            of(0, "::ffff:10.0.0.1", "the_hosts"),
            of(1, "::ffff:10.0.0.2", "eth0"),
            of(2, "2001:db8::1", "eth1"),
            of(3, "::ffff:10.0.0.3", "eth2"),
            of(4, "::ffff:10.0.0.4", ""),
        ];
        let link = |gid: &RdmaGid| Link::of(gid, folder.path());
        let found = candidates(&table, LinkLayer::Ethernet, None, link).expect("there are some");
        assert_eq!(found.iter().map(|gid| gid.index).collect::<Vec<_>>(), [3, 4, 2, 1, 0]);
    }

    #[test]
    fn a_peer_is_answered_from_its_own_network() {
        let table = [
            gid(0, "::ffff:10.0.0.1", GidKind::RoceV2),
            gid(1, "::ffff:10.0.1.1", GidKind::RoceV2),
            gid(2, "2001:db8::1", GidKind::RoceV2),
            gid(3, "fe80::1", GidKind::RoceV2),
        ];
        let is_near = |ours: IpAddr, theirs: IpAddr| match (ours, theirs) {
            (IpAddr::V4(ours), IpAddr::V4(theirs)) => ours.octets()[..3] == theirs.octets()[..3],
            _ => false,
        };
        let answered = |peer: &str| {
            let peer = peer.parse().expect("an address");
            towards(&table, peer, is_near).map(|gid| gid.index)
        };
        assert_eq!(answered("::ffff:10.0.1.9"), Some(1));
        assert_eq!(answered("::ffff:10.0.7.9"), Some(0), "by a router");
        assert_eq!((answered("2001:db8:1::9"), answered("fe80::9")), (Some(2), Some(3)));
        assert_eq!(towards(&[], Ipv6Addr::LOCALHOST, is_near), None);
    }
}
