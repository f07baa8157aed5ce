//! The engine over libfabric's providers: what every link must do.
//!
//! Runs where the library is; `UCCL_TEST_LIBFABRIC` names other providers than those that need no hardware, with
//! commas between them.

mod support;

use std::{path::PathBuf, time::Duration};

use uccl_fabric::libfabric::{LibfabricRail, LibfabricSettings};
use uccl_p2p::{Config, Transport, Uninterrupted};

use self::support::{Pair, advert, pair_of, register};

/// Providers that need no hardware, and two endpoints over each. Not `shm`, whose two ends are two processes.
pub(crate) fn pairs() -> Vec<(&'static str, Pair)> {
    let named = std::env::var("UCCL_TEST_LIBFABRIC").ok();
    let named = named.as_deref().unwrap_or("tcp,tcp;ofi_rxm").split(',').map(str::to_owned);
    let named = named.map(|name| -> &'static str { Box::leak(name.into_boxed_str()) });
    named.filter_map(|name| Some((name, joined(name)?))).collect()
}

fn joined(provider: &str) -> Option<Pair> {
    if let Err(why) = offered(provider) {
        eprintln!("skipped: {why}");
        return None;
    }
    let end = |config: &mut Config| {
        config.transport = Transport::Libfabric;
        config.transfer_timeout = Duration::from_secs(60);
        config.set("UCCL_LIBFABRIC_PROVIDER", provider).expect("a provider");
        config.libfabric.library = library();
    };
    Some(pair_of([&end, &end]))
}

/// Another library than the system's, if one is named.
fn library() -> Option<PathBuf> {
    std::env::var_os("UCCL_LIBFABRIC_SO").map(Into::into)
}

/// Whether the library is there and has the provider; else what is lacking.
fn offered(provider: &str) -> Result<(), String> {
    let (library, provider) = (library(), Some(provider.to_owned()));
    let settings = LibfabricSettings { library, provider, ..LibfabricSettings::default() };
    LibfabricRail::open_all(&settings).map(drop).map_err(|e| e.to_string())
}

#[test]
fn the_path_is_libfabric() {
    for (link, p) in pairs() {
        let mut memory = vec![0; 4096];
        let there = register(&p.b, &mut memory);
        let path = p.a.path(p.to_b, &advert(&p.b, there, &memory)).expect("a connection");
        assert_eq!(path, "libfabric", "{link}");
    }
}

#[test]
fn without_the_library_a_connection_says_what_is_missing() {
    let ends = [0; 2].map(|_| {
        let mut config = support::config(Transport::Libfabric);
        config.set("UCCL_LIBFABRIC_SO", "/nonexistent/libfabric.so").expect("a path");
        uccl_p2p::Endpoint::new(config).expect("an endpoint needs no library")
    });
    let refused = ends[0].connect(ends[1].addr(), None, &mut Uninterrupted);
    let why = refused.expect_err("there are no rails").to_string();
    assert!(why.contains("/nonexistent/libfabric.so"), "{why}");
}
