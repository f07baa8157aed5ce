//! The layouts of flows.

use uccl_wire::flow::{
    FlowHead, FlowHello, FlowWelcome, HANDLE_LEN, Handle, HeadKind, Purpose, Status,
};

pub(crate) fn flow_handle(bytes: &[u8]) -> bool {
    let Ok(handle) = Handle::decode(bytes) else { return false };
    let again = handle.encode().expect("what came in a handle fits into one");
    assert_eq!(again[..], bytes[..HANDLE_LEN], "it is written as it was read");
    true
}

pub(crate) fn flow_hello(bytes: &[u8]) -> bool {
    let Some(bytes) = bytes.first_chunk() else { return false };
    let Ok(hello) = FlowHello::decode(bytes) else { return false };
    assert_eq!(&hello.encode(), bytes, "it is written as it was read");
    true
}

pub(crate) fn flow_welcome(bytes: &[u8]) -> bool {
    let Some(bytes) = bytes.first_chunk() else { return false };
    let Ok(welcome) = FlowWelcome::decode(bytes) else { return false };
    assert_eq!(&welcome.encode(), bytes, "it is written as it was read");
    true
}

pub(crate) fn flow_head(bytes: &[u8]) -> bool {
    let Some(bytes) = bytes.first_chunk() else { return false };
    let Ok(head) = FlowHead::decode(bytes) else { return false };
    assert_eq!(&head.encode(), bytes, "it is written as it was read");
    assert!(head.offset + head.len <= head.total, "a part lies in its message");
    true
}

/// Valid bytes of each layout.
pub(crate) fn flow_samples() -> Vec<Vec<u8>> {
    let addrs = vec![[10, 0, 0, 1].into(), [0xfd; 16].into()];
    let (nonce, network) = ([1; 16], [2; 16]);
    let handle = Handle { device: 0, instance: 3, nonce, network, addrs, port: 4711 };
    let hello =
        FlowHello { purpose: Purpose::Bulk, key: nonce, instance: 3, flow: 0, chunk_len: 9 };
    let welcome = FlowWelcome { status: Status::Taken, key: network, instance: 4, received: 5 };
    let chunk = FlowHead {
        kind: HeadKind::Chunk,
        tag: 1,
        flow: 7,
        message: 8,
        total: 100,
        offset: 50,
        len: 50,
    };
    vec![
        handle.encode().expect("two addresses fit").to_vec(),
        hello.encode().to_vec(),
        welcome.encode().to_vec(),
        chunk.encode().to_vec(),
        FlowHead::note(HeadKind::Posted, 7, 9).encode().to_vec(),
        FlowHead::note(HeadKind::Ring, u64::MAX, 1 << 32 | 9).encode().to_vec(),
    ]
}
