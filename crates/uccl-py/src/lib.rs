//! The Python extension module `uccl._core`: the engine under UCCL's names.
//!
//! It translates arguments and results. `uccl-p2p`, `uccl-collective` and `uccl-ep` implement the
//! calls, and `uccl-wire` the layout of bytes.

// Their macros are used below.
#[macro_use]
mod params;
#[macro_use]
mod signatures;

mod advertise;
mod advertise_ipc;
mod advertised;
mod args;
mod buffer;
mod by_address;
mod call;
mod collective;
mod column;
mod config;
mod descs;
mod endpoint;
mod ep;
mod ep_settings;
mod error;
mod implicit;
mod interrupt;
mod ipc;
mod json;
mod memory;
mod meta;
mod methods;
mod nixl;
mod peers;
mod prepared;
mod regions;
mod registration;
mod reuse;
mod shared;
mod signal;
mod stream;
mod weights;

use pyo3::prelude::*;

/// The reason of the last failed call on this thread; None if none has failed.
#[pyfunction]
fn last_error() -> Option<String> {
    error::last()
}

/// The address of this host that an endpoint for this GPU advertises to its peers.
#[pyfunction]
#[pyo3(signature = (local_gpu_idx=None))]
fn get_oob_ip(py: Python<'_>, local_gpu_idx: Option<u32>) -> PyResult<String> {
    peers::oob_ip(py, local_gpu_idx).map(|ip| ip.to_string()).map_err(|e| error::exception(&e))
}

#[pymodule]
fn _core(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<endpoint::PyEndpoint>()?;
    m.add_class::<descs::PyXferDesc>()?;
    m.add_class::<descs::PyXferHandle>()?;
    m.add_class::<shared::PySharedMemory>()?;
    m.add_class::<by_address::PyAddressTransfer>()?;
    m.add_class::<prepared::PyPreparedTransfer>()?;
    m.add_class::<ep::PyNodes>()?;
    m.add_class::<ep::PyGroup>()?;
    m.add_class::<ep::PyRouting>()?;
    m.add_class::<ep::PyBlock>()?;
    m.add_class::<ep::PyDispatch>()?;
    m.add_class::<ep::PyReceiveCounts>()?;
    m.add_class::<ep::PyHandle>()?;
    m.add_class::<ep::PyCombine>()?;
    m.add_class::<ep::PyCudaGroup>()?;
    m.add_class::<ep::PyPoolHold>()?;
    m.add_class::<ep::PyLowLatencyDispatch>()?;
    m.add_class::<ep::PyLowLatencyHandle>()?;
    m.add_class::<ep::PyLowLatencyCombine>()?;
    m.add_class::<ep::PyLowLatencyWorkspace>()?;
    m.add_class::<ep::PyLayoutWorkspace>()?;
    m.add_class::<ep::PyDispatchLayout>()?;
    m.add_class::<ep::PyNormalHandle>()?;
    m.add_class::<ep::PyDispatchPlan>()?;
    m.add_class::<ep::PyDispatchResult>()?;
    m.add_class::<ep::PyRowLayout>()?;
    m.add_class::<ep::PyWorkspaceLayout>()?;
    m.add_class::<ep::PyZeroCopyView>()?;
    m.add_class::<ep::PyNormalCombine>()?;
    m.add_class::<ep_settings::PySettings>()?;
    m.add_class::<collective::PyRankGroup>()?;
    m.add_class::<collective::PyRankWork>()?;
    m.add_class::<weights::PyPublisher>()?;
    m.add_class::<weights::PyReader>()?;
    m.add_function(wrap_pyfunction!(collective::rank_card, m)?)?;
    m.add_function(wrap_pyfunction!(weights::weights_area, m)?)?;
    m.add_function(wrap_pyfunction!(weights::weights_plan, m)?)?;
    m.add_function(wrap_pyfunction!(ep_settings::ep_settings, m)?)?;
    m.add_function(wrap_pyfunction!(ep::dispatch_len, m)?)?;
    m.add_function(wrap_pyfunction!(ep::row_place_len, m)?)?;
    m.add_function(wrap_pyfunction!(ep::row_slots, m)?)?;
    m.add_function(wrap_pyfunction!(ep::node, m)?)?;
    m.add_function(wrap_pyfunction!(ep::nodes, m)?)?;
    m.add_function(wrap_pyfunction!(ep::cuda_combine_scratch_len, m)?)?;
    m.add_function(wrap_pyfunction!(ep::cuda_layout, m)?)?;
    m.add_function(wrap_pyfunction!(ep::cuda_origin_rank, m)?)?;
    m.add_function(wrap_pyfunction!(last_error, m)?)?;
    m.add_function(wrap_pyfunction!(get_oob_ip, m)?)?;
    m.add_function(wrap_pyfunction!(nixl::_nixl_plugin_dir, m)?)?;
    m.add("__version__", env!("CARGO_PKG_VERSION"))
}
