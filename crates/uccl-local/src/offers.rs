//! The socket to the peer, and the memory that was offered to the peer over it.
//!
//! A peer that does not read leaves no room for messages. It can do without an offer, which is
//! dropped then. A retraction waits until there is room: until it has come, the peer keeps the
//! memory mapped.

use std::{
    collections::{HashSet, VecDeque},
    io,
    os::fd::BorrowedFd,
};

use crate::fdpass::{FdSocket, is_want};

pub(super) const RING: u8 = 0;
pub(super) const RETRACT: u8 = 2;

/// A socket that keeps track of its offers, so that it can retract them.
pub(super) struct Line {
    pub(super) socket: FdSocket,
    /// Ids of the memory that was offered to the peer.
    offered: HashSet<u32>,
    /// Retractions that the socket has not taken. Only offered memory is retracted, so there are no
    /// more of them than offers.
    owed: VecDeque<u32>,
}

impl Line {
    pub(super) fn new(socket: FdSocket) -> Self {
        Self { socket, offered: HashSet::new(), owed: VecDeque::new() }
    }

    /// Wakes the peer.
    pub(super) fn ring(&mut self) -> io::Result<()> {
        // A waiting message wakes the peer too: either it is sent now, or the peer has not read the
        // ones before.
        match self.socket.is_waiting() || !self.owed.is_empty() {
            true => self.flush(),
            false => self.socket.send(&[RING], &[]),
        }
    }

    /// Sends an offer. If something for it is missing, the error is one of [`is_want`], and the
    /// peer does without the offer.
    pub(super) fn offer(
        &mut self,
        id: u32,
        bytes: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        // First, so that the room that the peer makes is not used up by offers.
        self.flush()?;
        if !self.owed.is_empty() {
            return Err(io::ErrorKind::QuotaExceeded.into());
        }
        self.socket.send(bytes, fds)?;
        self.offered.insert(id);
        Ok(())
    }

    /// Makes the peer forget memory that was offered.
    pub(super) fn retract(&mut self, id: u32) -> io::Result<()> {
        if self.offered.remove(&id) {
            self.owed.push_back(id);
        }
        self.flush()
    }

    /// Sends the messages and retractions that wait, as far as the socket takes them.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.socket.flush()?;
        while let Some(id) = self.owed.front() {
            match self.socket.send(&with_id(RETRACT, *id), &[]) {
                Err(e) if is_want(&e) => return Ok(()),
                said => said?,
            }
            self.owed.pop_front();
        }
        Ok(())
    }
}

pub(super) fn with_id(what: u8, id: u32) -> [u8; 5] {
    let [a, b, c, d] = id.to_le_bytes();
    [what, a, b, c, d]
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, os::unix::net::UnixStream};

    use super::*;

    const OFFER: u8 = 1;

    #[test]
    fn an_offer_is_retracted_however_late_the_peer_reads() {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let [ours, mut theirs] = [ours, theirs].map(|end| FdSocket::new(end).expect("a socket"));
        let mut line = Line::new(ours);
        // As much as there is room for, and some that are dropped.
        let mut offered = BTreeSet::new();
        let mut dropped = 0;
        for id in 0.. {
            let mut offer = vec![0; 60_000];
            offer[..5].copy_from_slice(&with_id(OFFER, id));
            match line.offer(id, &offer, &[]) {
                Ok(()) => _ = offered.insert(id),
                Err(e) if is_want(&e) => dropped += 1,
                Err(e) => panic!("{e}"),
            }
            if dropped == 3 {
                break;
            }
        }
        // Small messages fill the room that is left.
        while line.socket.send(&[RING; 5], &[]).is_ok() {}
        for id in 0..offered.len() as u32 + dropped {
            line.retract(id).expect("the peer lives");
        }
        assert!(!line.owed.is_empty(), "there was room");
        let mut heard = BTreeSet::new();
        let mut known = BTreeSet::new();
        loop {
            let mut any = false;
            while let Some(message) = theirs.recv().expect("we live") {
                any = true;
                let [what, a, b, c, d, ..] = message.bytes[..] else { continue };
                let id = u32::from_le_bytes([a, b, c, d]);
                match what {
                    OFFER => assert!(known.insert(id) && heard.insert(id)),
                    RETRACT => assert!(known.remove(&id), "{id} was not offered"),
                    _ => {}
                }
            }
            if !any {
                break;
            }
            line.flush().expect("the peer lives");
        }
        assert_eq!(heard, offered);
        assert!(known.is_empty(), "the peer keeps {} of {}", known.len(), offered.len());
    }
}
