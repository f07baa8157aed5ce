//! Failures in Python: `False` with a remembered reason, or an exception.

use std::{cell::RefCell, fmt::Display};

use pyo3::{
    exceptions::{PyOSError, PyRuntimeError, PyValueError},
    prelude::*,
};
use uccl_p2p::{Error, Status};

thread_local! {
    static LAST: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// The reason of the last failed call on this thread, if there is one.
pub(crate) fn last() -> Option<String> {
    LAST.with_borrow(Clone::clone)
}

/// Remembers a reason, and returns the call's failure value.
pub(crate) fn refuse<T>(reason: impl Display, answer: T) -> T {
    LAST.set(Some(reason.to_string()));
    answer
}

/// `(ok, is_done)` of a transfer's state. A failure is noted for `last_error()`.
pub(crate) fn state(status: Result<Status, Error>) -> (bool, bool) {
    match status {
        Ok(Status::Pending) => (true, false),
        Ok(Status::Done(_)) => (true, true),
        Ok(Status::Failed(e)) | Err(e) => refuse(e, (false, true)),
    }
}

/// The value, or `answer` with the reason remembered.
pub(crate) fn or_refuse<T, E: Display>(result: Result<T, E>, answer: T) -> T {
    result.unwrap_or_else(|e| refuse(e, answer))
}

/// Whether the result is a success; if not, the reason is remembered.
pub(crate) fn ok<T, E: Display>(result: Result<T, E>) -> bool {
    result.map_or_else(|e| refuse(e, false), |_| true)
}

/// An exception, for calls without a failure value.
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

/// The reason why a call ends early.
pub(crate) enum CallError {
    /// An exception: the arguments are invalid.
    Raise(PyErr),
    /// A failure value: the engine refuses, or this module in its place.
    Refuse(String),
}

impl CallError {
    /// A failure value.
    pub(crate) fn refuse(reason: impl Display) -> Self {
        Self::Refuse(reason.to_string())
    }

    /// The exception of upstream's API for lists that do not match, malformed descriptors and the
    /// like.
    pub(crate) fn runtime(message: impl Into<String>) -> Self {
        Self::Raise(PyRuntimeError::new_err(message.into()))
    }
}

impl From<PyErr> for CallError {
    fn from(e: PyErr) -> Self {
        Self::Raise(e)
    }
}

impl From<Error> for CallError {
    fn from(e: Error) -> Self {
        Self::refuse(e)
    }
}

/// The result of a call: its value, or `answer` with the reason remembered, or an exception.
pub(crate) fn settle<T>(result: Result<T, CallError>, answer: T) -> PyResult<T> {
    match result {
        Ok(value) => Ok(value),
        Err(CallError::Refuse(reason)) => Ok(refuse(reason, answer)),
        Err(CallError::Raise(e)) => Err(e),
    }
}
