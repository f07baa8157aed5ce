use proptest::prelude::*;

use super::*;

fn connector(psk: Option<&[u8]>) -> Handshake {
    let psk = psk.map(|s| Psk::new(s).unwrap());
    Handshake::connector(psk, &hello(1), [1; 32]).unwrap()
}

fn acceptor(psk: Option<&[u8]>) -> Handshake {
    Handshake::acceptor(psk.map(|s| Psk::new(s).unwrap()), [2; 32])
}

fn hello(instance: u64) -> Hello {
    Hello { instance, hostname: "node".into(), ..Hello::default() }
}

/// Runs both ends to the end: what the acceptor got, what the connector got.
fn run(c: &mut Handshake, a: &mut Handshake) -> Result<(Hello, Hello), HandshakeError> {
    let mut at_acceptor = None;
    for _ in 0..10 {
        let bytes = c.pending_output();
        if !bytes.is_empty()
            && let Progress::PeerHello { peer, consumed } = a.feed(&bytes)?
        {
            assert_eq!(consumed, bytes.len());
            at_acceptor = Some(*peer);
            a.reply(&hello(2)).unwrap();
        }
        let bytes = a.pending_output();
        if let Progress::Done { peer, consumed } = c.feed(&bytes)? {
            assert_eq!(consumed, bytes.len());
            assert!(c.is_done() && a.is_done());
            return Ok((at_acceptor.unwrap(), *peer));
        }
    }
    panic!("the handshake does not end");
}

#[test]
fn both_ends_learn_of_each_other() {
    for psk in [None, Some(&b"secret"[..])] {
        let got = run(&mut connector(psk), &mut acceptor(psk)).unwrap();
        assert_eq!(got, (hello(1), hello(2)));
    }
}

proptest! {
    #[test]
    fn any_bytes_never_panic(bytes: Vec<u8>) {
        let _ = acceptor(None).feed(&bytes);
        let _ = Hello::decode(&bytes);
    }
}
