//! The constructor's keywords as the engine's settings.

use std::{ffi::CString, net::IpAddr, time::Duration};

use pyo3::{
    exceptions::{PyUserWarning, PyValueError},
    prelude::*,
    types::PyString,
};
use uccl_p2p::{Checksum, Config, Transport};

use crate::{
    args::{Named, Positional, Signature},
    buffer, error,
};

static NEW: Signature<16> = Signature {
    function: "Endpoint",
    params: [
        &["local_gpu_idx", "gpu_index"],
        &["num_cpus"],
        &["psk"],
        &["bind"],
        &["port", "listen_port"],
        &["base_port"],
        &["timeout"],
        &["transfer_timeout"],
        &["transport"],
        &["tcp_streams"],
        &["tcp_congestion"],
        &["checksum"],
        &["cma"],
        &["ipc"],
        &["spin_us"],
        &["numa_affinity"],
    ],
    positional: 2,
};

/// The environment's settings, changed by what the caller passed.
pub(crate) fn config(args: Positional<'_, '_>, kwargs: Named<'_, '_>) -> PyResult<Config> {
    let a = NEW.bind(args, kwargs)?;
    let mut config = Config::from_env().map_err(|e| error::exception(&e))?;
    for notice in uccl_p2p::take_notices() {
        let text = CString::new(notice).unwrap_or_default();
        PyErr::warn(args.py(), &args.py().get_type::<PyUserWarning>(), &text, 1)?;
    }
    set(&mut config.gpu_index, a.opt(0)?);
    set(&mut config.num_cpus, a.opt(1)?);
    if let Some(psk) = a.get(2) {
        config.psk = Some(secret(psk)?);
    }
    if let Some(bind) = a.opt::<String>(3)? {
        let ip = bind.parse::<IpAddr>();
        config.bind = Some(ip.map_err(|e| PyValueError::new_err(format!("bind={bind:?}: {e}")))?);
    }
    config.port = a.opt(4)?.or(config.port);
    set(&mut config.base_port, a.opt(5)?);
    set(&mut config.timeout, a.seconds(6)?);
    set(&mut config.transfer_timeout, a.seconds(7)?);
    set(&mut config.transport, a.opt::<String>(8)?.map(|s| transport(&s)).transpose()?);
    set(&mut config.tcp_streams, a.opt(9)?);
    config.tcp_congestion = a.opt(10)?.or(config.tcp_congestion);
    set(&mut config.checksum, a.get(11).map(checksum).transpose()?);
    set(&mut config.cma, a.opt(12)?);
    set(&mut config.ipc, a.opt(13)?);
    set(&mut config.spin, a.opt(14)?.map(Duration::from_micros));
    set(&mut config.numa_affinity, a.opt(15)?);
    Ok(config)
}

fn set<T>(field: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *field = value;
    }
}

fn secret(value: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    match value.cast::<PyString>() {
        Ok(text) => Ok(text.to_cow()?.as_bytes().to_vec()),
        Err(_) => Ok(buffer::bytes(value)?.into_owned()),
    }
}

fn transport(name: &str) -> PyResult<Transport> {
    let known = name.to_ascii_lowercase().parse();
    known.map_err(|e: String| PyValueError::new_err(format!("transport={name:?}: {e}")))
}

fn checksum(value: &Bound<'_, PyAny>) -> PyResult<Checksum> {
    if let Ok(on) = value.extract::<bool>() {
        return Ok(if on { Checksum::On } else { Checksum::Off });
    }
    match value.extract::<String>()?.as_str() {
        "auto" => Ok(Checksum::Auto),
        "on" => Ok(Checksum::On),
        "off" => Ok(Checksum::Off),
        name => Err(PyValueError::new_err(format!("checksum={name:?}: one of auto, on, off"))),
    }
}
