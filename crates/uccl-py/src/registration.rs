//! `reg`, `regv` and `dereg`.

use pyo3::prelude::*;
use uccl_p2p::{Error, MrId};

use crate::{
    args::{Keywords, Positional},
    column::same_length,
    endpoint::PyEndpoint,
    error::CallError,
    memory::Memory,
    params::Param,
    regions::register,
    reuse::{EndingRegion, RemainingUsers, region_of},
    signatures,
};

/// Registers memory and keeps its owner.
fn add(ep: &PyEndpoint, py: Python<'_>, memory: Memory, len: usize) -> Result<MrId, CallError> {
    memory.fits(len)?;
    let (core, ptr) = (&ep.core, memory.addr);
    let mr = py.detach(|| register(core, ptr, len))?;
    ep.regions.keep(mr, memory.owner);
    Ok(mr)
}

/// `reg(ptr, size, floatType)`.
pub(crate) fn reg(
    ep: &PyEndpoint,
    py: Python<'_>,
    args: Positional<'_, '_>,
    kwargs: Keywords<'_, '_>,
) -> Result<u64, CallError> {
    let a = signatures::REG.bind(args, kwargs)?;
    let memory = Memory::of(a.need(Param::Ptr)?)?;
    let len = memory.sized(a.opt(Param::Size)?)?;
    Ok(add(ep, py, memory, len)?.0)
}

/// `regv(ptrs, sizes)`: all or none.
pub(crate) fn regv(
    ep: &PyEndpoint,
    py: Python<'_>,
    args: Positional<'_, '_>,
    kwargs: Keywords<'_, '_>,
) -> Result<Vec<u64>, CallError> {
    let a = signatures::REGV.bind(args, kwargs)?;
    let memories = a.list(Param::Ptrs, Memory::of)?;
    let sizes = match a.get(Param::Sizes) {
        Some(_) => a.list(Param::Sizes, |size| size.extract())?,
        None => vec![None; memories.len()],
    };
    same_length("regv", memories.len(), sizes.len())?;
    add_all(ep, py, memories, sizes)
}

/// Registers all, or none.
fn add_all(
    ep: &PyEndpoint,
    py: Python<'_>,
    memories: Vec<Memory>,
    sizes: Vec<Option<usize>>,
) -> Result<Vec<u64>, CallError> {
    let mut mrs = Vec::with_capacity(memories.len());
    for (memory, size) in memories.into_iter().zip(sizes) {
        let added =
            memory.sized(size).map_err(CallError::from).and_then(|len| add(ep, py, memory, len));
        match added {
            Ok(mr) => mrs.push(mr.0),
            Err(stop) => {
                for mr in mrs {
                    // The regions are new, so their end cannot fail.
                    let _ = remove(ep, py, mr);
                }
                return Err(stop);
            }
        }
    }
    Ok(mrs)
}

/// Ends one use of a region, and with the last use the region.
pub(crate) fn remove(ep: &PyEndpoint, py: Python<'_>, number: u64) -> Result<(), Error> {
    match ep.reuse.leave(number) {
        RemainingUsers::Others => Ok(()),
        RemainingUsers::Nobody => Err(Error::UnknownRegion(MrId(number))),
        RemainingUsers::Last(ending) => end(ep, py, region_of(number), ending),
    }
}

/// Ends a region that is not shared any more.
fn end(
    ep: &PyEndpoint,
    py: Python<'_>,
    mr: MrId,
    ending: Option<EndingRegion>,
) -> Result<(), Error> {
    let core = &ep.core;
    let ended = py.detach(|| core.deregister(mr));
    if ended.is_ok() {
        drop(ep.regions.forget(mr));
    } else if let Some(ending) = ending.filter(|_| core.region(mr).is_ok()) {
        ep.reuse.put_back(ending);
    }
    ended
}

/// Ends regions and frees their objects. Regions that a peer may still touch are kept, and the
/// first of their errors is returned.
pub(crate) fn deregister(ep: &PyEndpoint, py: Python<'_>, mrs: Vec<MrId>) -> Result<(), Error> {
    if mrs.is_empty() {
        return Ok(());
    }
    let mut ended = Ok(());
    let gone = py.detach(|| {
        let end = |mr: &MrId| match ep.core.deregister(*mr) {
            // A close of the endpoint has ended it.
            Ok(()) | Err(Error::UnknownRegion(_)) => true,
            Err(e) => {
                ended = std::mem::replace(&mut ended, Ok(())).and(Err(e));
                false
            }
        };
        mrs.into_iter().filter(end).collect::<Vec<_>>()
    });
    gone.into_iter().for_each(|mr| drop(ep.regions.forget(mr)));
    ended
}
