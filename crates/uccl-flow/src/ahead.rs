//! Bytes of a flow's own stream that were read ahead of the receives.

use crate::socket::Span;

const AHEAD_LEN: usize = 64 << 10;

/// Bytes that were read ahead.
pub(crate) struct Ahead {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Ahead {
    pub(crate) fn new() -> Self {
        Self { bytes: vec![0; AHEAD_LEN].into_boxed_slice(), start: 0, end: 0 }
    }

    pub(crate) fn filled(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    pub(crate) fn take(&mut self, count: usize) {
        self.start += count;
    }

    pub(crate) fn fill(&mut self, count: usize) {
        self.end += count;
    }

    /// Room behind the filled bytes, which begin at the front afterwards.
    pub(crate) fn room(&mut self) -> Span {
        if self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        Span::of_mut(&mut self.bytes[self.end..])
    }
}
