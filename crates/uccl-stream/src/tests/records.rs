//! A pipe in records, as the lane above it sees it.

use uccl_fabric::pipe::{PipeRx as _, PipeTx as _};
use uccl_wire::record::{MAX_CONTENT, Opener, Sealer};

use super::*;
use crate::{
    sealed::{SealedPipe, SealedRx, SealedTx},
    tcp::{TcpRx, TcpTx},
};

type Half<T> = (SealedPipe<TcpPipe>, T);

/// The sending half of one end, and the receiving half of the other.
fn halves() -> (Half<SealedTx<TcpTx>>, Half<SealedRx<TcpRx>>) {
    let (a, b) = streams();
    let over = |stream| TcpPipe::new(stream, &TcpOptions::default()).expect("a pipe");
    let keyed = |key| (Sealer::new(&[key; 32]), Opener::new(&[key; 32]));
    let [(sealer, opener), (back, other)] = [1, 2].map(keyed);
    let (pipe, tx, _) = SealedPipe::over(over(a), sealer, other);
    let (there, _, rx) = SealedPipe::over(over(b), back, opener);
    ((pipe, tx), (there, rx))
}

/// Receives until `into` is full.
fn receive(rx: &mut SealedRx<TcpRx>, into: &mut [u8]) {
    let mut at = 0;
    while at < into.len() {
        // SAFETY: the memory is there.
        at += unsafe { rx.recv(&[span(&mut into[at..])]) }.expect("it lives").unwrap_or(0);
    }
}

#[test]
fn checked_bytes_keep_a_thread_from_sleep() {
    let ((_pipe, mut tx), (_there, mut rx)) = halves();
    let mut bytes = pattern(100);
    // SAFETY: the memory is there.
    assert_eq!(unsafe { tx.send(&[span(&mut bytes)]) }.expect("sent"), 100);
    let mut half = [0; 50];
    receive(&mut rx, &mut half);
    assert!(!rx.arm().expect("it lives"), "nothing shows at the socket any more");
    receive(&mut rx, &mut half);
    assert_eq!(half[..], bytes[50..]);
    assert!(rx.arm().expect("it lives"));
}

#[test]
fn the_rest_of_a_record_is_held_while_the_socket_is_full() {
    let ((_pipe, mut tx), (_there, mut rx)) = halves();
    let mut bytes = pattern(64 << 20);
    // SAFETY: the memory is there.
    let sent = unsafe { tx.send(&[span(&mut bytes)]) }.expect("sent");
    assert!(sent < bytes.len() && sent.is_multiple_of(MAX_CONTENT));
    assert!(tx.is_holding(), "the rest of a record is nowhere");
    // The caller may reuse the memory of bytes that were taken.
    let want = bytes[..sent].to_vec();
    bytes.fill(0);
    let mut got = vec![0; sent];
    std::thread::scope(|scope| {
        scope.spawn(|| receive(&mut rx, &mut got));
        while tx.is_holding() {
            // SAFETY: there are no spans.
            unsafe { tx.send(&[]) }.expect("sent");
        }
    });
    assert!(got == want);
}

#[test]
fn a_record_that_was_cut_short_is_the_end() {
    let ((pipe, mut tx), (_there, mut rx)) = halves();
    let mut bytes = pattern(64 << 20);
    // SAFETY: the memory is there.
    let sent = unsafe { tx.send(&[span(&mut bytes)]) }.expect("sent");
    assert!(tx.is_holding());
    drop((pipe, tx));
    let mut got = vec![0; sent];
    let mut at = 0;
    let last = loop {
        // SAFETY: the memory is there.
        match unsafe { rx.recv(&[span(&mut got[at..])]) } {
            Ok(Some(n @ 1..)) => at += n,
            Ok(None) => {}
            end => break end,
        }
    };
    assert!(matches!(last, Ok(Some(0)) | Err(_)), "{last:?}");
    assert!(at < sent && got[..at] == bytes[..at] && got[at..].iter().all(|byte| *byte == 0));
}
