//! The choice of NCCL's protocol, by the length of a collective alone: the same on every rank.
//!
//! LL moves every byte twice and needs no second round: over TCP it is the faster one for short
//! collectives. NCCL draws the line by the device's speed, which moves it up to 1.3 MiB. This tuner
//! draws it where two ranks over TCP measured it, and leaves the algorithm and the channels to
//! NCCL.

use std::{
    env,
    ffi::{c_int, c_void},
    ptr::null_mut,
};

use uccl_nccl_abi::{
    Logger, NcclResult, flags,
    tuner::{Constants, NvlDomains, protocol},
};

use crate::{
    entry::{give, guarded, known},
    fault::Fault,
    log,
};

/// The longest collective of two ranks for which LL is the faster protocol: of 64 KiB it was, of
/// 256 KiB not.
const LL_MAX_BYTES: usize = 128 << 10;
/// A cost in microseconds above any that NCCL calculates.
const AVOIDED: f32 = 1e9;

/// The tuner of one communicator.
struct Tuner {
    /// The longest collective that LL carries; none where NCCL decides.
    ll_max_bytes: Option<usize>,
}

impl Tuner {
    fn new(ranks: usize, nodes: usize, is_on: bool) -> Self {
        // A ring's message has its share of the bytes.
        let scaled = LL_MAX_BYTES.saturating_mul(ranks.max(2) / 2);
        // Within a host NCCL does not use the network.
        Self { ll_max_bytes: (is_on && nodes > 1).then_some(scaled) }
    }

    /// The protocol to avoid for a collective.
    fn avoided(&self, bytes: usize) -> Option<usize> {
        let most = self.ll_max_bytes?;
        Some(if bytes <= most { protocol::SIMPLE } else { protocol::LL })
    }

    /// Raises the costs of a row that are not the only possible ones.
    fn raise(row: &mut [f32], avoided: usize) {
        if let Some(cost) = row.get_mut(avoided)
            && *cost >= 0.0
        {
            *cost = AVOIDED;
        }
    }
}

fn is_on() -> bool {
    env::var("UCCL_NCCL_TUNER").is_ok_and(|value| value.trim() == "1")
}

fn begin(
    ranks: usize,
    nodes: usize,
    logger: Logger,
    context: *mut *mut c_void,
) -> Result<(), Fault> {
    log::begin(logger);
    // SAFETY: NCCL's place for the context.
    unsafe { give("the tuner's init", context, null_mut()) }?;
    let tuner = Tuner::new(ranks, nodes, is_on());
    if let Some(most) = tuner.ll_max_bytes {
        log::info(flags::TUNING, &format!("LL up to {most} bytes, Simple above"));
    }
    // SAFETY: as above.
    unsafe { give("the tuner's init", context, Box::into_raw(Box::new(tuner)).cast()) }
}

pub(crate) unsafe extern "C" fn init_v4(
    ranks: usize,
    nodes: usize,
    logger: Logger,
    context: *mut *mut c_void,
) -> NcclResult {
    guarded(|| begin(ranks, nodes, logger, context))
}

pub(crate) unsafe extern "C" fn init_v5(
    context: *mut *mut c_void,
    _id: u64,
    ranks: usize,
    nodes: usize,
    logger: Logger,
    _domains: *mut NvlDomains,
    _constants: *mut Constants,
) -> NcclResult {
    guarded(|| begin(ranks, nodes, logger, context))
}

/// Changes costs of a table of `algorithms` x `protocols`.
#[allow(clippy::too_many_arguments)]
pub(crate) unsafe extern "C" fn get_coll_info(
    context: *mut c_void,
    _collective: c_int,
    bytes: usize,
    _operations: c_int,
    table: *mut *mut f32,
    algorithms: c_int,
    protocols: c_int,
    _is_registered: c_int,
    channels: *mut c_int,
) -> NcclResult {
    guarded(|| {
        // SAFETY: a context of `init`, and NCCL's place for the channels: 0 leaves them to it.
        let tuner = unsafe {
            give("getCollInfo", channels, 0)?;
            known::<Tuner>("getCollInfo", context)
        }?;
        let sizes = (usize::try_from(algorithms), usize::try_from(protocols));
        let (Some(avoided), (Ok(rows), Ok(columns))) = (tuner.avoided(bytes), sizes) else {
            return Ok(());
        };
        if table.is_null() || columns == 0 {
            return Ok(());
        }
        // SAFETY: the table is contiguous in spite of its type, with this many rows and columns.
        let costs = unsafe { std::slice::from_raw_parts_mut(table.cast::<f32>(), rows * columns) };
        costs.chunks_mut(columns).for_each(|row| Tuner::raise(row, avoided));
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn end(context: *mut c_void) -> NcclResult {
    guarded(|| {
        if !context.is_null() {
            // SAFETY: of `init`, and ended once.
            drop(unsafe { Box::from_raw(context.cast::<Tuner>()) });
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_protocol_changes_with_the_length() {
        let tuner = Tuner::new(2, 2, true);
        assert_eq!(tuner.avoided(64 << 10), Some(protocol::SIMPLE));
        assert_eq!(tuner.avoided(256 << 10), Some(protocol::LL));
        assert_eq!(Tuner::new(16, 8, true).avoided(256 << 10), Some(protocol::SIMPLE));
        assert_eq!(Tuner::new(8, 1, true).avoided(8), None, "within a host");
        assert_eq!(Tuner::new(2, 2, false).avoided(8), None, "it is off");
    }

    #[test]
    fn impossible_choices_stay_so() {
        let mut row = [-1.0, -1.0, 5.0];
        Tuner::raise(&mut row, protocol::LL);
        assert_eq!(row, [-1.0, -1.0, 5.0]);
        Tuner::raise(&mut row, protocol::SIMPLE);
        assert_eq!(row, [-1.0, -1.0, AVOIDED], "the only one is taken all the same");
    }
}
