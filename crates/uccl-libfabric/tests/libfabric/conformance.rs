//! The tests that every link must pass, over each provider that this host has.

use std::sync::Arc;

use uccl_conformance::over_rails;

use crate::pair::{named, open};

fn holds(provider: &str) {
    if open(provider).is_none() {
        return;
    }
    uccl_conformance::run(provider, || {
        let rail = || Arc::new(open(provider).expect("it was there"));
        over_rails([vec![rail()], vec![rail()]])
    });
}

#[test]
fn tcp() {
    holds("tcp");
}

#[test]
fn tcp_with_messages_below() {
    holds("tcp;ofi_rxm");
}

#[test]
fn named_provider() {
    holds(&named());
}
