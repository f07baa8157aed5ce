//! Arguments, by their parameters.
//!
//! A parameter has one position in a call and any number of names: programs written for different
//! releases call the same thing `ptr`, `src` or `data_ptr`.

use std::{ffi::c_ulong, time::Duration};

use pyo3::{
    exceptions::{PyTypeError, PyValueError},
    ffi,
    prelude::*,
    types::{PyDict, PyInt, PyList, PyString, PyTuple},
};

use crate::{error::CallError, params::Param};

/// The positional arguments of a Python call.
pub(crate) type Positional<'a, 'py> = &'a Bound<'py, PyTuple>;
/// The keyword arguments of a Python call.
pub(crate) type Keywords<'a, 'py> = Option<&'a Bound<'py, PyDict>>;

/// A function's parameters, in order; those from `positional` on are keyword only.
pub(crate) struct Signature<const N: usize> {
    pub(crate) function: &'static str,
    pub(crate) params: [Param; N],
    pub(crate) positional: usize,
}

/// The arguments of one call. `None` counts as not given.
pub(crate) struct Args<'py, const N: usize> {
    signature: &'static Signature<N>,
    values: [Option<Bound<'py, PyAny>>; N],
}

impl<const N: usize> Signature<N> {
    /// Assigns the arguments of a call to the parameters.
    pub(crate) fn bind<'py>(
        &'static self,
        args: Positional<'_, 'py>,
        kwargs: Keywords<'_, 'py>,
    ) -> PyResult<Args<'py, N>> {
        self.bind_from(0, args, kwargs)
    }

    /// Like `bind`, but the first positional argument is for parameter `first`.
    pub(crate) fn bind_from<'py>(
        &'static self,
        first: usize,
        args: Positional<'_, 'py>,
        kwargs: Keywords<'_, 'py>,
    ) -> PyResult<Args<'py, N>> {
        let mut values = [const { None }; N];
        if args.len() + first > self.positional {
            return Err(PyTypeError::new_err(format!(
                "{}() takes at most {} positional arguments ({} given)",
                self.function,
                self.positional - first,
                args.len()
            )));
        }
        for (slot, value) in values[first..].iter_mut().zip(args.iter_borrowed()) {
            *slot = Some(value.to_owned());
        }
        for (name, value) in kwargs.into_iter().flat_map(|k| k.iter()) {
            let name = name.cast_into::<PyString>()?;
            let name = name.to_cow()?;
            let Some(i) = self.params.iter().position(|param| param.names().contains(&&*name))
            else {
                return Err(PyTypeError::new_err(format!(
                    "{}() got an unexpected keyword argument '{name}'",
                    self.function
                )));
            };
            if values[i].replace(value).is_some() {
                return Err(PyTypeError::new_err(format!(
                    "{}() got multiple values for argument '{}'",
                    self.function,
                    self.params[i].names()[0]
                )));
            }
        }
        Ok(Args { signature: self, values })
    }

    fn position(&self, param: Param) -> Option<usize> {
        self.params.iter().position(|other| *other == param)
    }
}

impl Param {
    /// Whether a keyword argument has one of its names.
    pub(crate) fn is_named(self, kwargs: Keywords<'_, '_>) -> bool {
        let is_there = |name: &&str| kwargs.is_some_and(|k| k.contains(*name).unwrap_or(false));
        self.names().iter().any(is_there)
    }
}

impl<'py, const N: usize> Args<'py, N> {
    pub(crate) fn function(&self) -> &'static str {
        self.signature.function
    }

    /// The argument, if given.
    pub(crate) fn get(&self, param: Param) -> Option<&Bound<'py, PyAny>> {
        let value = self.values.get(self.signature.position(param)?)?;
        value.as_ref().filter(|v| !v.is_none())
    }

    /// The argument; a TypeError that names it if missing.
    pub(crate) fn need(&self, param: Param) -> PyResult<&Bound<'py, PyAny>> {
        self.get(param).ok_or_else(|| {
            PyTypeError::new_err(format!(
                "{}() missing required argument '{}'",
                self.signature.function,
                param.names()[0]
            ))
        })
    }

    /// The argument as a `T`, if given.
    pub(crate) fn opt<'a, T: FromPyObject<'a, 'py>>(&'a self, param: Param) -> PyResult<Option<T>> {
        self.get(param).map(|v| self.convert(param, v)).transpose()
    }

    /// The argument as a `T`.
    pub(crate) fn req<'a, T: FromPyObject<'a, 'py>>(&'a self, param: Param) -> PyResult<T> {
        self.convert(param, self.need(param)?)
    }

    /// The argument as an id.
    pub(crate) fn id(&self, param: Param) -> PyResult<u64> {
        let value = self.need(param)?;
        exact_int(value).map_or_else(|| self.convert(param, value), Ok)
    }

    /// The argument as a size, if given.
    pub(crate) fn size(&self, param: Param) -> PyResult<Option<usize>> {
        let Some(value) = self.get(param) else { return Ok(None) };
        match exact_int(value) {
            Some(size) => Ok(Some(size as usize)),
            None => self.convert(param, value).map(Some),
        }
    }

    /// The argument as a list of `T`.
    pub(crate) fn list<T>(
        &self,
        param: Param,
        convert: impl FnMut(&Bound<'py, PyAny>) -> PyResult<T>,
    ) -> PyResult<Vec<T>> {
        self.name_error(param, list(self.need(param)?, convert))
    }

    /// Seconds as a duration, if given. Infinity is `Duration::ZERO`, which waits for ever.
    pub(crate) fn seconds(&self, param: Param) -> PyResult<Option<Duration>> {
        self.opt::<f64>(param)?.map(seconds).transpose()
    }

    fn convert<'a, T: FromPyObject<'a, 'py>>(
        &self,
        param: Param,
        value: &'a Bound<'py, PyAny>,
    ) -> PyResult<T> {
        self.name_error(param, value.extract::<T>().map_err(Into::into))
    }

    /// The result of `make` for the argument.
    pub(crate) fn with<T>(
        &self,
        param: Param,
        make: impl FnOnce(&Bound<'py, PyAny>) -> PyResult<T>,
    ) -> PyResult<T> {
        self.name_error(param, make(self.need(param)?))
    }

    /// The result; a TypeError names its argument.
    pub(crate) fn named<T>(
        &self,
        param: Param,
        result: Result<T, CallError>,
    ) -> Result<T, CallError> {
        result.map_err(|stop| match stop {
            CallError::Raise(e) => CallError::Raise(self.name(param, e)),
            refused => refused,
        })
    }

    fn name_error<T>(&self, param: Param, result: PyResult<T>) -> PyResult<T> {
        result.map_err(|e| self.name(param, e))
    }

    /// Adds the name of the argument to a TypeError.
    fn name(&self, param: Param, e: PyErr) -> PyErr {
        match self.get(param).map(|v| v.py()) {
            Some(py) if e.get_type(py).is(py.get_type::<PyTypeError>()) => {
                PyTypeError::new_err(format!(
                    "{}() argument '{}': {}",
                    self.signature.function,
                    param.names()[0],
                    e.value(py)
                ))
            }
            _ => e,
        }
    }
}

/// Converts each item of a list, tuple or other iterable.
pub(crate) fn list<'py, T>(
    items: &Bound<'py, PyAny>,
    mut convert: impl FnMut(&Bound<'py, PyAny>) -> PyResult<T>,
) -> PyResult<Vec<T>> {
    if let Ok(items) = items.cast::<PyList>() {
        return items.iter().map(|item| convert(&item)).collect();
    }
    if let Ok(items) = items.cast::<PyTuple>() {
        return items.iter_borrowed().map(|item| convert(&item)).collect();
    }
    items.try_iter()?.map(|item| convert(&item?)).collect()
}

/// Seconds as a duration; infinity is `Duration::ZERO`, which waits for ever.
pub(crate) fn seconds(seconds: f64) -> PyResult<Duration> {
    if seconds == f64::INFINITY {
        return Ok(Duration::ZERO);
    }
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| PyValueError::new_err(format!("a timeout of {seconds} s makes no sense")))
}

/// The value of an exact `int` that is neither negative nor too large.
pub(crate) fn exact_int(value: &Bound<'_, PyAny>) -> Option<u64> {
    // SAFETY: a live object, and the GIL is held; an exact int has no method of its own that could
    // run.
    unsafe {
        if ffi::PyLong_CheckExact(value.as_ptr()) == 0 {
            return None;
        }
        // Several times as fast as PyLong_AsUnsignedLongLong, before Python 3.13, and as wide on
        // Linux.
        let number = ffi::PyLong_AsUnsignedLong(value.as_ptr());
        if number == c_ulong::MAX && !ffi::PyErr_Occurred().is_null() {
            // The conversion of other objects reports the error.
            ffi::PyErr_Clear();
            return None;
        }
        Some(number)
    }
}

/// The value of an integer: an `int`, or anything with `__index__` that is no sequence (a NumPy
/// integer, but not an array of one).
pub(crate) fn integer(value: &Bound<'_, PyAny>) -> Option<PyResult<usize>> {
    if let Some(number) = exact_int(value) {
        return Some(Ok(number as usize));
    }
    if value.is_instance_of::<PyInt>() {
        return Some(value.extract());
    }
    let py = value.py();
    let has = |name| value.hasattr(name).unwrap_or(false);
    (has(pyo3::intern!(py, "__index__"))
        && !has(pyo3::intern!(py, "__len__"))
        && !has(pyo3::intern!(py, "data_ptr")))
    .then(|| value.extract())
}
