//! A position in a list of spans, moved forward as bytes are used.

use uccl_fabric::mem::Span;

/// How far a list of spans has been used.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Cursor {
    pub(super) index: usize,
    pub(super) offset: usize,
}

impl Cursor {
    /// Moves `n` bytes forward.
    pub(super) fn advance(&mut self, lens: impl Fn(usize) -> Option<usize>, mut n: usize) {
        while let Some(len) = lens(self.index) {
            let left = len - self.offset;
            if n < left {
                self.offset += n;
                return;
            }
            n -= left;
            self.index += 1;
            self.offset = 0;
        }
    }

    /// Appends the spans ahead: at most `limit` bytes in at most `pieces` pieces. Returns how many bytes.
    pub(super) fn ahead(
        self,
        spans: &[Span],
        limit: usize,
        pieces: usize,
        out: &mut Vec<Span>,
    ) -> usize {
        let mut total = 0;
        let mut offset = self.offset;
        for span in spans.iter().skip(self.index).take(pieces) {
            if total == limit {
                break;
            }
            let len = (span.len - offset).min(limit - total);
            if len > 0 {
                out.push(Span { addr: span.addr + offset, len });
                total += len;
            }
            offset = 0;
        }
        total
    }
}
