//! Which of a port's GIDs to use.

use std::net::IpAddr;

use uccl_device::{GidKind, RdmaGid};
use uccl_wire::verbs::LinkLayer;

/// The rank of a GID; less is better. RoCE v2 comes first because it can be routed, and IPv4 because most fabrics are
/// set up for it.
fn rank(gid: &RdmaGid, layer: LinkLayer) -> u8 {
    match (gid.kind, gid.address.to_canonical(), layer) {
        (Some(GidKind::RoceV2), IpAddr::V4(_), _) => 0,
        (Some(GidKind::RoceV2), IpAddr::V6(ip), _) if !ip.is_unicast_link_local() => 1,
        (Some(GidKind::RoceV2), IpAddr::V6(_), _) => 2,
        (_, _, LinkLayer::InfiniBand) => 3,
        (_, _, LinkLayer::Ethernet) => 4,
    }
}

/// Chooses the GID to use: the one asked for, or else the best.
///
/// # Errors
/// When the port does not have the GID asked for, or has none at all.
pub(super) fn choose(
    table: &[RdmaGid],
    layer: LinkLayer,
    asked: Option<u8>,
) -> Result<&RdmaGid, String> {
    let Some(index) = asked else {
        // Of equals, take the first: an InfiniBand port's own GID is at 0.
        return table
            .iter()
            .min_by_key(|gid| (rank(gid, layer), gid.index))
            .ok_or_else(|| "the port has no GID: has its interface an address?".to_owned());
    };
    table.iter().find(|gid| gid.index == u32::from(index)).ok_or_else(|| {
        let known: Vec<_> = table.iter().map(ToString::to_string).collect();
        format!("the port has no GID at index {index}; it has {}", known.join(", "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(index: u32, text: &str, kind: GidKind) -> RdmaGid {
        RdmaGid::new(index, text.parse().expect("an address"), Some(kind))
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
        for (most, best) in [(6, 4), (4, 3), (3, 1), (1, 0)] {
            table.truncate(most);
            let chosen = choose(&table, LinkLayer::Ethernet, None);
            assert_eq!(chosen.map(|gid| gid.index), Ok(best));
        }
        let ib = [gid(0, "fe80::1", InfiniBandOrRoceV1), gid(1, "fec0::1", InfiniBandOrRoceV1)];
        let choose = |asked| choose(&ib, LinkLayer::InfiniBand, asked).map(|gid| gid.index);
        assert_eq!((choose(None), choose(Some(1))), (Ok(0), Ok(1)));
        let said = choose(Some(7)).expect_err("not in the table");
        assert!(said.contains("index 7") && said.contains("0: fe80::1 (IB/RoCE v1)"), "{said}");
        assert!(super::choose(&[], LinkLayer::Ethernet, None).is_err());
    }
}
