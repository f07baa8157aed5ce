//! How failures reach Python: `False` with a reason to ask for, or an exception.

use std::{cell::RefCell, fmt::Display};

use pyo3::{
    exceptions::{PyOSError, PyRuntimeError, PyValueError},
    prelude::*,
};
use uccl_p2p::Error;

thread_local! {
    static LAST: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Why the last call that failed on this thread did, if one has.
pub(crate) fn last() -> Option<String> {
    LAST.with_borrow(Clone::clone)
}

/// Remembers a reason, and returns what the call returns for it.
pub(crate) fn refuse<T>(reason: impl Display, answer: T) -> T {
    LAST.set(Some(reason.to_string()));
    answer
}

/// The value, or `answer` with the reason remembered.
pub(crate) fn or_refuse<T, E: Display>(result: Result<T, E>, answer: T) -> T {
    result.unwrap_or_else(|e| refuse(e, answer))
}

/// Whether it went well; if not, the reason is remembered.
pub(crate) fn ok<T, E: Display>(result: Result<T, E>) -> bool {
    result.map_or_else(|e| refuse(e, false), |_| true)
}

/// An exception, for calls that have no way to return a failure.
pub(crate) fn exception(error: &Error) -> PyErr {
    match error {
        Error::Os { source, .. } => match source.raw_os_error() {
            Some(code) => PyOSError::new_err((code, error.to_string())),
            None => PyOSError::new_err(error.to_string()),
        },
        Error::Config { .. } | Error::Invalid(_) => PyValueError::new_err(error.to_string()),
        _ => PyRuntimeError::new_err(error.to_string()),
    }
}

/// Why a call ends early.
pub(crate) enum Stop {
    /// With an exception: the arguments make no sense.
    Raise(PyErr),
    /// With a failure answer: the engine, or this module in its place, will not.
    Refuse(String),
}

impl Stop {
    /// A failure answer.
    pub(crate) fn refuse(reason: impl Display) -> Self {
        Self::Refuse(reason.to_string())
    }

    /// What upstream's API throws for lists that do not match, malformed descriptors and the like.
    pub(crate) fn runtime(message: impl Into<String>) -> Self {
        Self::Raise(PyRuntimeError::new_err(message.into()))
    }
}

impl From<PyErr> for Stop {
    fn from(e: PyErr) -> Self {
        Self::Raise(e)
    }
}

impl From<Error> for Stop {
    fn from(e: Error) -> Self {
        Self::refuse(e)
    }
}

/// What the call returns: its value, or `answer` with the reason remembered, or an exception.
pub(crate) fn settle<T>(result: Result<T, Stop>, answer: T) -> PyResult<T> {
    match result {
        Ok(value) => Ok(value),
        Err(Stop::Refuse(reason)) => Ok(refuse(reason, answer)),
        Err(Stop::Raise(e)) => Err(e),
    }
}
