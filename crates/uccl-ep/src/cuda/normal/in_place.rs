//! Rows that stay where they arrive, so that nothing copies them once more.

use uccl_device::cuda::Stream;

use super::{
    dispatch::{Dispatch, Done, Handle},
    memory::{Outputs, ScalesOut},
};
use crate::{
    error::{Error, Result},
    header,
};

/// Where rows are that stay in this rank's pool. They are there until the next call of the group begins on this rank's GPU, whichever it is,
/// and go back, or on, from another place only.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InPlace {
    /// How many rows there are, with those that nothing arrives for.
    pub len: usize,
    /// From the first row of a rank to that of the next.
    pub spread: usize,
    /// Where the pool begins.
    pub pool: u64,
    /// The first row.
    pub rows: u64,
    /// Bytes from one row to the next.
    pub stride: usize,
    /// Where their scales are, if they come with some.
    pub scales: Option<ScalesOut>,
}

impl Dispatch {
    /// Where rows can stay. They cannot if ranks go by the host, late ranks are left out, counts were asked for, the pool has no room for it, or
    /// tokens go where others went whose rows lie otherwise. All ranks find the same.
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

    /// Rows from a rank's first to the next rank's, where they stay.
    pub(super) fn spread(&self) -> usize {
        self.record.spread(self.send.send.routes.local_experts as usize, self.slots)
    }

    /// As [`receive`](Self::receive), but rows and scales stay [`in_place`](Self::in_place), wherever `outputs` says they go. Rows are by token.
    ///
    /// # Errors
    /// As there; and rows cannot stay.
    ///
    /// # Safety
    /// As there. Choices, weights and the table of `outputs` have room for all rows that [`in_place`](Self::in_place) tells of.
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
        // SAFETY: the pool has room for the rows; otherwise as the caller has it.
        unsafe { self.receive(&outputs, stream) }
    }
}
