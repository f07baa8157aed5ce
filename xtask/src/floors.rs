//! Checks that dependencies between the crates point down, as docs/architecture.md draws them.
//!
//! Dependencies of tests alone are not looked at: a test may use every crate.

use std::{collections::BTreeSet, fs, path::Path};

use anyhow::{Context, Result, ensure};
use toml::Table;

use crate::tree;

/// Crates of one height.
struct Floor {
    name: &'static str,
    crates: &'static [&'static str],
    /// The floors that its crates may depend on.
    below: &'static [&'static str],
    /// The crate of this floor that others of it may depend on.
    shared: Option<&'static str>,
}

/// All floors, the lowest first.
const FLOORS: &[Floor] = &[
    Floor {
        name: "ground",
        crates: &["uccl-wire", "uccl-device", "uccl-kernels", "uccl-nccl-abi", "uccl-nixl-dir"],
        below: &[],
        shared: Some("uccl-kernels"),
    },
    Floor {
        name: "contracts",
        crates: &["uccl-fabric", "uccl-tran"],
        below: &["ground"],
        shared: None,
    },
    // Networks in virtual time, for the algorithms of the transport.
    Floor {
        name: "simulation",
        crates: &["uccl-sim"],
        below: &["ground", "contracts"],
        shared: None,
    },
    Floor {
        name: "links",
        crates: &[
            "uccl-stream",
            "uccl-local",
            "uccl-fifo",
            "uccl-rma",
            "uccl-verbs",
            "uccl-libfabric",
            "uccl-udp",
        ],
        below: &["ground", "contracts"],
        shared: Some("uccl-stream"),
    },
    // Posted receives of collectives, beside the engine. The two know nothing of each other.
    Floor {
        name: "flows",
        crates: &["uccl-flow"],
        below: &["ground", "contracts", "links"],
        shared: None,
    },
    Floor { name: "protocol", crates: &["uccl-proto"], below: &["ground"], shared: None },
    // It makes the lanes of the links, and knows nothing else of them.
    Floor {
        name: "engine",
        crates: &["uccl-p2p"],
        below: &["ground", "contracts", "links", "protocol"],
        shared: None,
    },
    Floor {
        name: "expert parallelism",
        crates: &["uccl-ep"],
        below: &["ground", "contracts", "engine"],
        shared: None,
    },
    Floor { name: "weights", crates: &["uccl-shards"], below: &["ground", "engine"], shared: None },
    Floor {
        name: "collectives",
        crates: &["uccl-collective"],
        below: &["ground", "engine"],
        shared: None,
    },
    Floor {
        name: "bindings",
        crates: &["uccl-py", "uccl-capi", "uccl-nixl", "uccl-nccl"],
        below: &["ground", "flows", "engine", "expert parallelism", "weights", "collectives"],
        shared: None,
    },
    // It calls plugins by their tables alone, anyone's as this project's.
    Floor {
        name: "driver of plugins",
        crates: &["uccl-nccl-check"],
        below: &["ground"],
        shared: None,
    },
    // It lists the devices of the links.
    Floor {
        name: "command",
        crates: &["uccl-bench", "uccl-cli"],
        below: &[
            "ground",
            "simulation",
            "links",
            "engine",
            "expert parallelism",
            "driver of plugins",
        ],
        shared: Some("uccl-bench"),
    },
    // Nothing depends on these but tests.
    Floor {
        name: "tests",
        crates: &["uccl-chaos", "uccl-conformance", "uccl-fuzz", "uccl-storm"],
        below: &["ground", "contracts", "links", "engine"],
        shared: None,
    },
];

/// Fails if a crate depends on one that its floor may not depend on, or stands on no floor.
pub(crate) fn check() -> Result<()> {
    let mut wrong = Vec::new();
    let mut folders: Vec<_> =
        fs::read_dir(tree::root().join("crates"))?.collect::<std::io::Result<_>>()?;
    folders.sort_by_key(fs::DirEntry::file_name);
    for folder in folders {
        let name = folder.file_name().to_string_lossy().into_owned();
        let used = dependencies(&folder.path().join("Cargo.toml"))?;
        wrong.extend(used.iter().filter_map(|used| refusal(&name, used)));
        if floor_of(&name).is_none() {
            wrong.push(format!("{name} stands on no floor"));
        }
    }
    ensure!(
        wrong.is_empty(),
        "dependencies that xtask/src/floors.rs refuses:\n{}",
        wrong.join("\n")
    );
    Ok(())
}

fn floor_of(name: &str) -> Option<&'static Floor> {
    FLOORS.iter().find(|floor| floor.crates.contains(&name))
}

/// The reason why a crate may not depend on another of the workspace; `None` if it may.
fn refusal(name: &str, used: &str) -> Option<String> {
    let (floor, other) = (floor_of(name)?, floor_of(used)?);
    let is_allowed = floor.below.contains(&other.name) || floor.shared == Some(used);
    (!is_allowed).then(|| format!("{name} ({}) depends on {used} ({})", floor.name, other.name))
}

/// The crates that a crate depends on, those of its tests left out.
fn dependencies(manifest: &Path) -> Result<BTreeSet<String>> {
    let place = || manifest.display().to_string();
    let text = fs::read_to_string(manifest).with_context(place)?;
    Ok(dependencies_in(&text.parse().with_context(place)?))
}

fn dependencies_in(manifest: &Table) -> BTreeSet<String> {
    let of_targets = manifest.get("target").and_then(toml::Value::as_table);
    let sections = of_targets.into_iter().flat_map(Table::values).filter_map(toml::Value::as_table);
    let mut found = BTreeSet::new();
    for section in sections.chain([manifest]) {
        for kind in ["dependencies", "build-dependencies"] {
            let listed = section.get(kind).and_then(toml::Value::as_table);
            found.extend(listed.into_iter().flat_map(Table::keys).cloned());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_point_down() {
        check().expect("the crates as they are");
        assert!(refusal("uccl-p2p", "uccl-local").is_none(), "the engine makes the links");
        assert!(refusal("uccl-local", "uccl-stream").is_none(), "its rings carry the protocol");
        for (name, used) in [
            ("uccl-ep", "uccl-local"),
            ("uccl-local", "uccl-p2p"),
            ("uccl-rma", "uccl-verbs"),
            ("uccl-stream", "uccl-chaos"),
            ("uccl-py", "uccl-fabric"),
        ] {
            assert!(refusal(name, used).is_some(), "{name} may depend on {used}");
        }
    }

    #[test]
    fn every_floor_below_is_an_earlier_one() {
        for (at, floor) in FLOORS.iter().enumerate() {
            let earlier = |name: &&str| FLOORS[..at].iter().any(|floor| floor.name == *name);
            assert!(floor.below.iter().all(earlier), "{}", floor.name);
        }
    }

    #[test]
    fn dependencies_of_tests_do_not_count() {
        let text = "[dependencies]\na = '1'\n[dev-dependencies]\nb = '1'\n[build-dependencies]\nc = '1'\n\
            [target.'cfg(loom)'.dependencies]\nd.workspace = true\n";
        let found = dependencies_in(&text.parse().expect("a manifest"));
        assert_eq!(found.into_iter().collect::<Vec<_>>(), ["a", "c", "d"]);
    }
}
