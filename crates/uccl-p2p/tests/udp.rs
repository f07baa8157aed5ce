//! The engine's suite over UDP.

mod support;

use uccl_p2p::{Config, Endpoint, NoInterrupt, Op, Transport};

use self::support::{Pair, advert, config, finish, iov, pair_of, path, pattern, register, request};

/// Two endpoints over UDP, and two that share a secret.
pub(crate) fn pairs() -> Vec<(&'static str, Pair)> {
    let plain = |config: &mut Config| config.transport = Transport::Udp;
    let secret = |config: &mut Config| {
        (config.transport, config.psk) = (Transport::Udp, Some(b"a secret of both".to_vec()));
    };
    vec![("udp", pair_of([&plain, &plain])), ("udp, secret", pair_of([&secret, &secret]))]
}

#[test]
fn the_path_is_udp() {
    for (link, p) in pairs() {
        assert_eq!(path(&p.a, p.to_b, &p.b), "udp", "{link}");
    }
}

/// An end that does not ask for UDP is reached by TCP.
#[test]
fn a_peer_without_udp_is_reached_over_tcp() {
    let [a, b] = [Transport::Udp, Transport::Tcp]
        .map(|transport| Endpoint::new(config(transport)).expect("an endpoint"));
    let to_b = a.connect(b.addr(), None, &mut NoInterrupt).expect("connected");
    let (mut ours, mut theirs) = (pattern(100_000, 1), vec![0; 100_000]);
    assert_eq!(path(&a, to_b, &b), "tcp");
    let (from, to) = (register(&a, &mut ours), register(&b, &mut theirs));
    let (iovs, adverts) = ([iov(from, &ours)], [advert(&b, to, &theirs)]);
    let transfer = a.post(&request(to_b, Op::Write, &iovs, &adverts)).expect("posted");
    assert_eq!(finish(&a, transfer).expect("it ends"), 100_000);
    assert!(theirs == ours);
}
