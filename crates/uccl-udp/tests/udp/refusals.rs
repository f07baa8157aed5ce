//! Requests that the peer's rail refuses by itself. The lane over rails checks most of them before.

use std::net::Ipv4Addr;

use uccl_fabric::{
    lane::OpKind,
    rail::{Request, RequestError},
    region::Rights,
};
use uccl_udp::{UdpRail, UdpSettings};

use crate::pair::{Memory, Pair, pattern};

/// Bytes of several datagrams.
const LEN: usize = 50_000;

/// A refusal comes after acknowledgements that were sent before it, so a refused request must not
/// be acknowledged. Each of many attempts has to fail.
#[test]
fn a_refused_request_never_ends_well_and_changes_nothing() {
    let rail = UdpRail::open(Ipv4Addr::LOCALHOST.into(), UdpSettings::default()).expect("sockets");
    let mut pair = Pair::over(&rail, &rail, 0);
    let ours = Memory::new(&rail, LEN, pattern);
    let readable = Memory::with_rights(&rail, LEN, |_| 0, Rights::READ);
    let writable = Memory::with_rights(&rail, LEN, |_| 0, Rights::WRITE);
    let write = pair.request(OpKind::Write, &ours, &writable);
    let read = pair.request(OpKind::Read, &ours, &readable);
    let refused = [
        pair.request(OpKind::Write, &ours, &readable),
        pair.request(OpKind::Read, &ours, &writable),
        Request { remote_addr: write.remote_addr + 1, ..write },
        Request { remote_addr: read.remote_addr + 1, ..read },
        Request { remote_key: write.remote_key ^ 1, ..write },
    ];
    for nth in 0..100 {
        let request = refused[nth % refused.len()];
        assert_eq!(pair.run(request).result, Err(RequestError::Access), "attempt {nth}");
    }
    assert!([&readable, &writable].iter().all(|memory| memory.bytes() == vec![0; LEN]));
    assert!(ours.bytes() == (0..LEN).map(pattern).collect::<Vec<_>>());
    assert!(pair.run(write).result.is_ok(), "the channel goes on");
    assert!(writable.bytes() == ours.bytes());
    drop(pair);
}
