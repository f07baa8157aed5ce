//! The constructor's keywords as the engine's settings.

use std::{ffi::CString, net::IpAddr, time::Duration};

use pyo3::{
    exceptions::{PyUserWarning, PyValueError},
    prelude::*,
    types::PyString,
};
use uccl_p2p::{Checksum, Config, Transport};

use crate::{
    args::{Keywords, Positional},
    buffer, error,
    params::Param,
    signatures,
};

/// The environment's settings, changed by the caller's keywords.
pub(crate) fn config(args: Positional<'_, '_>, kwargs: Keywords<'_, '_>) -> PyResult<Config> {
    let a = signatures::NEW.bind(args, kwargs)?;
    let mut config = Config::from_env().map_err(|e| error::exception(&e))?;
    for notice in uccl_p2p::take_notices() {
        let text = CString::new(notice).unwrap_or_default();
        PyErr::warn(args.py(), &args.py().get_type::<PyUserWarning>(), &text, 1)?;
    }
    set(&mut config.gpu_index, a.opt(Param::GpuIndex)?);
    set(&mut config.num_cpus, a.opt(Param::NumCpus)?);
    if let Some(psk) = a.get(Param::Psk) {
        config.psk = Some(secret(psk)?);
    }
    if let Some(bind) = a.opt::<String>(Param::Bind)? {
        let ip = bind.parse::<IpAddr>();
        config.bind = Some(ip.map_err(|e| PyValueError::new_err(format!("bind={bind:?}: {e}")))?);
    }
    config.port = a.opt(Param::Port)?.or(config.port);
    set(&mut config.base_port, a.opt(Param::BasePort)?);
    set(&mut config.timeout, a.seconds(Param::Timeout)?);
    set(&mut config.transfer_timeout, a.seconds(Param::TransferTimeout)?);
    set(
        &mut config.transport,
        a.opt::<String>(Param::Transport)?.map(|s| transport(&s)).transpose()?,
    );
    set(&mut config.tcp_streams, a.opt(Param::TcpStreams)?);
    config.tcp_congestion = a.opt(Param::TcpCongestion)?.or(config.tcp_congestion);
    set(&mut config.checksum, a.get(Param::Checksum).map(checksum).transpose()?);
    set(&mut config.cma, a.opt(Param::Cma)?);
    set(&mut config.ipc, a.opt(Param::Ipc)?);
    set(&mut config.spin, a.opt(Param::SpinUs)?.map(Duration::from_micros));
    if let Some(devices) = a.opt::<String>(Param::RdmaDev)? {
        config.set("rdma_dev", &devices).map_err(|e| error::exception(&e))?;
    }
    set(&mut config.publish, a.opt(Param::Publish)?);
    set(&mut config.numa_affinity, a.opt(Param::NumaAffinity)?);
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
