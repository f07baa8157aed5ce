//! Peers that send and never read.

use uccl_wire::{
    checked::Crc,
    frame::Status,
    message::{self, AskPiece, Direction, Place},
    signal::Change,
};

use super::*;

/// Bytes of messages that may wait for a peer, far above the engine's own limit.
const FAR: usize = 96 << 20;
/// After this many bytes of messages, the answers take more than that.
const FLOOD: usize = 1 << 30;

/// No region has this key.
const NOWHERE: Place = Place { addr: 8, key: 0xBAD, slot: 77 };

/// Resident memory of this process in bytes.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("the kernel tells");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("it is there");
    let kib = line.trim().trim_end_matches(" kB").parse::<usize>().expect("a number");
    kib << 10
}

/// The frame of a message without a checksum.
fn framed(message: &[u8], out: &mut Vec<u8>) {
    let header = Header { len: message.len() as u64, ..Header::bare(Kind::Message, 0, 0) };
    out.extend(header.encode());
    out.extend(message);
    out.extend(Crc::trailer(None, Status::Ok).encode());
}

/// Sends messages and reads nothing, until the endpoint has given the connection up. `say` appends
/// the message with this number; the endpoint answers it.
fn flood(kind: &str, mut say: impl FnMut(u64, &mut Vec<u8>)) {
    let own = endpoint();
    // Without a timeout, so that only the unread bytes end it.
    let config = Config { transport: Transport::Tcp, timeout: Duration::ZERO, ..on_loopback() };
    let other = Endpoint::new(config).expect("an endpoint");
    let stranger = Stranger::new(&own, &other);
    let (mut tcp, _) = stranger.shake(HelloKind::NewConnection).expect("a handshake");
    assert_eq!(establish(&mut tcp, 1), 1);
    let conn = other.core().open_conns().pop().expect("it is established");
    let (before, mut most, mut sent) = (resident(), 0, 0_usize);
    let (mut id, mut bytes, mut message) = (0, Vec::new(), Vec::new());
    let given_up = loop {
        bytes.clear();
        while bytes.len() < 64 << 10 {
            id += 1;
            message.clear();
            say(id, &mut message);
            framed(&message, &mut bytes);
        }
        if tcp.write_all(&bytes).is_err() {
            break true;
        }
        sent += bytes.len();
        most = most.max(conn.lanes.messages().queued_bytes());
        if most > FAR || sent > FLOOD {
            break false;
        }
    };
    let more = resident().saturating_sub(before);
    println!(
        "{kind}: {} MiB said, at most {} MiB of answers waited, {} MiB more were resident",
        sent >> 20,
        most >> 20,
        more >> 20
    );
    assert!(most < FAR, "{kind}: {most} bytes wait");
    assert!(given_up, "{kind}: a peer that reads nothing is heard for ever");
    let begun = Instant::now();
    while !conn.is_failed() {
        assert!(begun.elapsed() < Duration::from_secs(20), "its connection lives");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn signals_of_a_peer_that_does_not_read_take_bounded_memory() {
    flood("signals", |id, out| message::signal(id, NOWHERE, Change::Set(1), out));
}

#[test]
fn asks_of_a_peer_that_does_not_read_take_bounded_memory() {
    let piece = AskPiece { owner: NOWHERE, asker: NOWHERE, len: 1 };
    flood("asks", |id, out| message::ask(id, Direction::ToOwner, [piece].into_iter(), out));
}

#[test]
fn notifications_of_a_peer_that_does_not_read_take_bounded_memory() {
    flood("notifications", message::notif_head);
}
