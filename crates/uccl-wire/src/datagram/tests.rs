use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use proptest::{collection::vec, prelude::*};

use super::*;
use crate::handshake::Psk;

fn head() -> DatagramHead {
    DatagramHead {
        kind: DatagramKind::Write,
        path: 2,
        len: 3,
        connection: 4,
        number: 5,
        total: 30,
        offset: 27,
        length: 8,
        message: 9,
        key: 10,
        addr: 11,
    }
}

fn datagram(head: &DatagramHead, content: &[u8]) -> Vec<u8> {
    [&head.encode()[..], content].concat()
}

fn address(connection: u64) -> UdpAddress {
    UdpAddress {
        connection,
        nonce: [3; 16],
        has_key: true,
        room: 212_992,
        datagram: 1472,
        ip: Ipv4Addr::new(10, 0, 0, 1).into(),
        ports: vec![1, 2, 0xffff],
    }
}

fn keys(psk: Option<&[u8]>) -> [DatagramKeys; 2] {
    let psk = psk.map(|psk| Psk::new(psk).expect("a key"));
    let (a, b) = (address(1), address(2));
    [DatagramKeys::new(psk.as_ref(), &a, &b), DatagramKeys::new(psk.as_ref(), &b, &a)]
}

#[test]
fn layout() {
    let bytes = head().encode();
    assert_eq!(bytes[..8], *b"UD\x01\x01\x02\0\x03\0");
    assert_eq!((bytes[8], bytes[16], bytes[20], bytes[24], bytes[28]), (4, 5, 30, 27, 8));
    assert_eq!((bytes[32], bytes[40], bytes[48]), (9, 10, 11));
    assert_eq!(bytes[56..], [0; 16]);
    let bytes = address(7).encode();
    assert_eq!(bytes[..9], *b"UUDP\x01\x04\x01\x03\x07");
    assert_eq!(bytes[40..], *b"\x0a\0\0\x01\0\0\0\0\0\0\0\0\0\0\0\0\x01\0\x02\0\xff\xff");
}

#[test]
fn a_head_and_its_content_agree() {
    let good = datagram(&head(), b"abc");
    assert_eq!(DatagramHead::decode(&good), Ok((head(), &b"abc"[..])));
    assert!(DatagramHead::decode(&good[..74]).is_err(), "too short");
    assert!(DatagramHead::decode(&datagram(&head(), b"abcd")).is_err(), "too long");
    let outside = DatagramHead { offset: 28, ..head() };
    assert!(DatagramHead::decode(&datagram(&outside, b"abc")).is_err(), "behind its message");
    let far = DatagramHead { offset: u32::MAX, ..head() };
    assert!(DatagramHead::decode(&datagram(&far, b"abc")).is_err(), "beyond all numbers");
    let ack = DatagramHead { kind: DatagramKind::Ack, ..head() };
    assert!(DatagramHead::decode(&datagram(&ack, b"abc")).is_err(), "no acknowledgement");
}

#[test]
fn a_key_is_of_one_direction_of_one_connection() {
    for psk in [None, Some(&b"a secret"[..])] {
        let ([ours, theirs], [others, _]) = (keys(psk), keys(Some(b"another secret")));
        let mut bytes = datagram(&head(), b"abc");
        assert!(!theirs.theirs.has_sealed(&bytes));
        ours.ours.seal(&mut bytes);
        assert!(theirs.theirs.has_sealed(&bytes));
        assert!(!others.theirs.has_sealed(&bytes));
        assert_eq!(ours.theirs.has_sealed(&bytes), psk.is_none(), "not sent back");
        for at in 0..bytes.len() {
            bytes[at] ^= 1;
            assert!(!theirs.theirs.has_sealed(&bytes), "byte {at}");
            bytes[at] ^= 1;
        }
        let again = DatagramKeys::new(
            psk.map(|psk| Psk::new(psk).expect("a key")).as_ref(),
            &address(2),
            &UdpAddress { nonce: [4; 16], ..address(1) },
        );
        assert_eq!(again.theirs.has_sealed(&bytes), psk.is_none(), "another connection");
    }
}

proptest! {
    #[test]
    fn any_bytes_never_panic(bytes: Vec<u8>, content in vec(any::<u8>(), 0..100)) {
        let [ours, _] = keys(None);
        for bytes in [bytes.clone(), [&head().encode()[..4], &bytes[..]].concat()] {
            let _ = DatagramHead::decode(&bytes);
            let _ = UdpAddress::decode(&bytes);
            let _ = ours.theirs.has_sealed(&bytes);
            let _ = UdpAddress::decode(&[&address(1).encode()[..8], &bytes[..]].concat());
        }
        let full = DatagramHead { len: content.len() as u16, total: 200, offset: 100, ..head() };
        let bytes = datagram(&full, &content);
        prop_assert_eq!(DatagramHead::decode(&bytes), Ok((full, &content[..])));
    }

    #[test]
    fn addresses_survive(octets: [u8; 16], is_long: bool, ports in vec(any::<u16>(), 1..=64)) {
        let short = Ipv4Addr::new(octets[0], octets[1], octets[2], octets[3]);
        let ip: IpAddr = if is_long { Ipv6Addr::from(octets).into() } else { short.into() };
        let address = UdpAddress { ip, ports, ..address(9) };
        prop_assert_eq!(UdpAddress::decode(&address.encode()), Ok(address.clone()));
    }
}

#[test]
fn addresses_that_nobody_has_are_refused() {
    let with = |at: usize, byte: u8| {
        let mut bytes = address(1).encode();
        bytes[at] = byte;
        UdpAddress::decode(&bytes)
    };
    with(8, 9).expect("sound");
    for (at, byte) in [(0, 0), (4, 2), (5, 5), (6, 2), (7, 0), (7, 65), (44, 1), (38, 1), (37, 0)] {
        assert!(with(at, byte).is_err(), "byte {at} = {byte}");
    }
    let long = [&address(1).encode()[..], &[0]].concat();
    assert_eq!(UdpAddress::decode(&long), Err(UdpAddressError::TooLong(1)));
}
