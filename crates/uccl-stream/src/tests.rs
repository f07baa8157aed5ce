//! The stream lane over real sockets on loopback.

mod cut;
mod records;

use std::{
    net::{Ipv4Addr, TcpListener, TcpStream},
    sync::Arc,
};

use parking_lot::Mutex;
use uccl_conformance::Inbox;
use uccl_device::MemoryKind;
use uccl_fabric::{
    gpu::CopyBy,
    lane::{Completion, OpResult},
    mem::{RemoteSpan, Span},
    region::Rights,
};

use super::*;
use crate::tcp::{TcpOptions, TcpPipe};

#[derive(Default)]
struct ResultSlot(Mutex<Option<OpResult>>);

impl Completion for ResultSlot {
    fn complete(self: Arc<Self>, result: OpResult) {
        assert!(self.0.lock().replace(result).is_none(), "an operation ends once");
    }
}

struct Side<P: Pipe = TcpPipe> {
    lane: StreamLane<P>,
    regions: Arc<RegionTable>,
    inbox: Inbox,
}

fn side(stream: TcpStream, checksum: bool) -> Side {
    let (pipe, tx, rx) = TcpPipe::new(stream, &TcpOptions::default()).expect("a pipe");
    side_over(pipe, tx, rx, checksum)
}

fn side_over<P: Pipe>(pipe: P, tx: P::Tx, rx: P::Rx, checksum: bool) -> Side<P> {
    let regions = Arc::new(RegionTable::new().expect("a table"));
    let options =
        StreamOptions { regions: Arc::clone(&regions), checksum, copy_by: CopyBy::default() };
    Side { lane: StreamLane::new(pipe, tx, rx, options), regions, inbox: Inbox::default() }
}

/// Both ends of a connection.
fn streams() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a listener");
    let a = TcpStream::connect(listener.local_addr().expect("its address")).expect("a stream");
    let (b, _) = listener.accept().expect("its other end");
    (a, b)
}

fn pair(checksum: bool) -> (Side, Side) {
    let (a, b) = streams();
    (side(a, checksum), side(b, checksum))
}

impl<P: Pipe> Side<P> {
    fn register(&self, memory: &mut [u8], rights: Rights) -> RemoteSpan {
        self.regions.insert(span(memory), rights, None).expect("a region").remote()
    }

    fn progress(&self) -> Result<bool, LaneError> {
        self.lane.progress(&self.inbox)
    }

    fn post(&self, kind: OpKind, local: Span, remote: RemoteSpan) -> (OpName, Arc<ResultSlot>) {
        let done = Arc::new(ResultSlot::default());
        let op = Operation {
            kind,
            local: [local].into_iter().collect(),
            memory: MemoryKind::Host,
            remote: [remote].into_iter().collect(),
            done: Arc::clone(&done) as Arc<dyn Completion>,
        };
        // SAFETY: the tests keep their buffers until the operation has ended.
        match unsafe { self.lane.post(op) }.expect("a live lane") {
            PostOutcome::Pending(name) => (name, done),
            PostOutcome::Done(_) => unreachable!("streams answer later"),
        }
    }
}

fn span(memory: &mut [u8]) -> Span {
    Span { addr: memory.as_mut_ptr() as usize, len: memory.len() }
}

fn run(a: &Side, b: &Side, seen: &ResultSlot) -> OpResult {
    loop {
        a.progress().expect("a lives");
        b.progress().expect("b lives");
        if let Some(result) = seen.0.lock().clone() {
            return result;
        }
    }
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| ((i * 31) >> 3) as u8 ^ i as u8).collect()
}

const SIZES: [usize; 8] = [0, 1, 64, 2048, 2049, 70_000, 4 << 20, (9 << 20) + 7];

#[test]
fn writes_land_whole() {
    for checksum in [false, true] {
        let (a, b) = pair(checksum);
        for len in SIZES {
            let (mut from, mut to) = (pattern(len), vec![0xEE; len]);
            let remote = b.register(&mut to, Rights::ALL);
            let (_, seen) = a.post(OpKind::Write, span(&mut from), remote);
            assert_eq!(run(&a, &b, &seen), Ok(()), "{len} bytes");
            assert!(from == to, "{len} bytes, checksum {checksum}");
        }
    }
}

#[test]
fn reads_land_whole() {
    for checksum in [false, true] {
        let (a, b) = pair(checksum);
        for len in SIZES {
            let (mut from, mut to) = (pattern(len), vec![0xEE; len]);
            let remote = b.register(&mut from, Rights::READ);
            let (_, seen) = a.post(OpKind::Read, span(&mut to), remote);
            assert_eq!(run(&a, &b, &seen), Ok(()), "{len} bytes");
            assert!(from == to, "{len} bytes, checksum {checksum}");
        }
    }
}

#[test]
fn the_owner_refuses_an_access_that_it_did_not_grant() {
    let (a, b) = pair(false);
    let (mut from, mut to) = (pattern(5000), vec![0xEE; 5000]);
    let remote = b.register(&mut to, Rights::READ);
    let refused = |remote, status| {
        let mut from = pattern(5000);
        let (_, seen) = a.post(OpKind::Write, span(&mut from), remote);
        assert_eq!(run(&a, &b, &seen), Err(OpError::Remote(status)));
    };
    use uccl_wire::frame::Status;
    refused(remote, Status::Denied);
    refused(RemoteSpan { key: remote.key ^ 1, ..remote }, Status::UnknownKey);
    let open = b.register(&mut to, Rights::ALL);
    refused(RemoteSpan { addr: open.addr + 1, ..open }, Status::OutOfBounds);
    drop(b.regions.revoke(open.slot, open.key).expect("registered"));
    refused(open, Status::UnknownKey);
    assert!(to.iter().all(|byte| *byte == 0xEE));
    let remote = b.register(&mut to, Rights::WRITE);
    let (_, seen) = a.post(OpKind::Read, span(&mut from), remote);
    assert_eq!(run(&a, &b, &seen), Err(OpError::Remote(Status::Denied)));
}

#[test]
fn messages_arrive_in_order_beside_data() {
    let (a, b) = pair(true);
    let (mut from, mut to) = (pattern(6 << 20), vec![0; 6 << 20]);
    let remote = b.register(&mut to, Rights::ALL);
    let (_, seen) = a.post(OpKind::Write, span(&mut from), remote);
    for i in 0..100usize {
        a.lane.send(&[&[i as u8], &vec![i as u8; i * 650]]).expect("a lives");
    }
    assert_eq!(run(&a, &b, &seen), Ok(()));
    while b.inbox.0.lock().len() < 100 {
        a.progress().expect("a lives");
        b.progress().expect("b lives");
    }
    for (i, message) in b.inbox.0.lock().iter().enumerate() {
        assert_eq!(*message, vec![i as u8; i * 650 + 1]);
    }
}

#[test]
fn a_cancelled_write_is_fenced() {
    let (a, b) = pair(false);
    let mut from = pattern(64 << 20);
    let mut to = vec![0xEE; 64 << 20];
    let remote = b.register(&mut to, Rights::ALL);
    let (name, seen) = a.post(OpKind::Write, span(&mut from), remote);
    b.progress().expect("b lives");
    a.lane.cancel(name);
    assert_eq!(run(&a, &b, &seen), Err(OpError::Cancelled));
    let landed = to.clone();
    for _ in 0..100 {
        a.progress().expect("a lives");
        b.progress().expect("b lives");
    }
    assert!(landed == to && to.ends_with(&[0xEE]), "nothing lands after the fence");
}

#[test]
fn a_cancelled_read_is_fenced_and_the_lane_lives() {
    let (a, b) = pair(false);
    let (mut from, mut to) = (pattern(64 << 20), vec![0xEE; 64 << 20]);
    let remote = b.register(&mut from, Rights::ALL);
    let (name, seen) = a.post(OpKind::Read, span(&mut to), remote);
    for _ in 0..3 {
        b.progress().expect("b lives");
        a.progress().expect("a lives");
    }
    a.lane.cancel(name);
    assert_eq!(*seen.0.lock(), Some(Err(OpError::Cancelled)), "at once: the memory is ours");
    let landed = to.clone();
    let mut small = vec![0; 100];
    let (_, seen) = a.post(OpKind::Read, span(&mut small), RemoteSpan { len: 100, ..remote });
    assert_eq!(run(&a, &b, &seen), Ok(()));
    assert!(landed == to && small == from[..100]);
}

#[test]
fn a_source_revoked_on_the_way_fails_its_read() {
    let (a, b) = pair(true);
    let (mut from, mut to) = (pattern(64 << 20), vec![0xEE; 64 << 20]);
    let remote = b.register(&mut from, Rights::ALL);
    let (_, seen) = a.post(OpKind::Read, span(&mut to), remote);
    b.progress().expect("b lives");
    drop(b.regions.revoke(remote.slot, remote.key).expect("registered"));
    let unknown = uccl_wire::frame::Status::UnknownKey;
    assert_eq!(run(&a, &b, &seen), Err(OpError::Remote(unknown)));
}

#[test]
fn a_dead_peer_ends_every_operation() {
    let (a, b) = pair(false);
    let (mut from, mut to) = (pattern(64 << 20), vec![0; 64 << 20]);
    let remote = b.register(&mut to, Rights::ALL);
    let (_, seen) = a.post(OpKind::Write, span(&mut from), remote);
    b.lane.kill();
    while a.progress().is_ok() {}
    a.lane.kill();
    assert_eq!(*seen.0.lock(), Some(Err(OpError::LaneDown)));
}

#[test]
fn a_foreign_client_is_a_protocol_error() {
    use std::io::Write;
    let (mut foreign, ours) = streams();
    let ours = side(ours, false);
    foreign.write_all(b"GET / HTTP/1.1\r\nHost: example\r\n\r\n").expect("sent");
    let error = loop {
        if let Err(e) = ours.progress() {
            break e;
        }
    };
    assert!(matches!(error, LaneError::Protocol(_)), "{error}");
}
