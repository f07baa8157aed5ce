//! Addresses from peers that mean no good.

use proptest::{
    prelude::*,
    test_runner::{Config, TestRunner},
};
use uccl_fabric::rail::{MAX_ADDRESS, Rail, RailError};
use uccl_verbs::VerbsSettings;

use crate::support::{Cable, Rails};

/// With arbitrary bytes the channel refuses or is joined with no peer, and the device lives.
#[test]
fn no_address_harms_a_channel() {
    let settings = VerbsSettings { rc_mode: false, ..VerbsSettings::default() };
    let Some(rails) = Rails::open(Cable::Shared, &settings) else { return };
    let valid = rails.b.open().expect("a channel").address().to_vec();
    assert!(valid.len() <= MAX_ADDRESS);
    let change = (0..valid.len(), prop::collection::vec(any::<u8>(), 0..12), 0..=valid.len());
    let mut runner =
        TestRunner::new(Config { cases: 64, failure_persistence: None, ..Config::default() });
    let result = runner.run(&change, |(at, bytes, len)| {
        let mut address = valid.clone();
        let end = (at + bytes.len()).min(address.len());
        address.splice(at..end, bytes);
        if len % 2 == 0 {
            address.truncate(len);
        }
        let mut channel = rails.a.open().expect("a channel");
        if channel.connect(&address).is_ok() {
            channel.probe(1).expect("posted");
            let _ = channel.poll(&mut Vec::new());
        }
        Ok(())
    });
    result.expect("no address harms");
    rails.joined().probes().expect("the device works");
}

#[test]
fn bytes_that_are_no_address_are_refused_and_the_channel_can_be_joined() {
    let Some(rails) = Rails::shared() else { return };
    let mut a = rails.a.open().expect("a channel");
    let mut b = rails.b.open().expect("a channel");
    for bytes in [&[][..], b"nonsense", &[0; MAX_ADDRESS]] {
        let error = a.connect(bytes).expect_err("no address");
        assert!(matches!(error, RailError::Peer(_)), "{error}");
        assert!(matches!(a.import(bytes), Err(RailError::Peer(_))));
    }
    let address = b.address().to_vec();
    a.connect(&address).expect("joined");
    let error = a.connect(&address).expect_err("joined already");
    assert!(matches!(error, RailError::Peer(_)), "{error}");
    b.connect(a.address()).expect("joined");
}
