//! `Endpoint`: the engine, and the objects that are kept for it.

use pyo3::prelude::*;
use uccl_p2p::{Endpoint, Error, MrId};
use uccl_wire::{
    advert::Advert,
    ipc_info::{IPC_INFO_LEN, IpcInfo},
};

use crate::{
    advertised::AdvertisedObjects, implicit::ImplicitRegions, peers::Peers, regions::Regions,
    reuse::Reuse,
};

#[doc = signature!(NEW)]
/// One process's engine for one GPU (or none).
///
/// Calls of UCCL's API return `False`, or a tuple that starts with it, when they fail;
/// `last_error()` then returns the reason.
#[pyclass(name = "Endpoint", module = "uccl._core", subclass, frozen, weakref)]
pub(crate) struct PyEndpoint {
    pub(crate) core: Endpoint,
    pub(crate) regions: Regions,
    pub(crate) reuse: Reuse,
    pub(crate) peers: Peers,
    pub(crate) implicit: ImplicitRegions,
    pub(crate) advertised: AdvertisedObjects,
}

impl PyEndpoint {
    /// The IPC info of an advert, for `advertise_ipc` and descriptors.
    pub(crate) fn ipc_info(&self, advert: &Advert) -> [u8; IPC_INFO_LEN] {
        let gpu = i32::try_from(self.core.config().gpu_index).unwrap_or(-1);
        IpcInfo::of_host(advert, gpu).encode()
    }

    /// Closes the engine. Frees the objects that were kept for it, except memory that peers may
    /// still touch.
    pub(crate) fn shut(&self, py: Python<'_>) -> Result<(), Error> {
        let core = &self.core;
        let closed = py.detach(|| core.close());
        match &closed {
            Ok(()) => {
                self.reuse.clear();
                self.regions.clear(&[]);
            }
            Err(e) => self.regions.clear(still_touched(e)),
        }
        closed
    }
}

impl Drop for PyEndpoint {
    fn drop(&mut self) {
        // With an interpreter, other threads may run meanwhile. The workers never take the GIL.
        let core = &self.core;
        let closed = Python::try_attach(|py| py.detach(|| core.close()));
        if let Err(e) = closed.unwrap_or_else(|| core.close()) {
            // Memory that peers may still touch is never freed.
            self.regions.leak(still_touched(&e));
        }
    }
}

/// The regions that peers may still touch.
fn still_touched(e: &Error) -> &[MrId] {
    match e {
        Error::StillTouched { regions, .. } => regions,
        _ => &[],
    }
}
