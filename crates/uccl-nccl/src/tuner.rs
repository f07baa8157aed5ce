//! The tuner's functions that NCCL calls; [`Choice`] decides.

use std::{
    env,
    ffi::{c_int, c_void},
    ptr::null_mut,
};

use uccl_nccl_abi::{
    Logger, NcclResult, flags,
    tuner::{Constants, NvlDomains},
};

use crate::{
    choice::Choice,
    entry::{give, guarded, known},
    fault::Fault,
    log, process,
};

/// Variables by which users choose channels themselves.
const CHANNELS: [&str; 6] = [
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NRINGS",
    "NCCL_MAX_NRINGS",
    "NCCL_MIN_CTAS",
    "NCCL_MAX_CTAS",
];

/// The tuner of one communicator.
struct Tuner {
    /// None where NCCL decides.
    choice: Option<Choice>,
}

impl Tuner {
    /// The tuner for so many ranks on so many hosts.
    fn new(ranks: usize, nodes: usize, get: impl Fn(&str) -> Option<String>) -> Self {
        let get = |name: &str| get(name).filter(|value| !value.trim().is_empty());
        let is_on = match get("UCCL_NCCL_TUNER") {
            Some(value) => value.trim() != "0",
            // Another network may carry the data otherwise: NCCL finds a tuner by its library
            // alone.
            None => process::has_begun(),
        };
        // Within a host NCCL does not use the network.
        let is_on = is_on && nodes > 1;
        let has_channels = ranks == nodes && CHANNELS.iter().all(|name| get(name).is_none());
        Self { choice: is_on.then_some(Choice { ranks, has_channels }) }
    }
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
    let tuner = Tuner::new(ranks, nodes, |name| env::var(name).ok());
    if let Some(choice) = tuner.choice {
        let most = choice.ll_max_bytes();
        log::info(flags::TUNING, &format!("no LL above {most} bytes"));
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
        let (Some(choice), (Ok(rows), Ok(columns))) = (tuner.choice, sizes) else {
            return Ok(());
        };
        if table.is_null() || columns == 0 {
            return Ok(());
        }
        // SAFETY: the table is contiguous in spite of its type, with this many rows and columns.
        let costs = unsafe { std::slice::from_raw_parts_mut(table.cast::<f32>(), rows * columns) };
        let chosen = choice.make(bytes, costs, columns);
        // SAFETY: as above.
        unsafe { give("getCollInfo", channels, c_int::try_from(chosen).unwrap_or(0)) }
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

    fn choice(ranks: usize, nodes: usize, set: &[(&str, &str)]) -> Option<Choice> {
        let value = |asked: &str| set.iter().find(|(name, _)| *name == asked);
        Tuner::new(ranks, nodes, |asked| value(asked).map(|(_, value)| (*value).into())).choice
    }

    #[test]
    fn variables_switch_it() {
        assert_eq!(choice(2, 2, &[("UCCL_NCCL_TUNER", "0")]), None);
        let on = ("UCCL_NCCL_TUNER", "1");
        assert_eq!(choice(2, 2, &[on]), Some(Choice { ranks: 2, has_channels: true }));
        assert_eq!(choice(8, 1, &[on]), None, "within a host");
        assert_eq!(choice(16, 2, &[on]), Some(Choice { ranks: 16, has_channels: false }));
        let asked = choice(2, 2, &[on, ("NCCL_MIN_NCHANNELS", "8")]);
        assert_eq!(asked, Some(Choice { ranks: 2, has_channels: false }), "NCCL's own win");
    }

    #[test]
    fn without_the_network_it_is_off() {
        assert_eq!(choice(2, 2, &[]), None);
    }
}
