//! The layouts of datagrams.

use uccl_wire::{
    ack::Ack,
    datagram::{CODE_LEN, DatagramHead, DatagramKeys, DatagramKind, HEAD_LEN, UdpAddress},
};

pub(crate) fn datagram(bytes: &[u8]) -> bool {
    let Ok((head, content)) = DatagramHead::decode(bytes) else { return false };
    let sealed = HEAD_LEN - CODE_LEN;
    assert_eq!(head.encode()[..sealed], bytes[..sealed], "it is written as it was read");
    assert_eq!(content, &bytes[HEAD_LEN..], "its content is the rest");
    if head.kind == DatagramKind::Ack {
        return Ack::decode(content).is_ok();
    }
    let end = u64::from(head.offset) + content.len() as u64;
    assert!(end <= head.total.into(), "a part lies in its message");
    true
}

pub(crate) fn udp_address(bytes: &[u8]) -> bool {
    let Ok(address) = UdpAddress::decode(bytes) else { return false };
    assert_eq!(address.encode(), bytes, "it is written as it was read");
    true
}

/// Valid bytes of each layout.
pub(crate) fn datagram_samples() -> Vec<Vec<u8>> {
    let address = UdpAddress {
        connection: 1 << 40,
        nonce: [3; 16],
        has_key: false,
        room: 212_992,
        datagram: 1472,
        ip: [10, 0, 0, 1].into(),
        ports: vec![4711, 4712],
    };
    let keys = DatagramKeys::new(None, &address, &address);
    let ack = Ack { largest: 7, delay_ns: 1000, before: [5, 0, 0, 0] }.encode();
    let bare = |kind, content: &[u8]| {
        let head = DatagramHead {
            len: content.len() as u16,
            total: 100,
            offset: 10,
            ..DatagramHead::bare(kind, address.connection)
        };
        let mut bytes = [&head.encode()[..], content].concat();
        keys.ours.seal(&mut bytes);
        bytes
    };
    let datagrams = [bare(DatagramKind::Write, b"bytes"), bare(DatagramKind::Ack, &ack)];
    datagrams.into_iter().chain([address.encode()]).collect()
}
