//! Zero-copy rows, which stay where they arrive.

use uccl_device::cuda::Stream;

use super::{
    dispatch::{Dispatch, Done, Handle},
    memory::{Outputs, ScalesOut},
};
use crate::{
    error::{Error, Result},
    header,
};

/// The layout of rows that stay in this rank's pool. They are valid until the next call of the
/// group begins on this rank's GPU, whichever it is. A call that sends them, back or on, needs a
/// copy of them elsewhere.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InPlace {
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
    /// The layout of rows that can stay. `None` if the ranks' path is through the host, late ranks
    /// are left out, counts were asked for, the pool is too small, or the handle's rows have
    /// another layout. All ranks compute the same.
    #[must_use]
    pub fn in_place(&self) -> Option<InPlace> {
        let Self { group, send, record, slots, done, earlier, .. } = self;
        let (stride, spread) = (record.stride(), self.spread());
        let lies_so = earlier.is_none_or(|told| told.spread == spread);
        let len = group.ranks() * spread * stride;
        let fits = len.next_multiple_of(64) <= group.pool_len();
        let pool = group.pool_address();
        let rows = pool + u64::from(send.send.area.first);
        let can_stay = group.has_whole_calls() && *done == Done::Nothing && lies_so && fits;
        can_stay.then(|| InPlace {
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

    /// As [`receive`](Self::receive), but rows and scales stay [`in_place`](Self::in_place), and
    /// the addresses of `outputs` for them are not used. Rows are by token.
    ///
    /// # Errors
    /// As there; or rows cannot stay.
    ///
    /// # Safety
    /// As there. Choices, weights and the table of `outputs` have room for all rows of
    /// [`in_place`](Self::in_place).
    pub unsafe fn receive_in_place(mut self, outputs: &Outputs, stream: &Stream) -> Result<Handle> {
        let place = self.in_place().filter(|_| outputs.by_expert.is_none());
        let place = place.ok_or_else(|| Error::invalid("rows of this dispatch cannot stay"))?;
        let send = &mut self.send.send;
        send.area.len = (place.spread * place.stride) as u64;
        send.call.len = (self.group.ranks() as u64 * send.area.len).next_multiple_of(64);
        send.call.header[0] = header::STAYS;
        send.call.stays = 1;
        let InPlace { len, rows, stride, scales, .. } = place;
        let outputs = Outputs { len, rows, stride, scales, ..*outputs };
        // SAFETY: the pool has room for the rows; for the rest, the caller guarantees it.
        unsafe { self.receive(&outputs, stream) }
    }
}
