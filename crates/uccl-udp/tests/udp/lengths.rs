//! The length of datagrams, found by probes.

use std::net::Ipv4Addr;

use uccl_fabric::{
    lane::OpKind,
    rail::{Rail, RailError},
};
use uccl_udp::{UdpRail, UdpSettings};

use crate::{
    pair::{Memory, Pair, pattern},
    relay::{Faults, Relay, RelayRail},
};

fn rail(settings: UdpSettings) -> UdpRail {
    UdpRail::open(Ipv4Addr::LOCALHOST.into(), settings).expect("sockets")
}

/// A network that drops long datagrams silently, as one without ICMP messages does.
#[test]
fn a_network_that_takes_short_datagrams_alone_is_used() {
    let relay = Relay::new(Faults { most_len: 1400, ..Faults::default() }, 1);
    let [a, b] =
        [0; 2].map(|_| RelayRail { rail: rail(UdpSettings::default()), relay: relay.clone() });
    let (mut failed, mut pair) = (0, Pair::over(&a, &b, 0));
    while pair.ended.is_empty() {
        let before = relay.too_long();
        pair.a.probe(7).expect("it lives");
        pair.until("a probe's fate", |pair| {
            !pair.ended.is_empty() || relay.too_long() >= before + 3
        });
        if pair.ended.is_empty() {
            failed += 1;
            assert!(failed < 20, "no length is tried that passes");
            pair = Pair::over(&a, &b, failed);
        }
    }
    assert!(failed > 0, "the first attempt takes long ones");
    assert!(pair.ended.remove(0).result.is_ok());
    let (ours, theirs) = (Memory::new(&a, 100_000, pattern), Memory::new(&b, 100_000, |_| 0));
    let request = pair.request(OpKind::Write, &ours, &theirs);
    assert!(pair.run(request).result.is_ok());
    assert!(theirs.bytes() == ours.bytes());
}

#[test]
fn settings_and_addresses_that_do_not_fit_are_refused_in_words() {
    let open = |change: fn(&mut UdpSettings)| {
        let mut settings = UdpSettings::default();
        change(&mut settings);
        UdpRail::open(Ipv4Addr::LOCALHOST.into(), settings).map(drop)
    };
    assert!(open(|_| ()).is_ok());
    let changes: [fn(&mut UdpSettings); 4] = [
        |settings| settings.paths = 0,
        |settings| settings.paths = 65,
        |settings| settings.techniques = ["round-robin", "time", "slow"],
        |settings| settings.techniques = ["round-robin", "time", "eqds"],
    ];
    for change in changes {
        assert!(matches!(open(change), Err(RailError::Unavailable(_))));
    }
    let elsewhere = UdpRail::open(Ipv4Addr::new(203, 0, 113, 77).into(), UdpSettings::default());
    assert!(matches!(elsewhere.map(drop), Err(RailError::Os { .. })));
    let psk = uccl_wire::handshake::Psk::new(b"a secret of one").ok();
    let (with, without) =
        (rail(UdpSettings { psk, ..UdpSettings::default() }), rail(UdpSettings::default()));
    let (mut a, b) = (with.open().expect("an end"), without.open().expect("an end"));
    let refused = a.connect(b.address()).expect_err("one key");
    assert!(refused.to_string().contains("no pre-shared key"), "{refused}");
    assert!(a.connect(b"nonsense").is_err());
}
