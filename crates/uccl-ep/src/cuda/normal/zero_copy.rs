//! Zero copy: a view of the received records in the window, instead of a copy of their rows.

use uccl_device::cuda::Stream;

use super::{
    dispatch::{Dispatch, Handle, Progress},
    memory::{DispatchOutput, ScalesOut},
};
use crate::shared::{
    error::{Error, Result},
    header,
};

/// A view of the rows that a dispatch received, in this rank's pool. They are valid until the next
/// call of the group begins on this rank's GPU, whichever it is. A call that sends them, back or
/// on, needs a copy of them elsewhere.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ZeroCopyView {
    /// The number of rows, with those that have no token.
    pub len: usize,
    /// Rows from a rank's first to the next rank's.
    pub spread: usize,
    /// The address of the pool.
    pub pool: u64,
    /// The first row.
    pub rows: u64,
    /// Bytes from one row to the next.
    pub stride: usize,
    /// The layout of their scales, if they have any.
    pub scales: Option<ScalesOut>,
}

impl Dispatch {
    /// The view that a receive without a copy will leave. `None` if the ranks' path is through the
    /// host, late ranks are left out, counts were asked for, the pool is too small, or the handle's
    /// rows have another layout. All ranks compute the same.
    #[must_use]
    pub fn zero_copy_view(&self) -> Option<ZeroCopyView> {
        let Self { group, send, record, slots, progress, cached, .. } = self;
        let (stride, spread) = (record.stride(), self.spread());
        let has_spread = cached.is_none_or(|rows| rows.spread == spread);
        let len = group.ranks() * spread * stride;
        let fits = len.next_multiple_of(64) <= group.pool_len();
        let pool = group.pool_address();
        let rows = pool + u64::from(send.send.area.first);
        let can_stay = group.can_fuse() && *progress == Progress::Nothing && has_spread && fits;
        can_stay.then(|| ZeroCopyView {
            len: (group.ranks() - 1) * spread + slots,
            spread,
            pool,
            rows,
            stride,
            scales: (record.scales > 0).then(|| ScalesOut {
                words: rows + record.scales_at() as u64,
                row_stride: stride / 4,
                word_stride: 1,
            }),
        })
    }

    /// As [`receive`](Self::receive), but rows and scales are not copied: they are those of
    /// [`zero_copy_view`](Self::zero_copy_view), and `outputs` needs no memory for them. Rows are
    /// by token.
    ///
    /// # Errors
    /// As there; or there is no such view.
    ///
    /// # Safety
    /// As there. Choices, weights and the tables of `outputs` have room for all rows of
    /// [`zero_copy_view`](Self::zero_copy_view).
    pub unsafe fn receive_zero_copy(
        mut self,
        outputs: &DispatchOutput,
        stream: &Stream,
    ) -> Result<Handle> {
        let place = self.zero_copy_view().filter(|_| outputs.by_expert.is_none());
        let place = place.ok_or_else(|| Error::invalid("rows of this dispatch cannot stay"))?;
        let send = &mut self.send.send;
        send.area.len = (place.spread * place.stride) as u64;
        send.call.len = (self.group.ranks() as u64 * send.area.len).next_multiple_of(64);
        send.call.header[0] = header::ZERO_COPY;
        send.call.zero_copy = 1;
        let ZeroCopyView { len, rows, stride, scales, .. } = place;
        let outputs = DispatchOutput { len, rows, stride, scales, ..*outputs };
        // SAFETY: the pool has room for the rows; for the rest, the caller guarantees it.
        unsafe { self.receive(&outputs, stream) }
    }
}
