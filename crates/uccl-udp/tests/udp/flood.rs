//! Datagrams of a stranger: none of them moves a byte.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};

use uccl_fabric::{
    lane::OpKind,
    rail::{Rail, RequestError},
};
use uccl_udp::{UdpRail, UdpSettings};
use uccl_wire::{
    datagram::{DatagramHead, DatagramKeys, DatagramKind, UdpAddress},
    handshake::Psk,
};

use crate::{
    pair::{Memory, Pair, pattern},
    relay::{Datagram, Faults, Relay, RelayRail},
};

/// Datagrams of the flood.
const FLOOD: u64 = 100_000;
const LEN: usize = 300_000;

fn rail(relay: &std::sync::Arc<Relay>) -> RelayRail {
    let psk = Psk::new(b"a secret of both").ok();
    let settings = UdpSettings { psk, datagram: 4168, ..UdpSettings::default() };
    let rail = UdpRail::open(Ipv4Addr::LOCALHOST.into(), settings).expect("sockets");
    RelayRail { rail, relay: relay.clone() }
}

/// A datagram of the flood, made of one that was seen on the way.
fn forgery(nth: u64, seen: &[Datagram], rng: &mut fastrand::Rng) -> Datagram {
    let (to, mut bytes) = seen[rng.usize(..seen.len())].clone();
    match nth % 5 {
        // As it was.
        0 => {}
        // Of another connection.
        1 => bytes[8] ^= 1,
        // With other content, or another head.
        2 => {
            let at = rng.usize(16..bytes.len());
            bytes[at] ^= 1;
        }
        // With a number that is to come.
        3 => bytes[16..20].copy_from_slice(&rng.u32(..).to_le_bytes()),
        _ => bytes = (0..100).map(|_| rng.u8(..)).collect(),
    }
    (to, bytes)
}

#[test]
fn forged_repeated_and_old_datagrams_move_nothing() {
    let relay = Relay::new(Faults::default(), 2);
    let (a, b) = (rail(&relay), rail(&relay));
    let mut pair = Pair::over(&a, &b, 0);
    let (ours, theirs) = (Memory::new(&a, LEN, pattern), Memory::new(&b, LEN, |_| 0));
    relay.keep();
    let request = pair.request(OpKind::Write, &ours, &theirs);
    assert!(pair.run(request).result.is_ok());
    assert!(theirs.bytes() == ours.bytes());
    let ports = UdpAddress::decode(pair.b.address()).expect("an address").ports;
    // A probe may be repeated, so it is none of these.
    let is_to_b = |(to, bytes): &Datagram| {
        ports.contains(&to.port()) && bytes.get(3) == Some(&(DatagramKind::Write as u8))
    };
    let seen: Vec<_> = relay.kept().into_iter().filter(is_to_b).collect();
    assert!(seen.len() >= LEN / 4096, "{} datagrams were seen", seen.len());

    theirs.clear();
    let before = b.rail.counters();
    flood(&mut pair, &b.rail, &seen);
    let after = b.rail.counters();
    let dropped =
        |counters: uccl_udp::UdpCounters| counters.unknown + counters.forged + counters.repeated;
    assert_eq!(dropped(after) - dropped(before), after.received - before.received);
    for (what, count) in [
        ("of no connection", after.unknown - before.unknown),
        ("forged", after.forged - before.forged),
        ("repeated", after.repeated - before.repeated),
    ] {
        assert!(count > FLOOD / 100, "{count} {what}");
    }
    assert!(theirs.bytes().iter().all(|byte| *byte == 0), "a byte has moved");
    assert!(pair.run(request).result.is_ok(), "the honest peer still gets through");
    assert!(theirs.bytes() == ours.bytes());

    // The end of the region, then that of the channel: all later datagrams are old.
    theirs.registration.end().expect("it ends");
    assert_eq!(pair.run(request).result, Err(RequestError::Access));
    theirs.clear();
    pair.b = b.open().expect("another end");
    replay(&seen, &b.rail);
    assert!(theirs.bytes().iter().all(|byte| *byte == 0), "an old datagram has landed");
    drop(pair);
}

/// Sends datagrams until so many have come; the kernel drops some.
fn flood(pair: &mut Pair, rail: &UdpRail, seen: &[Datagram]) {
    let stranger = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let (mut rng, mut nth) = (fastrand::Rng::with_seed(3), 0);
    let before = rail.counters().received;
    pair.until("the flood has come", |_| {
        for _ in 0..64 {
            let (to, bytes) = forgery(nth, seen, &mut rng);
            // Where the kernel takes none, it is sent again later.
            let _ = stranger.send_to(&bytes, SocketAddr::new(to.ip(), to.port()));
            nth += 1;
        }
        rail.counters().received - before >= FLOOD
    });
}

/// Sends old datagrams until one of them has come.
fn replay(seen: &[Datagram], rail: &UdpRail) {
    let stranger = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let before = rail.counters();
    let begun = std::time::Instant::now();
    while rail.counters().unknown - before.unknown < 1000 {
        for (to, bytes) in seen {
            let _ = stranger.send_to(bytes, to);
        }
        assert!(begun.elapsed().as_secs() < 60, "old datagrams do not come");
    }
}

/// Without a key, the connection's name is all that a stranger has to guess.
#[test]
fn a_stranger_that_does_not_know_the_connection_moves_nothing() {
    let relay = Relay::new(Faults::default(), 4);
    let open = || RelayRail {
        rail: UdpRail::open(Ipv4Addr::LOCALHOST.into(), UdpSettings::default()).expect("sockets"),
        relay: relay.clone(),
    };
    let (a, b) = (open(), open());
    let mut pair = Pair::over(&a, &b, 0);
    let (ours, theirs) = (Memory::new(&a, LEN, pattern), Memory::new(&b, LEN, |_| 0));
    let request = pair.request(OpKind::Write, &ours, &theirs);
    let target = UdpAddress::decode(pair.b.address()).expect("an address");
    let before = b.rail.counters();
    let stranger = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let keys = DatagramKeys::new(None, &target, &target);
    let mut rng = fastrand::Rng::with_seed(5);
    pair.until("forged writes have come", |_| {
        let head = DatagramHead {
            len: 8,
            total: 8,
            key: request.remote_key,
            // The place in the device is easy to guess, the other bits are not.
            connection: target.connection ^ rng.u64(1..) << 20,
            ..DatagramHead::bare(DatagramKind::Write, 0)
        };
        let mut bytes = [&head.encode()[..], b"forgery!"].concat();
        keys.ours.seal(&mut bytes);
        let _ = stranger.send_to(&bytes, (target.ip, target.ports[0]));
        b.rail.counters().received - before.received >= 1000
    });
    let after = b.rail.counters();
    assert_eq!(after.unknown - before.unknown, after.received - before.received);
    assert!(theirs.bytes().iter().all(|byte| *byte == 0), "a byte has moved");
    assert!(pair.run(request).result.is_ok());
    assert!(theirs.bytes() == ours.bytes());
    drop(pair);
}
