//! Registration, and what keeps registered objects allocated.

use std::{
    collections::HashMap,
    sync::atomic::{AtomicUsize, Ordering},
};

use parking_lot::Mutex;
use pyo3::prelude::*;
use uccl_p2p::{Endpoint, Iov, MrId};

use crate::{
    args::{self, Named, Positional, Signature},
    call::{self, PTR, PTR_V, SIZE, SIZE_V},
    endpoint::PyEndpoint,
    error::Stop,
    memory::{Memory, Owner},
    reuse::Ending,
};

static REG: Signature<3> =
    Signature { function: "reg", params: [PTR, SIZE, &["floatType", "float_type"]], positional: 3 };
static REGV: Signature<2> = Signature { function: "regv", params: [PTR_V, SIZE_V], positional: 2 };

/// The objects whose memory is registered.
#[derive(Default)]
pub(crate) struct Regions {
    owners: Mutex<HashMap<u64, Vec<Owner>>>,
    readonly: AtomicUsize,
}

impl Regions {
    /// Whether the region was registered from a read-only buffer.
    pub(crate) fn is_readonly(&self, mr: u64) -> bool {
        self.readonly.load(Ordering::Acquire) != 0 && is_readonly(self.owners.lock().get(&mr))
    }

    /// A region among these pieces' that was registered from a read-only buffer.
    pub(crate) fn readonly_of(&self, iovs: &[Iov]) -> Option<MrId> {
        if self.readonly.load(Ordering::Acquire) == 0 {
            return None;
        }
        let owners = self.owners.lock();
        iovs.iter().map(|iov| iov.mr).find(|mr| is_readonly(owners.get(&mr.0)))
    }

    /// Keeps one more owner of a region's memory.
    pub(crate) fn keep(&self, mr: MrId, owner: Option<Owner>) {
        let Some(owner) = owner else { return };
        if owner.readonly {
            self.readonly.fetch_add(1, Ordering::AcqRel);
        }
        self.owners.lock().entry(mr.0).or_default().push(owner);
    }

    /// What kept the region's memory. Dropping it may run Python code, so that is for the caller, who
    /// holds no lock.
    pub(crate) fn forget(&self, mr: MrId) -> Option<Vec<Owner>> {
        let owners = self.owners.lock().remove(&mr.0)?;
        let readonly = owners.iter().filter(|owner| owner.readonly).count();
        self.readonly.fetch_sub(readonly, Ordering::AcqRel);
        Some(owners)
    }

    /// Lets go of everything but what these regions lie in: the others have ended.
    pub(crate) fn clear(&self, but: &[MrId]) {
        let mut owners = self.owners.lock();
        let ended: Vec<_> = owners.extract_if(|mr, _| !but.contains(&MrId(*mr))).collect();
        let readonly = owners.values().flatten().filter(|owner| owner.readonly).count();
        self.readonly.store(readonly, Ordering::Release);
        drop(owners);
        // It may run Python code, which finds nothing locked.
        drop(ended);
    }

    /// Never lets go of what these regions lie in.
    pub(crate) fn leak(&self, of: &[MrId]) {
        let mut owners = self.owners.lock();
        of.iter().for_each(|mr| std::mem::forget(owners.remove(&mr.0)));
    }
}

fn is_readonly(owners: Option<&Vec<Owner>>) -> bool {
    owners.is_some_and(|owners| owners.iter().any(|owner| owner.readonly))
}

/// Registers `len` bytes at `ptr`.
pub(crate) fn register(core: &Endpoint, ptr: usize, len: usize) -> Result<MrId, uccl_p2p::Error> {
    // SAFETY: the memory stays allocated until the region is deregistered: an object's because its
    // owner is kept until then, and an address's because that is what reg()'s documentation asks of
    // its caller.
    unsafe { core.register(ptr, len) }
}

/// Registers memory and keeps its owner.
pub(crate) fn add(
    ep: &PyEndpoint,
    py: Python<'_>,
    memory: Memory,
    len: usize,
) -> Result<MrId, Stop> {
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
    kwargs: Named<'_, '_>,
) -> Result<u64, Stop> {
    let a = REG.bind(args, kwargs)?;
    let memory = Memory::of(a.need(0)?)?;
    let len = memory.sized(a.opt(1)?)?;
    Ok(add(ep, py, memory, len)?.0)
}

/// `regv(ptrs, sizes)`: all or none.
pub(crate) fn regv(
    ep: &PyEndpoint,
    py: Python<'_>,
    args: Positional<'_, '_>,
    kwargs: Named<'_, '_>,
) -> Result<Vec<u64>, Stop> {
    let a = REGV.bind(args, kwargs)?;
    let memories = a.list(0, Memory::of)?;
    let sizes = match a.get(1) {
        Some(_) => a.list(1, |size| size.extract())?,
        None => vec![None; memories.len()],
    };
    call::same_length("regv", memories.len(), sizes.len())?;
    add_all(ep, py, memories, sizes)
}

/// Registers all, or none.
fn add_all(
    ep: &PyEndpoint,
    py: Python<'_>,
    memories: Vec<Memory>,
    sizes: Vec<Option<usize>>,
) -> Result<Vec<u64>, Stop> {
    let mut mrs = Vec::with_capacity(memories.len());
    for (memory, size) in memories.into_iter().zip(sizes) {
        let added = memory.sized(size).map_err(Stop::from).and_then(|len| add(ep, py, memory, len));
        match added {
            Ok(mr) => mrs.push(mr.0),
            Err(stop) => {
                for mr in mrs {
                    // The regions were made just now; nothing but success can come of this.
                    let _ = remove(ep, py, MrId(mr));
                }
                return Err(stop);
            }
        }
    }
    Ok(mrs)
}

/// Ends a region, whoever shares it, and lets go of its owners.
pub(crate) fn remove(ep: &PyEndpoint, py: Python<'_>, mr: MrId) -> Result<(), uccl_p2p::Error> {
    end(ep, py, mr, ep.reuse.take(mr))
}

/// Ends a region that is not shared any more.
pub(crate) fn end(
    ep: &PyEndpoint,
    py: Python<'_>,
    mr: MrId,
    ending: Option<Ending>,
) -> Result<(), uccl_p2p::Error> {
    let core = &ep.core;
    let ended = py.detach(|| core.deregister(mr));
    if ended.is_ok() {
        drop(ep.regions.forget(mr));
    } else if let Some(ending) = ending.filter(|_| core.region(mr).is_ok()) {
        ep.reuse.put_back(ending);
    }
    ended
}

/// `deregister_memory(descs)`'s region ids.
pub(crate) fn ids(descs: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    args::list(descs, |desc| desc.getattr("mr_id")?.extract())
}
