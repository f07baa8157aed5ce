//! A port's table of GIDs, and which of them to use.

use std::{
    fmt, fs,
    net::{IpAddr, Ipv6Addr},
    path::Path,
};

/// What kind of packets a GID stands for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum GidKind {
    /// InfiniBand, or iWARP.
    InfiniBand,
    /// Ethernet frames of their own kind, which are not routed.
    RoceV1,
    /// UDP.
    RoceV2,
}

impl fmt::Display for GidKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InfiniBand => "IB",
            Self::RoceV1 => "RoCE v1",
            Self::RoceV2 => "RoCE v2",
        })
    }
}

/// One entry of a port's table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Gid {
    /// Its place in the table.
    pub index: u8,
    /// Its 16 bytes.
    pub raw: [u8; 16],
    /// What packets it stands for.
    pub kind: GidKind,
    /// The network interface that it belongs to.
    pub interface: Option<String>,
}

impl Gid {
    /// The IP address that it is made of, over Ethernet.
    pub fn ip(&self) -> IpAddr {
        Ipv6Addr::from(self.raw).to_canonical()
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} ({})", self.index, Ipv6Addr::from(self.raw), self.kind)
    }
}

/// The entries in use, below a port's folder in sysfs.
pub(super) fn read_table(port: &Path) -> Vec<Gid> {
    let Ok(entries) = fs::read_dir(port.join("gids")) else { return Vec::new() };
    let mut table: Vec<_> = entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter_map(|index| read_entry(port, index))
        .collect();
    table.sort_by_key(|gid| gid.index);
    table
}

fn read_entry(port: &Path, index: u8) -> Option<Gid> {
    let text = |folder: &str| {
        // Where the entry is not in use, reading fails.
        let text = fs::read_to_string(port.join(folder).join(index.to_string())).ok()?;
        Some(text.trim().to_owned())
    };
    let raw = text("gids")?.parse::<Ipv6Addr>().ok()?.octets();
    if raw == [0; 16] {
        return None;
    }
    let kind = match text("gid_attrs/types").as_deref() {
        Some("RoCE v2") => GidKind::RoceV2,
        Some("IB/RoCE v1") if link_layer_is_ethernet(port) => GidKind::RoceV1,
        _ => GidKind::InfiniBand,
    };
    let interface = text("gid_attrs/ndevs").filter(|name| !name.is_empty());
    Some(Gid { index, raw, kind, interface })
}

fn link_layer_is_ethernet(port: &Path) -> bool {
    fs::read_to_string(port.join("link_layer")).is_ok_and(|text| text.trim() == "Ethernet")
}

/// How much a GID is wanted; less is better. RoCE v2 is routed, and IPv4 is what most fabrics are set up for.
fn rank(gid: &Gid) -> u8 {
    match (gid.kind, gid.ip()) {
        (GidKind::RoceV2, IpAddr::V4(_)) => 0,
        (GidKind::RoceV2, IpAddr::V6(ip)) if !ip.is_unicast_link_local() => 1,
        (GidKind::RoceV2, IpAddr::V6(_)) => 2,
        (GidKind::InfiniBand, _) => 3,
        (GidKind::RoceV1, _) => 4,
    }
}

/// The entry to use: the one asked for, or the best.
///
/// # Errors
/// What is wrong with the one asked for, or that there is none.
pub(super) fn choose(table: &[Gid], asked: Option<u8>) -> Result<&Gid, String> {
    let Some(index) = asked else {
        // Of equals the first: an InfiniBand port's is at 0.
        return table
            .iter()
            .min_by_key(|gid| (rank(gid), gid.index))
            .ok_or_else(|| "the port has no GID: has its interface an address?".to_owned());
    };
    table.iter().find(|gid| gid.index == index).ok_or_else(|| {
        let known: Vec<_> = table.iter().map(ToString::to_string).collect();
        format!("the port has no GID at index {index}; it has {}", known.join(", "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(index: u8, text: &str, kind: GidKind) -> Gid {
        let raw = text.parse::<Ipv6Addr>().expect("an address").octets();
        Gid { index, raw, kind, interface: None }
    }

    #[test]
    fn the_best_gid_is_chosen() {
        use GidKind::{InfiniBand, RoceV1, RoceV2};
        let mut table = vec![
            gid(0, "fe80::1", RoceV1),
            gid(1, "fe80::1", RoceV2),
            gid(2, "::ffff:10.0.0.1", RoceV1),
            gid(3, "2001:db8::1", RoceV2),
            gid(4, "::ffff:10.0.0.1", RoceV2),
            gid(5, "::ffff:10.0.1.1", RoceV2),
        ];
        for (most, best) in [(6, 4), (4, 3), (3, 1), (1, 0)] {
            table.truncate(most);
            assert_eq!(choose(&table, None).map(|gid| gid.index), Ok(best));
        }
        let ib = [gid(0, "fe80::1", InfiniBand), gid(1, "fec0::1", InfiniBand)];
        assert_eq!(choose(&ib, None).map(|gid| gid.index), Ok(0));
        assert_eq!(choose(&ib, Some(1)).map(|gid| gid.index), Ok(1));
        let said = choose(&ib, Some(7)).expect_err("not in the table");
        assert!(said.contains("index 7") && said.contains("0: fe80::1 (IB)"), "{said}");
        assert!(choose(&[], None).is_err());
    }

    #[test]
    fn the_table_is_what_sysfs_says() {
        let folder = tempfile::tempdir().expect("a folder");
        let port = folder.path();
        let write = |path: &str, text: &str| {
            let path = port.join(path);
            fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            fs::write(path, text).expect("a file");
        };
        write("link_layer", "Ethernet\n");
        write("gids/0", "fe80:0000:0000:0000:0077:00ff:fe00:0001\n");
        write("gids/1", "0000:0000:0000:0000:0000:ffff:0a4d:0001\n");
        write("gids/2", "0000:0000:0000:0000:0000:0000:0000:0000\n");
        write("gids/300", "fe80:0000:0000:0000:0077:00ff:fe00:0001\n");
        write("gid_attrs/types/0", "IB/RoCE v1\n");
        write("gid_attrs/types/1", "RoCE v2\n");
        write("gid_attrs/ndevs/1", "rail0a\n");
        let table = read_table(port);
        let kinds: Vec<_> = table.iter().map(|gid| gid.kind).collect();
        assert_eq!(kinds, [GidKind::RoceV1, GidKind::RoceV2]);
        assert_eq!(table[1].ip().to_string(), "10.77.0.1");
        assert_eq!(table[1].interface.as_deref(), Some("rail0a"));
        write("link_layer", "InfiniBand\n");
        assert_eq!(read_table(port)[0].kind, GidKind::InfiniBand);
        assert!(read_table(&port.join("none")).is_empty());
    }
}
