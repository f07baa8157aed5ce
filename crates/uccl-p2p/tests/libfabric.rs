//! The conformance suite over libfabric's providers.
//!
//! Runs where the library is installed. `UCCL_TEST_LIBFABRIC` names providers, separated by commas,
//! in place of those that need no hardware. In a guest, providers of RDMA devices get the two ends
//! of its first cable; they need `FI_UNIVERSE_SIZE=64` for soft-RoCE's queues, and settings without
//! which the provider is refused:
//! `cargo xtask guest --apart -- env UCCL_TEST_LIBFABRIC='verbs;ofi_rxm' FI_UNIVERSE_SIZE=64
//! FI_MR_CACHE_MAX_COUNT=0 FI_OFI_RXM_USE_SRX=1 ...`

mod support;

use std::{env, fs, path::PathBuf, sync::LazyLock, time::Duration};

use tempfile::TempDir;
use uccl_libfabric::{Devices, LibfabricRail, LibfabricSettings};
use uccl_p2p::{Config, NoInterrupt, Transport};

use self::support::{Pair, pair_of, path};

/// Providers that need no hardware, and two endpoints over each. `shm` is not among them: its two
/// ends are two processes.
pub(crate) fn pairs() -> Vec<(&'static str, Pair)> {
    let named = env::var("UCCL_TEST_LIBFABRIC").ok();
    let named = named.as_deref().unwrap_or("tcp,tcp;ofi_rxm").split(',').map(str::to_owned);
    let named = named.map(|name| -> &'static str { Box::leak(name.into_boxed_str()) });
    named.filter_map(|name| Some((name, joined(name)?))).collect()
}

fn joined(provider: &str) -> Option<Pair> {
    let [a, b] = [settings(provider, "RDMA_VM_DEVS"), settings(provider, "RDMA_VM_PEER_DEVS")];
    if let Err(why) = LibfabricRail::open_all(&a) {
        eprintln!("skipped: {why}");
        return None;
    }
    let is_apart = env::var_os("RDMA_VM_PEER_NETNS").is_some();
    let library = if is_apart { Some(another_copy()) } else { b.library };
    let b = LibfabricSettings { library, ..b };
    let end = |settings: LibfabricSettings| {
        move |config: &mut Config| {
            config.transport = Transport::Libfabric;
            config.transfer_timeout = Duration::from_secs(60);
            config.libfabric = settings.clone();
        }
    };
    Some(pair_of([&end(a), &end(b)]))
}

/// Settings of an end: the library that is named, or the system's, and of RDMA devices the first
/// that the variable names.
fn settings(provider: &str, devices: &str) -> LibfabricSettings {
    let names = env::var(devices).ok().filter(|_| provider.starts_with("verbs"));
    let first = names.and_then(|names| names.split(',').next().map(str::to_owned));
    LibfabricSettings {
        library: env::var_os("UCCL_LIBFABRIC_SO").map(Into::into),
        provider: Some(provider.to_owned()),
        devices: first.map_or(Devices::All, |first| Devices::Named(vec![first])),
        ..LibfabricSettings::default()
    }
}

/// A second copy of the loaded library, for an end in another network namespace. A process looks up
/// the addresses of devices once, at its first call, so one copy knows only one namespace's.
fn another_copy() -> PathBuf {
    static FOLDER: LazyLock<TempDir> = LazyLock::new(|| {
        let folder = tempfile::tempdir().expect("a folder");
        let mapped = fs::read_to_string("/proc/self/maps").expect("a process has mappings");
        let loaded = mapped.lines().find_map(|line| {
            let path = &line[line.find('/')?..];
            path.contains("/libfabric.so").then_some(path)
        });
        fs::copy(loaded.expect("it is loaded"), folder.path().join(COPY)).expect("a copy");
        folder
    });
    FOLDER.path().join(COPY)
}

const COPY: &str = "libfabric.so.1";

#[test]
fn the_path_is_libfabric() {
    for (link, p) in pairs() {
        assert_eq!(path(&p.a, p.to_b, &p.b), "libfabric", "{link}");
    }
}

/// Messages that the ends send by themselves, such as credits, are still in flight then.
#[test]
fn ends_may_go_as_soon_as_they_are_joined() {
    for _ in 0..10 {
        drop(pairs());
    }
}

#[test]
fn without_the_library_a_connection_names_the_missing_library() {
    let ends = [0; 2].map(|_| {
        let mut config = support::config(Transport::Libfabric);
        config.set("UCCL_LIBFABRIC_SO", "/nonexistent/libfabric.so").expect("a path");
        uccl_p2p::Endpoint::new(config).expect("an endpoint needs no library")
    });
    let refused = ends[0].connect(ends[1].addr(), None, &mut NoInterrupt);
    let why = refused.expect_err("there are no rails").to_string();
    assert!(why.contains("/nonexistent/libfabric.so"), "{why}");
}
