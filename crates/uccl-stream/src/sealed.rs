//! A pipe with its bytes protected by [records](uccl_wire::record), over another pipe.
//!
//! Received bytes go to their place only when their record has been checked, so they pass through a
//! buffer here. Bytes to send do as well: memory may change while it is sent, and a code must be
//! over the bytes that go out.

use std::{io, ops::Range, os::fd::BorrowedFd};

use uccl_fabric::{
    guarded::{self, UnmappedMemory},
    mem::Span,
    pieces::{Pieces as _, Stretch},
    pipe::{Backlog, Pipe, PipeRx, PipeTx},
};
use uccl_wire::record::{HEAD_LEN, MAX_CONTENT, MAX_RECORD, Opener, Sealer};

/// Bytes that are received before their records are whole: two records, so that the rest of one
/// comes with the next.
const ROOM: usize = 2 * MAX_RECORD;

/// A pipe in records.
pub struct SealedPipe<P>(P);

/// The sending half of a [`SealedPipe`].
pub struct SealedTx<T> {
    pipe: T,
    sealer: Sealer,
    /// A record that is being sent.
    record: Vec<u8>,
    sent: usize,
}

/// The receiving half of a [`SealedPipe`].
pub struct SealedRx<R> {
    pipe: R,
    opener: Opener,
    buffer: Box<[u8]>,
    /// Bytes that have come and were not checked.
    start: usize,
    end: usize,
    /// Bytes that were checked and have not been taken; they lie before `start`.
    opened: Range<usize>,
}

impl<P: Pipe> SealedPipe<P> {
    /// Puts records over a pipe and its halves.
    pub fn over(
        (pipe, tx, rx): (P, P::Tx, P::Rx),
        sealer: Sealer,
        opener: Opener,
    ) -> (Self, SealedTx<P::Tx>, SealedRx<P::Rx>) {
        let tx = SealedTx { pipe: tx, sealer, record: Vec::with_capacity(MAX_RECORD), sent: 0 };
        let buffer = vec![0; ROOM].into_boxed_slice();
        let rx = SealedRx { pipe: rx, opener, buffer, start: 0, end: 0, opened: 0..0 };
        (Self(pipe), tx, rx)
    }
}

impl<P: Pipe> Pipe for SealedPipe<P> {
    type Tx = SealedTx<P::Tx>;
    type Rx = SealedRx<P::Rx>;

    const LINK: &'static str = P::LINK;

    fn fd(&self) -> BorrowedFd<'_> {
        self.0.fd()
    }

    fn room_is_writable(&self) -> bool {
        self.0.room_is_writable()
    }

    fn cut(&self) {
        self.0.cut();
    }
}

impl<T: PipeTx> SealedTx<T> {
    /// Sends the rest of the record; whether all of it has gone.
    fn drain(&mut self) -> io::Result<bool> {
        while self.is_holding() {
            let rest = &self.record[self.sent..];
            let span = Span { addr: rest.as_ptr() as usize, len: rest.len() };
            // SAFETY: the span is of a buffer that is borrowed for the call.
            match unsafe { self.pipe.send(&[span])? } {
                0 => return Ok(false),
                n => self.sent += n,
            }
        }
        Ok(true)
    }
}

impl<T: PipeTx> PipeTx for SealedTx<T> {
    unsafe fn send(&mut self, spans: &[Span]) -> io::Result<usize> {
        let (mut rest, mut taken) = (Stretch::all(spans), 0);
        while self.drain()? {
            self.record.clear();
            self.sent = 0;
            self.record.extend_from_slice(&[0; HEAD_LEN]);
            for span in rest.take_parts(spans, MAX_CONTENT) {
                // SAFETY: readable, as far as it is mapped, as the caller promises. Others may
                // write it meanwhile, as memory of a region: this copies it once, and seals the
                // copy.
                if let Err(e) = unsafe { guarded::append(&mut self.record, span) } {
                    self.record.clear();
                    // Earlier records have gone. The caller comes again with the rest.
                    return if taken > 0 { Ok(taken) } else { Err(e.into()) };
                }
            }
            let content = self.record.len() - HEAD_LEN;
            if content == 0 {
                self.record.clear();
                break;
            }
            self.sealer.seal(&mut self.record);
            taken += content;
        }
        Ok(taken)
    }

    fn is_holding(&self) -> bool {
        self.sent < self.record.len()
    }

    fn arm(&mut self) -> io::Result<bool> {
        self.pipe.arm()
    }
}

impl<R: PipeRx> SealedRx<R> {
    /// Moves checked bytes to the rest of the spans. Returns how many, also where a span is not
    /// mapped: then the rest waits.
    ///
    /// # Safety
    /// The spans must be writable, as far as they are mapped.
    unsafe fn take(
        &mut self,
        spans: &[Span],
        rest: &mut Stretch,
    ) -> (usize, Result<(), UnmappedMemory>) {
        let (mut moved, mut result) = (0, Ok(()));
        for span in rest.take_parts(spans, self.opened.len()) {
            let from = &self.buffer[self.opened.start + moved..][..span.len];
            // SAFETY: writable, as far as it is mapped, as the caller promises. `from` lies in a
            // buffer of our own.
            result = unsafe { guarded::copy_to(span, from) };
            if result.is_err() {
                break;
            }
            moved += span.len;
        }
        self.opened.start += moved;
        (moved, result)
    }

    /// The length of the next record, if it is whole.
    fn whole(&self) -> io::Result<Option<usize>> {
        let have = &self.buffer[self.start..self.end];
        let len = Opener::len(have).map_err(forged)?;
        Ok(len.filter(|len| *len <= have.len()))
    }

    /// Receives more of a record; `None` when nothing is there yet, and `Some(0)` at the end.
    fn fill(&mut self) -> io::Result<Option<usize>> {
        // No checked bytes are left, so only the beginning of a record is moved.
        self.buffer.copy_within(self.start..self.end, 0);
        (self.start, self.end, self.opened) = (0, self.end - self.start, 0..0);
        let free = &mut self.buffer[self.end..];
        let span = Span { addr: free.as_mut_ptr() as usize, len: free.len() };
        // SAFETY: the span is of a buffer that is borrowed for the call.
        let got = unsafe { self.pipe.recv(&[span])? };
        self.end += got.unwrap_or(0);
        Ok(got)
    }
}

fn forged(e: impl std::error::Error + Send + Sync + 'static) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, e)
}

impl<R: PipeRx> PipeRx for SealedRx<R> {
    unsafe fn recv(&mut self, spans: &[Span]) -> io::Result<Option<usize>> {
        let (mut rest, mut taken) = (Stretch::all(spans), 0);
        let wanted = spans.len_bytes() as usize;
        loop {
            // SAFETY: as the caller promises.
            let (moved, result) = unsafe { self.take(spans, &mut rest) };
            taken += moved;
            if taken == 0 {
                result?;
            }
            if taken == wanted || result.is_err() {
                return Ok(Some(taken));
            }
            if let Some(len) = self.whole()? {
                let record = &self.buffer[self.start..self.start + len];
                let content = self.opener.open(record).map_err(forged)?.len();
                let at = self.start + HEAD_LEN;
                self.opened = at..at + content;
                self.start += len;
                continue;
            }
            match self.fill()? {
                Some(1..) => {}
                // The bytes that have come are handed out first.
                _ if taken > 0 => return Ok(Some(taken)),
                nothing => return Ok(nothing),
            }
        }
    }

    fn is_cut(&mut self) -> bool {
        self.pipe.is_cut()
    }

    fn backlog(&mut self) -> Backlog {
        self.pipe.backlog()
    }

    fn arm(&mut self) -> io::Result<bool> {
        if !self.opened.is_empty() || self.whole()?.is_some() {
            return Ok(false);
        }
        self.pipe.arm()
    }
}
