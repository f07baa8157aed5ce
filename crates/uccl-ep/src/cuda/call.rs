//! The kernels' parameters of a call, which both modes share.

use super::{
    group::Group,
    params::{Area, CallParams, MAX_TOKENS, Routes},
    status::{COMBINE_AGREED, DISPATCH_AGREED},
};
use crate::shared::{
    error::{Error, Phase, Result},
    header::Header,
    record::{Record, Row},
};

/// The kernels' parameters of a call with such records, and the layout of an area of its place.
pub(super) fn dispatch_call(
    group: &Group,
    record: &Record,
    routes: &Routes,
    slots: usize,
    scratch: u64,
) -> Result<(CallParams, Area)> {
    check_slots(routes.tokens as usize, slots)?;
    counts_call(group, record, routes, slots, scratch)
}

/// Fails for more tokens than `slots`.
pub(super) fn check_slots(tokens: usize, slots: usize) -> Result<()> {
    if tokens <= slots && slots <= MAX_TOKENS {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "{tokens} tokens, and room for {slots} of each rank, of {MAX_TOKENS} at most"
    )))
}

/// The same of a call that may send no records, but counts alone: of any number of tokens.
pub(super) fn counts_call(
    group: &Group,
    record: &Record,
    routes: &Routes,
    slots: usize,
    scratch: u64,
) -> Result<(CallParams, Area)> {
    let (ranks, local) = (group.ranks(), routes.local_experts as usize);
    let tokens = routes.tokens as usize;
    let agreed = [record.payload, record.scales, record.top_k, local * ranks, slots];
    let header = Header::<5, 2> {
        phase: Phase::Dispatch,
        agreed: std::array::from_fn(|at| (DISPATCH_AGREED[at], agreed[at])),
        // The kernel knows the tokens for each rank.
        values: [0, tokens],
    };
    let call = group.call(record.area(local, slots) * ranks, &header, scratch)?;
    Ok((call, Area::of(record, local, slots)))
}

/// The kernels' parameters of a call with such rows, and with so many slots for each rank;
/// `scratch` is its memory. The caller sets `dispatch_placement`, the memory of the dispatch.
pub(super) fn combine_call(
    group: &Group,
    row: &Row,
    slots: usize,
    is_packed: bool,
    scratch: u64,
) -> Result<CallParams> {
    let agreed = [row.values, row.weights, row.slots, slots, usize::from(is_packed)];
    let header = Header::<5, 0> {
        phase: Phase::Combine,
        agreed: std::array::from_fn(|at| (COMBINE_AGREED[at], agreed[at])),
        values: [],
    };
    group.call(row.place(slots), &header, scratch)
}
