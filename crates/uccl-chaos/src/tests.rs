use std::io;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use uccl_fabric::mem::Span;
use uccl_fabric::pipe::{Pipe, PipeRx, PipeTx};

use super::*;

fn span(bytes: &[u8]) -> Span {
    Span { addr: bytes.as_ptr() as usize, len: bytes.len() }
}

fn send(tx: &mut ChaosTx, bytes: &[u8]) -> io::Result<usize> {
    // SAFETY: the slice is borrowed during the call.
    unsafe { tx.send(&[span(&bytes[..bytes.len() / 3]), span(&bytes[bytes.len() / 3..])]) }
}

fn recv(rx: &mut ChaosRx) -> io::Result<Option<Vec<u8>>> {
    let (mut a, mut b) = ([0; 7], [0; 100]);
    let into = |bytes: &mut [u8]| Span { addr: bytes.as_mut_ptr() as usize, len: bytes.len() };
    // SAFETY: both arrays are borrowed during the call.
    let got = unsafe { rx.recv(&[into(&mut a), into(&mut b)])? };
    Ok(got.map(|got| [&a[..], &b[..]].concat()[..got].to_vec()))
}

fn readable(pipe: &ChaosPipe, wait: Option<Duration>) -> bool {
    let wait = wait.map(|wait| wait.try_into().expect("a short time"));
    poll(&mut [PollFd::new(pipe, PollFlags::IN)], wait.as_ref()).expect("polled") == 1
}

impl std::os::fd::AsFd for ChaosPipe {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.fd()
    }
}

/// Moves `bytes` from A to B, sleeping whenever there is nothing to do.
fn move_all(a: &mut ChaosEnd, b: &mut ChaosEnd, bytes: &[u8]) -> Vec<u8> {
    let (mut sent, mut got) = (0, Vec::new());
    while got.len() < bytes.len() {
        sent += send(&mut a.1, &bytes[sent..]).expect("alive");
        match recv(&mut b.2).expect("alive") {
            Some(part) => got.extend(part),
            None if b.2.arm().expect("alive") => assert!(readable(&b.0, None)),
            None => {}
        }
    }
    got
}

#[test]
fn bytes_survive_splits_and_delays() {
    for seed in 0..20 {
        let faults = Faults {
            capacity_bytes: 300,
            split_bytes: 90,
            delay_polls: seed as u32 % 3,
            delay: Duration::from_micros(seed % 4 * 20),
            rate_bytes: seed % 2 * 20_000_000,
            ..Faults::default()
        };
        let (mut a, mut b) = pair(seed, faults).expect("a pair");
        let bytes: Vec<u8> = (0..20_000).map(|i| ((i * 7) >> 2) as u8).collect();
        assert!(move_all(&mut a, &mut b, &bytes) == bytes, "seed {seed}");
    }
}

#[test]
fn the_same_seed_splits_in_the_same_places() {
    let trace = |seed| {
        let (mut a, mut b) =
            pair(seed, Faults { split_bytes: 50, ..Faults::default() }).expect("a pair");
        let sent: Vec<_> = (0..50).map(|_| send(&mut a.1, &[1; 80]).expect("alive")).collect();
        let got: Vec<_> =
            (0..50).map(|_| recv(&mut b.2).expect("alive").map(|b| b.len())).collect();
        (sent, got)
    };
    assert_eq!(trace(1), trace(1));
    assert_ne!(trace(1), trace(2));
}

#[test]
fn a_full_pipe_wakes_its_writer_when_there_is_room() {
    let faults = Faults { capacity_bytes: 10, ..Faults::default() };
    let (mut a, mut b) = pair(0, faults).expect("a pair");
    assert_eq!(send(&mut a.1, &[5; 30]).expect("alive"), 10);
    assert!(a.1.arm().expect("alive") && !readable(&a.0, Some(Duration::ZERO)));
    assert_eq!(recv(&mut b.2).expect("alive"), Some(vec![5; 10]));
    assert!(readable(&a.0, None));
    assert!(!a.1.arm().expect("alive"), "there is room already");
}

#[test]
fn a_stalled_direction_moves_when_resumed() {
    let (mut a, mut b) = pair(0, Faults::default()).expect("a pair");
    a.0.stall();
    assert_eq!(send(&mut a.1, &[1, 2]).expect("alive"), 2);
    assert_eq!(send(&mut b.1, &[3]).expect("alive"), 1);
    assert_eq!(recv(&mut a.2).expect("alive"), Some(vec![3]), "the other direction moves");
    assert_eq!(recv(&mut b.2).expect("alive"), None);
    assert!(b.2.arm().expect("alive") && !readable(&b.0, Some(Duration::ZERO)));
    a.0.resume();
    assert!(readable(&b.0, None));
    assert_eq!(recv(&mut b.2).expect("alive"), Some(vec![1, 2]));
}

#[test]
fn a_cut_ends_both_directions() {
    for seed in 0..10 {
        let cut = Faults { cut_after: Some(5), ..Faults::default() };
        let (mut a, mut b) = pair_of(seed, cut, Faults::default()).expect("a pair");
        assert!(b.2.arm().expect("alive") && a.2.arm().expect("alive"));
        assert_eq!(send(&mut a.1, &[7; 9]).expect("alive"), 5);
        assert!(readable(&a.0, None) && readable(&b.0, None));
        assert!(send(&mut a.1, &[7]).is_err() && send(&mut b.1, &[7]).is_err());
        assert!(recv(&mut a.2).map_or(true, |end| end == Some(vec![])));
        assert!(recv(&mut b.2).map_or(true, |end| end == Some(vec![7; 5])));
        assert!(recv(&mut b.2).map_or(true, |end| end == Some(vec![])));
    }
}

#[test]
fn our_own_cut_lets_the_peer_have_the_bytes_sent_before() {
    let (mut a, mut b) = pair(0, Faults::default()).expect("a pair");
    send(&mut a.1, &[1, 2, 3]).expect("alive");
    send(&mut b.1, &[4]).expect("alive");
    a.0.cut();
    assert!(send(&mut a.1, &[1]).is_err() && recv(&mut a.2).is_err());
    assert_eq!(recv(&mut b.2).expect("still there"), Some(vec![1, 2, 3]));
    assert_eq!(recv(&mut b.2).expect("the end"), Some(vec![]));
    assert!(send(&mut b.1, &[1]).is_err());
}

#[test]
fn one_byte_is_corrupted() {
    let faults = Faults { corrupt_at: Some(4321), split_bytes: 70, ..Faults::default() };
    let (mut a, mut b) = pair(3, faults).expect("a pair");
    let got = move_all(&mut a, &mut b, &[0x55; 9000]);
    let wrong: Vec<_> = (0..9000).filter(|i| got[*i] != 0x55).collect();
    assert_eq!(wrong, [4321]);
}

#[test]
fn a_slow_pipe_holds_bytes_back() {
    let day = Duration::from_secs(86_400);
    let (mut a, mut b) = pair(0, Faults { delay: day, ..Faults::default() }).expect("a pair");
    assert_eq!(send(&mut a.1, &[9]).expect("alive"), 1);
    assert_eq!(recv(&mut b.2).expect("alive"), None);
    assert!(b.2.arm().expect("alive") && !readable(&b.0, Some(Duration::ZERO)));
}
