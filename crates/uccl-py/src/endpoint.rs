//! `Endpoint`: the engine, and what is kept for it until it ends.

use pyo3::prelude::*;
use uccl_p2p::{Endpoint, Error, MrId};
use uccl_wire::{
    advert::Advert,
    ipc_info::{IPC_INFO_LEN, IpcInfo},
};

use crate::{
    advertised::Advertised, implicit::Implicit, peers::Peers, regions::Regions, reuse::Reuse,
};

/// One process's engine for one GPU (or none).
///
/// Calls that UCCL's API has return `False`, or a tuple that starts with it, when they fail;
/// `last_error()` then tells why.
#[pyclass(name = "Endpoint", module = "uccl._core", subclass, frozen, weakref)]
pub(crate) struct PyEndpoint {
    pub(crate) core: Endpoint,
    pub(crate) regions: Regions,
    pub(crate) reuse: Reuse,
    pub(crate) peers: Peers,
    pub(crate) implicit: Implicit,
    pub(crate) advertised: Advertised,
}

impl PyEndpoint {
    /// What `advertise_ipc` and descriptors carry of an advert.
    pub(crate) fn ipc_info(&self, advert: &Advert) -> [u8; IPC_INFO_LEN] {
        let gpu = i32::try_from(self.core.config().gpu_index).unwrap_or(-1);
        IpcInfo::of_host(advert, gpu).encode()
    }

    /// Ends everything; what this module kept for the engine is let go, but for what peers may still touch.
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
        // Where there is an interpreter, others may run meanwhile. The workers never take the GIL.
        let core = &self.core;
        let closed = Python::try_attach(|py| py.detach(|| core.close()));
        if let Err(e) = closed.unwrap_or_else(|| core.close()) {
            // What peers may still touch stays allocated for good.
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
