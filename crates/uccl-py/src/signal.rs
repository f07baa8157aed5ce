//! Signals of writes, and waits for the words that they change.

use std::time::Duration;

use pyo3::{
    exceptions::{PyTypeError, PyValueError},
    prelude::*,
    types::PyTuple,
};
use uccl_p2p::{Change, ConnId, Endpoint, Error, MrId, Signal, Until};

use crate::{
    args::Args, error::CallError, interrupt::waiting, memory::Memory, meta, params::Param,
    reuse::region_of,
};

/// `signal=(meta, value, "set" or "add")` and `strong=`, if the caller gave one.
pub(crate) fn of<const N: usize>(args: &Args<'_, N>) -> Result<Option<Signal>, CallError> {
    let strong = args.opt(Param::Strong)?.unwrap_or(false);
    let Some(signal) = args.get(Param::Signal) else { return Ok(None) };
    let of_three = || {
        let text = "a signal is (what advertise returned, value, 'set' or 'add')";
        PyTypeError::new_err(text)
    };
    let parts = signal.cast::<PyTuple>().map_err(|_| of_three())?;
    if parts.len() != 3 {
        return Err(of_three().into());
    }
    let advert = meta::advert(&parts.get_item(0)?)?;
    let value = value_of(&parts.get_item(1)?)?;
    let change = match parts.get_item(2)?.extract::<String>()?.as_str() {
        "set" => Change::Set(value),
        "add" => Change::Add(value),
        other => {
            let text = format!("a signal is to 'set' or to 'add', not to {other:?}");
            return Err(PyValueError::new_err(text).into());
        }
    };
    Ok(Some(Signal { advert, change, strong }))
}

/// A word's value; negative numbers are taken as two's complement.
fn value_of(value: &Bound<'_, PyAny>) -> PyResult<u64> {
    match value.extract::<u64>() {
        Ok(value) => Ok(value),
        Err(e) => value.extract::<i64>().map(i64::cast_unsigned).map_err(|_| e),
    }
}

/// A word of this endpoint's memory: its region and its address.
pub(crate) struct SignalWord {
    pub(crate) mr: MrId,
    pub(crate) ptr: usize,
}

impl SignalWord {
    /// The word at an address, or at the start of an object; in the named region, or in the one
    /// that contains it.
    pub(crate) fn of(
        core: &Endpoint,
        ptr: &Bound<'_, PyAny>,
        mr: Option<u64>,
    ) -> Result<Self, CallError> {
        let ptr = Memory::of(ptr)?.addr;
        let mr = mr.map(region_of).or_else(|| core.region_holding(ptr, size_of::<u64>()));
        let unknown =
            || CallError::refuse(format!("no registered memory holds a word at {ptr:#x}"));
        Ok(Self { mr: mr.ok_or_else(unknown)?, ptr })
    }

    /// Waits until the word fulfils `until`. Returns its value, or `None` after the timeout. Fails
    /// if `conn`, the connection to the peer that changes the word, is lost before.
    pub(crate) fn wait(
        &self,
        core: &Endpoint,
        py: Python<'_>,
        conn: Option<ConnId>,
        until: Until,
        timeout: Option<Duration>,
    ) -> Result<Option<u64>, CallError> {
        let waited = waiting(py, core, |core, interrupt| match conn {
            Some(conn) => core.wait_word_from(conn, (self.mr, self.ptr), until, timeout, interrupt),
            None => core.wait_word(self.mr, self.ptr, until, timeout, interrupt),
        })?;
        match waited {
            Err(Error::Timeout(_)) => Ok(None),
            value => Ok(Some(value?)),
        }
    }
}
