//! Letters: messages that are sent and received. Each piece begins with its length and its stamp,
//! so that the receiver can check it.

use std::{ops::Range, time::Duration};

use uccl_p2p::{Error, MrId, Op, Request, Status, TransferId};

use super::{Hand, fate::Fate};
use crate::{clock, history, pattern::Pattern, plot::Use, watch};

const MOST: usize = 4;
/// Bytes of a piece's head: its length, and the stamp of the pattern that follows.
const HEAD: usize = 8;

/// A send or a receive under way.
#[derive(Debug)]
pub(super) struct Letter {
    id: TransferId,
    op: Op,
    plot: usize,
    mr: MrId,
    /// The whole range. `pieces` are its parts.
    range: Range<usize>,
    pieces: Vec<Range<usize>>,
    until: Duration,
}

impl Hand {
    pub(super) fn send_or_receive(&mut self) {
        if self.letters.len() >= MOST {
            return self.cancel_letter();
        }
        let Some(conn) = self.world.conn(&mut self.rng) else { return };
        let Some(plot) = self.some_plot(|plot| matches!(plot.held, Use::Registered(_))) else {
            return;
        };
        let Some(mr) = self.plots[plot].held.mr() else { return };
        let op = if self.rng.bool() { Op::Send } else { Op::Recv };
        let len = self.plots[plot].len;
        let begin = self.rng.usize(0..len);
        let range = begin..begin + 1 + self.rng.usize(0..len - begin);
        let step = range.len().div_ceil(self.rng.usize(1..=4));
        let ends = range.clone().step_by(step).map(|at| at..range.end.min(at + step));
        let pieces: Vec<_> = ends.collect();
        if pieces.iter().any(|piece| piece.len() < HEAD) {
            return;
        }
        self.check(plot, "before it is used");
        match op {
            // The bytes are unknown: a message may arrive at any time.
            Op::Recv => self.plots[plot].content.set(range.clone(), None),
            _ => pieces.iter().for_each(|piece| self.write_piece(plot, piece.clone())),
        }
        self.plots[plot].held = Use::Flying(mr);
        self.plots[plot].last = format!("{op:?} {range:#x?}");
        let iov = |piece: &Range<usize>| self.plots[plot].iov(mr, piece.clone());
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
        let letter = |id| Letter { id, op, plot, mr, range, pieces, until };
        match posted {
            Ok(id) => {
                self.note(format!("{id}"));
                self.letters.push(letter(id));
            }
            Err(e) => {
                self.note(format!("not posted: {e}"));
                let letter = letter(TransferId(0));
                self.finish_letter(&letter, self.judge(&e), 0);
            }
        }
    }

    /// Fills a piece with a head and a pattern.
    fn write_piece(&mut self, plot: usize, piece: Range<usize>) {
        let stamp = self.shared.stamp();
        let plot = &mut self.plots[plot];
        plot.put(piece.start, &(piece.len() as u32).to_le_bytes());
        plot.put(piece.start + 4, &stamp.to_le_bytes());
        let body = piece.start + HEAD;
        plot.fill(body..piece.end, Pattern::data(stamp).moved(body, 0));
    }

    /// Checks a received letter: each piece holds its pattern, and the lengths add up to `bytes`.
    fn read_letter(&self, letter: &Letter, bytes: usize) {
        let all: usize = letter.pieces.iter().map(|piece| self.read_piece(letter, piece)).sum();
        if all != bytes {
            history::broken(format!("{bytes} bytes were received, of pieces of {all}: {letter:?}"));
        }
    }

    /// Checks a received piece and returns the length in its head.
    fn read_piece(&self, letter: &Letter, piece: &Range<usize>) -> usize {
        let plot = &self.plots[letter.plot];
        let len = u32::from_le_bytes(plot.bytes(piece.start)) as usize;
        if len < HEAD || len > piece.len() {
            history::broken(format!(
                "{len} bytes were received in a piece of {piece:x?}: {letter:?}"
            ));
        }
        let body = piece.start + HEAD;
        let pattern = Pattern::data(u32::from_le_bytes(plot.bytes(piece.start + 4))).moved(body, 0);
        let mut read = plot.content.clone();
        let body = body..piece.start + len;
        read.set(body.clone(), Some(pattern));
        plot.check_against(&read, body, "what was received");
        len
    }

    fn finish_letter(&mut self, letter: &Letter, fate: Fate, bytes: usize) {
        let plot = &mut self.plots[letter.plot];
        if letter.op == Op::Send {
            plot.check(letter.range.clone(), "after it was sent");
        } else if fate == Fate::Done {
            self.read_letter(letter, bytes);
        }
        if fate == Fate::Stuck {
            return self.keep(letter.plot);
        }
        let plot = &mut self.plots[letter.plot];
        if plot.held == Use::Flying(letter.mr) {
            plot.held = Use::Registered(letter.mr);
        }
        plot.last = format!("{}, {fate:?} at {}", plot.last, clock::shared_ns());
        self.guard(letter.plot, letter.range.clone());
    }

    fn end_letter(&mut self, at: usize, status: Result<Status, Error>) {
        self.note(format!("{:?} of {}: {status:?}", self.letters[at].op, self.letters[at].id));
        let (fate, bytes) = match status {
            Ok(Status::Pending) => return,
            Ok(Status::Done(outcome)) => (Fate::Done, outcome.bytes as usize),
            Ok(Status::Failed(e)) | Err(e) => (self.judge(&e), 0),
        };
        let letter = self.letters.swap_remove(at);
        self.finish_letter(&letter, fate, bytes);
    }

    pub(super) fn cancel_letter(&mut self) {
        if self.letters.is_empty() {
            return;
        }
        let at = self.rng.usize(0..self.letters.len());
        let (id, ep) = (self.letters[at].id, &self.world.ep);
        self.note(format!("cancel {id} ..."));
        let status = watch::call("cancel", ep.config().timeout, || ep.cancel(id));
        if matches!(status, Ok(Status::Pending)) {
            history::broken(format!("{id} was cancelled and is unfinished"));
        }
        self.end_letter(at, status);
    }

    pub(super) fn look_at_letters(&mut self) {
        if self.letters.is_empty() {
            return;
        }
        let at = self.rng.usize(0..self.letters.len());
        let status =
            watch::call("poll", Duration::ZERO, || self.world.ep.poll(self.letters[at].id));
        if !matches!(status, Ok(Status::Pending)) {
            self.end_letter(at, status);
        }
        let now = clock::active();
        if let Some(late) = self.letters.iter().find(|letter| letter.until < now) {
            history::broken(format!("it does not end: {late:?}"));
        }
    }

    pub(super) fn end_letters_that_use(&mut self, plot: usize) {
        while let Some(at) = self.letters.iter().position(|letter| letter.plot == plot) {
            self.letter_must_have_ended(at, "its region was deregistered");
        }
    }

    pub(super) fn end_all_letters(&mut self, why: &str) {
        while !self.letters.is_empty() {
            self.letter_must_have_ended(0, why);
        }
    }

    fn letter_must_have_ended(&mut self, at: usize, why: &str) {
        let status = self.world.ep.poll(self.letters[at].id);
        if matches!(status, Ok(Status::Pending)) {
            history::broken(format!("{why}, and it has not ended: {:?}", self.letters[at]));
        }
        self.end_letter(at, status);
    }
}
