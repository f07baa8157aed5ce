//! The settings of expert parallelism, for `uccl.ep`.

use pyo3::{exceptions::PyValueError, prelude::*};
use uccl_ep::settings::Settings;

/// The settings of a buffer of expert parallelism.
#[pyclass(name = "EpSettings", module = "uccl._core", frozen, get_all)]
pub(crate) struct PySettings {
    /// The device: "cpu", "cuda" or "cuda:1"; None if the environment names none.
    device: Option<String>,
    /// The number of this rank's node; None if the environment has none.
    node: Option<u64>,
    /// Multiprocessors that launches leave to other kernels.
    reserved_sms: u32,
    /// Seconds that a call waits for its peers.
    timeout: f64,
    /// Tokens of each rank for which a size hint has room.
    tokens_at_once: usize,
}

/// The settings that the environment has now. A ValueError says the variable that is not
/// understood, its value, and the allowed values.
#[pyfunction]
pub(crate) fn ep_settings() -> PyResult<PySettings> {
    let settings = Settings::from_env().map_err(|e| PyValueError::new_err(e.to_string()))?;
    Ok(PySettings {
        device: settings.device.map(|device| device.to_string()),
        node: settings.node,
        reserved_sms: settings.reserved_sms,
        timeout: settings.timeout.as_secs_f64(),
        tokens_at_once: settings.tokens_at_once,
    })
}
