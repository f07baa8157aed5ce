//! The engine over RDMA verbs: what every link must do, and what becomes of transfers when rails, devices and peers
//! are lost.
//!
//! Runs where RDMA devices are. `RDMA_VM_DEVS` and `RDMA_VM_PEER_DEVS` name the two ends of each cable, as in the
//! guests of `cargo xtask guest`; without them, each end uses every device.

mod cables;
mod cut;
mod ends;
mod peers;
mod removed;
#[path = "../support/mod.rs"]
mod support;
mod usage;

use uccl_p2p::{Config, Transport, Uninterrupted};

use self::{
    ends::{joined, set},
    support::{Pair, path},
};

/// One rail and two; and writes over unreliable connections.
pub(crate) fn pairs() -> Vec<(&'static str, Pair)> {
    let pairs = [
        ("verbs", joined(1, |_| {})),
        ("verbs x2", joined(2, |config| set(config, "UCCL_P2P_RDMA_QPS", "3"))),
        ("verbs UC", joined(1, |config| set(config, "UCCL_RCMODE", "0"))),
    ];
    pairs.into_iter().filter_map(|(name, pair)| Some((name, pair?))).collect()
}

#[test]
fn the_path_is_rdma() {
    for (link, p) in pairs() {
        assert_eq!(path(&p.a, p.to_b, &p.b), "verbs", "{link}");
        let info = p.a.connection(p.to_b).expect("a connection");
        assert_eq!(info.lanes, if link == "verbs x2" { 2 } else { 1 }, "{link}: {info:?}");
    }
}

#[test]
fn without_devices_a_connection_says_what_is_missing() {
    let only = |config: &mut Config| {
        config.transport = Transport::Verbs;
        set(config, "UCCL_IBV_SO", "/nonexistent/libibverbs.so");
    };
    let ends = [0; 2].map(|_| {
        let mut config = support::config(Transport::Auto);
        only(&mut config);
        uccl_p2p::Endpoint::new(config).expect("an endpoint needs no library")
    });
    let refused = ends[0].connect(ends[1].addr(), None, &mut Uninterrupted);
    let why = refused.expect_err("there are no rails").to_string();
    assert!(why.contains("/nonexistent/libibverbs.so"), "{why}");
}
