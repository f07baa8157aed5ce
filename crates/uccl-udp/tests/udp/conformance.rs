//! The tests that every link must pass.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use uccl_conformance::over_rails;
use uccl_fabric::rail::Rail;
use uccl_udp::{UdpRail, UdpSettings};
use uccl_wire::handshake::Psk;

use crate::relay::{Faults, Relay, RelayRail};

fn open(ip: IpAddr, settings: UdpSettings) -> UdpRail {
    UdpRail::open(ip, settings).expect("sockets")
}

fn holds(link: &str, rail: impl Fn() -> Arc<dyn Rail>) {
    uccl_conformance::run(link, || over_rails([vec![rail()], vec![rail()]]));
}

#[test]
fn plain() {
    holds("udp", || Arc::new(open(Ipv4Addr::LOCALHOST.into(), UdpSettings::default())));
}

#[test]
fn with_a_key_and_without_help_of_the_kernel() {
    let psk = Some(Psk::new(b"a secret of both").expect("a key"));
    let settings = UdpSettings { psk, offload: false, datagram: 1472, ..UdpSettings::default() };
    holds("udp with a key", || Arc::new(open(Ipv4Addr::LOCALHOST.into(), settings.clone())));
}

#[test]
fn over_ipv6() {
    let ip = Ipv6Addr::LOCALHOST.into();
    if UdpRail::open(ip, UdpSettings::default()).is_err() {
        eprintln!("skipped: lacks an IPv6 loopback address");
        return;
    }
    let settings = UdpSettings {
        techniques: ["two-choices", "time", "delay-ecn"],
        paths: 3,
        ..UdpSettings::default()
    };
    holds("udp over IPv6", || Arc::new(open(ip, settings.clone())));
}

#[test]
fn over_a_network_that_loses_repeats_and_reorders() {
    let faults = Faults { loss: 20, repeat: 20, hold: 20, most_len: 0 };
    let relay = Relay::new(faults, 41);
    let settings = UdpSettings { datagram: 4168, ..UdpSettings::default() };
    holds("udp over a bad network", || {
        let rail = open(Ipv4Addr::LOCALHOST.into(), settings.clone());
        Arc::new(RelayRail { rail, relay: Arc::clone(&relay) })
    });
}
