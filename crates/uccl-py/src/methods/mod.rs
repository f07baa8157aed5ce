//! `Endpoint`'s methods: each is a line or two over the module that implements it.

mod by_address;
mod connections;
mod lifecycle;
mod memory;
mod messages;
mod transfers;

use std::time::Duration;

use pyo3::{
    prelude::*,
    types::{PyDict, PyTuple},
};

use crate::args;

// PyO3 wants to see the `Option` of keyword arguments itself.
type Args<'a, 'py> = &'a Bound<'py, PyTuple>;
type Kwargs<'a, 'py> = &'a Bound<'py, PyDict>;

/// Converts a timeout: zero checks once, None (or infinity) waits for ever.
pub(crate) fn wait_timeout(timeout: Option<f64>) -> PyResult<Option<Duration>> {
    match timeout {
        None | Some(f64::INFINITY) => Ok(None),
        Some(timeout) => args::seconds(timeout).map(Some),
    }
}
