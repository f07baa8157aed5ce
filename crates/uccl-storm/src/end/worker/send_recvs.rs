//! Sends and receives. Each piece begins with its length and its stamp, so that the receiver can
//! check it.

use std::{ops::Range, time::Duration};

use uccl_p2p::{Error, MrId, Op, Request, Status, TransferId};

use super::{Worker, completion::Completion};
use crate::{buffer::Use, clock, history, pattern::Pattern, watch};

const MOST: usize = 4;
/// Bytes of a piece's head: its length, and the stamp of the pattern that follows.
const HEAD: usize = 8;

/// A send or a receive under way.
#[derive(Debug)]
pub(super) struct SendRecv {
    id: TransferId,
    op: Op,
    buffer: usize,
    mr: MrId,
    /// The whole range. `pieces` are its parts.
    range: Range<usize>,
    pieces: Vec<Range<usize>>,
    until: Duration,
}

impl Worker {
    pub(super) fn send_or_receive(&mut self) {
        if self.send_recvs.len() >= MOST {
            return self.cancel_send_recv();
        }
        let Some(conn) = self.world.conn(&mut self.rng) else { return };
        let Some(buffer) = self.some_buffer(|buffer| matches!(buffer.held, Use::Registered(_)))
        else {
            return;
        };
        let Some(mr) = self.buffers[buffer].held.mr() else { return };
        let op = if self.rng.bool() { Op::Send } else { Op::Recv };
        let len = self.buffers[buffer].len;
        let begin = self.rng.usize(0..len);
        let range = begin..begin + 1 + self.rng.usize(0..len - begin);
        let step = range.len().div_ceil(self.rng.usize(1..=4));
        let ends = range.clone().step_by(step).map(|at| at..range.end.min(at + step));
        let pieces: Vec<_> = ends.collect();
        if pieces.iter().any(|piece| piece.len() < HEAD) {
            return;
        }
        self.check(buffer, "before it is used");
        match op {
            // The bytes are unknown: a message may arrive at any time.
            Op::Recv => self.buffers[buffer].content.set(range.clone(), None),
            _ => pieces.iter().for_each(|piece| self.write_piece(buffer, piece.clone())),
        }
        self.buffers[buffer].held = Use::Flying(mr);
        self.buffers[buffer].last = format!("{op:?} {range:#x?}");
        let iov = |piece: &Range<usize>| self.buffers[buffer].iov(mr, piece.clone());
        let iovs: Vec<_> = pieces.iter().map(iov).collect();
        let timeout = Some(Duration::from_millis(self.rng.u64(10..1500)));
        let until = self.until(timeout);
        self.note(format!(
            "{op:?} {range:#x?} of {mr} over {conn} in {}, {timeout:?} ...",
            iovs.len()
        ));
        let mut request = Request::new(conn, op, &iovs, &[]);
        request.timeout = timeout;
        let posted = watch::call("post", Duration::ZERO, || self.world.ep.post(&request));
        let send_recv = |id| SendRecv { id, op, buffer, mr, range, pieces, until };
        match posted {
            Ok(id) => {
                self.note(format!("{id}"));
                self.send_recvs.push(send_recv(id));
            }
            Err(e) => {
                self.note(format!("not posted: {e}"));
                let send_recv = send_recv(TransferId(0));
                self.finish_send_recv(&send_recv, self.judge(&e), 0);
            }
        }
    }

    /// Fills a piece with a head and a pattern.
    fn write_piece(&mut self, buffer: usize, piece: Range<usize>) {
        let stamp = self.shared.stamp();
        let buffer = &mut self.buffers[buffer];
        buffer.put(piece.start, &(piece.len() as u32).to_le_bytes());
        buffer.put(piece.start + 4, &stamp.to_le_bytes());
        let body = piece.start + HEAD;
        buffer.fill(body..piece.end, Pattern::data(stamp).moved(body, 0));
    }

    /// Checks a receive: each piece holds its pattern, and the lengths add up to `bytes`.
    fn read_send_recv(&self, send_recv: &SendRecv, bytes: usize) {
        let all: usize =
            send_recv.pieces.iter().map(|piece| self.read_piece(send_recv, piece)).sum();
        if all != bytes {
            history::broken(format!(
                "{bytes} bytes were received, of pieces of {all}: {send_recv:?}"
            ));
        }
    }

    /// Checks a received piece and returns the length in its head.
    fn read_piece(&self, send_recv: &SendRecv, piece: &Range<usize>) -> usize {
        let buffer = &self.buffers[send_recv.buffer];
        let len = u32::from_le_bytes(buffer.bytes(piece.start)) as usize;
        if len < HEAD || len > piece.len() {
            history::broken(format!(
                "{len} bytes were received in a piece of {piece:x?}: {send_recv:?}"
            ));
        }
        let body = piece.start + HEAD;
        let pattern =
            Pattern::data(u32::from_le_bytes(buffer.bytes(piece.start + 4))).moved(body, 0);
        let mut read = buffer.content.clone();
        let body = body..piece.start + len;
        read.set(body.clone(), Some(pattern));
        buffer.check_against(&read, body, "what was received");
        len
    }

    fn finish_send_recv(&mut self, send_recv: &SendRecv, completion: Completion, bytes: usize) {
        let buffer = &mut self.buffers[send_recv.buffer];
        if send_recv.op == Op::Send {
            buffer.check(send_recv.range.clone(), "after it was sent");
        } else if completion == Completion::Done {
            self.read_send_recv(send_recv, bytes);
        }
        if completion == Completion::Stuck {
            return self.keep(send_recv.buffer);
        }
        let buffer = &mut self.buffers[send_recv.buffer];
        if buffer.held == Use::Flying(send_recv.mr) {
            buffer.held = Use::Registered(send_recv.mr);
        }
        buffer.last = format!("{}, {completion:?} at {}", buffer.last, clock::shared_ns());
        self.guard(send_recv.buffer, send_recv.range.clone());
    }

    fn end_send_recv(&mut self, at: usize, status: Result<Status, Error>) {
        self.note(format!(
            "{:?} of {}: {status:?}",
            self.send_recvs[at].op, self.send_recvs[at].id
        ));
        let (completion, bytes) = match status {
            Ok(Status::Pending) => return,
            Ok(Status::Done(outcome)) => (Completion::Done, outcome.bytes as usize),
            Ok(Status::Failed(e)) | Err(e) => (self.judge(&e), 0),
        };
        let send_recv = self.send_recvs.swap_remove(at);
        self.finish_send_recv(&send_recv, completion, bytes);
    }

    pub(super) fn cancel_send_recv(&mut self) {
        if self.send_recvs.is_empty() {
            return;
        }
        let at = self.rng.usize(0..self.send_recvs.len());
        let (id, ep) = (self.send_recvs[at].id, &self.world.ep);
        self.note(format!("cancel {id} ..."));
        let status = watch::call("cancel", ep.config().timeout, || ep.cancel(id));
        if matches!(status, Ok(Status::Pending)) {
            history::broken(format!("{id} was cancelled and is unfinished"));
        }
        self.end_send_recv(at, status);
    }

    pub(super) fn look_at_send_recvs(&mut self) {
        if self.send_recvs.is_empty() {
            return;
        }
        let at = self.rng.usize(0..self.send_recvs.len());
        let status =
            watch::call("poll", Duration::ZERO, || self.world.ep.poll(self.send_recvs[at].id));
        if !matches!(status, Ok(Status::Pending)) {
            self.end_send_recv(at, status);
        }
        let now = clock::active();
        if let Some(late) = self.send_recvs.iter().find(|send_recv| send_recv.until < now) {
            history::broken(format!("it does not end: {late:?}"));
        }
    }

    pub(super) fn end_send_recvs_that_use(&mut self, buffer: usize) {
        while let Some(at) = self.send_recvs.iter().position(|send_recv| send_recv.buffer == buffer)
        {
            self.send_recv_must_have_ended(at, "its region was deregistered");
        }
    }

    pub(super) fn end_all_send_recvs(&mut self, why: &str) {
        while !self.send_recvs.is_empty() {
            self.send_recv_must_have_ended(0, why);
        }
    }

    fn send_recv_must_have_ended(&mut self, at: usize, why: &str) {
        let status = self.world.ep.poll(self.send_recvs[at].id);
        if matches!(status, Ok(Status::Pending)) {
            history::broken(format!("{why}, and it has not ended: {:?}", self.send_recvs[at]));
        }
        self.end_send_recv(at, status);
    }
}
