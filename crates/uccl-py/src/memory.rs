//! Objects that callers may pass as a pointer.

use pyo3::{
    exceptions::{PyTypeError, PyValueError},
    prelude::*,
    types::PyDict,
};

use crate::{args, buffer::BufferView, error::CallError};

/// Memory that a caller named: an address, or an object that has one.
pub(crate) struct Memory {
    /// The start address.
    pub(crate) addr: usize,
    /// The object's length in bytes; an address has none.
    pub(crate) len: Option<usize>,
    /// The owner that keeps the memory allocated, if one is known.
    pub(crate) owner: Option<Owner>,
}

/// An owner that keeps memory allocated.
pub(crate) struct Owner {
    kept: OwnerRef,
    /// Whether the memory may only be read.
    pub(crate) readonly: bool,
}

enum OwnerRef {
    View(BufferView),
    Object(Py<PyAny>),
}

impl Owner {
    /// An object that keeps writable memory allocated.
    pub(crate) fn of(object: Bound<'_, PyAny>) -> Self {
        Self { kept: OwnerRef::Object(object.unbind()), readonly: false }
    }

    /// The object itself, if there is one.
    pub(crate) fn object<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        match &self.kept {
            OwnerRef::View(view) => view.object(py),
            OwnerRef::Object(object) => Some(object.bind(py).clone()),
        }
    }
}

impl Memory {
    /// An integer, or an object with the buffer protocol, `data_ptr()` or `__array_interface__`.
    pub(crate) fn of(value: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Some(addr) = args::integer(value) {
            return Ok(Self { addr: addr?, len: None, owner: None });
        }
        match BufferView::of(value) {
            Ok(Some(view)) => return Ok(Self::of_view(view)),
            Ok(None) => {}
            // NumPy exports no buffer for some types (datetime64), but has their address.
            Err(_) if is_contiguous_array(value) => {}
            Err(e) => return Err(e),
        }
        let py = value.py();
        if value.hasattr(pyo3::intern!(py, "data_ptr"))? {
            return Self::of_tensor(value);
        }
        if let Ok(interface) = value.getattr(pyo3::intern!(py, "__array_interface__")) {
            return Self::of_array(value, &interface.cast_into::<PyDict>()?);
        }
        Err(PyTypeError::new_err(format!(
            "a pointer is an int, or an object with the buffer protocol, data_ptr() or __array_interface__; not {}",
            value.get_type().name()?
        )))
    }

    /// Whether the memory is known to be read-only.
    pub(crate) fn is_readonly(&self) -> bool {
        self.owner.as_ref().is_some_and(|o| o.readonly)
    }

    /// The requested length, or else the object's.
    pub(crate) fn sized(&self, size: Option<usize>) -> PyResult<usize> {
        size.or(self.len).ok_or_else(no_size)
    }

    /// Checks that a length fits the object; an address has no length.
    pub(crate) fn fits(&self, len: usize) -> Result<(), CallError> {
        match self.len {
            Some(held) if len > held => Err(too_long(len, held)),
            _ => Ok(()),
        }
    }

    fn of_view(view: BufferView) -> Self {
        Self {
            addr: view.addr(),
            len: Some(view.len()),
            owner: Some(Owner { readonly: view.is_readonly(), kept: OwnerRef::View(view) }),
        }
    }

    /// A tensor, duck-typed as PyTorch's.
    pub(crate) fn of_tensor(value: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = value.py();
        let number = |name| value.call_method0(name)?.extract::<usize>();
        if let Ok(contiguous) = value.call_method0(pyo3::intern!(py, "is_contiguous"))
            && !contiguous.is_truthy()?
        {
            return Err(PyValueError::new_err("the tensor is not contiguous"));
        }
        let addr = number("data_ptr")?;
        let len = number("numel")?
            .checked_mul(number("element_size")?)
            .ok_or_else(|| PyValueError::new_err("the tensor's size overflows"))?;
        let kept = OwnerRef::Object(value.clone().unbind());
        Ok(Self { addr, len: Some(len), owner: Some(Owner { readonly: false, kept }) })
    }

    fn of_array(value: &Bound<'_, PyAny>, interface: &Bound<'_, PyDict>) -> PyResult<Self> {
        let item = |name: &str| {
            interface.get_item(name)?.ok_or_else(|| {
                PyValueError::new_err(format!("__array_interface__ has no {name:?}"))
            })
        };
        if interface.get_item("strides")?.is_some_and(|s| !s.is_none()) {
            return Err(PyValueError::new_err("the array is not C-contiguous"));
        }
        let (addr, readonly) = item("data")?.extract::<(usize, bool)>()?;
        let typestr = item("typestr")?.extract::<String>()?;
        let itemsize = itemsize(&typestr).ok_or_else(|| {
            PyValueError::new_err(format!("typestr {typestr:?} is not understood"))
        })?;
        let len = item("shape")?
            .extract::<Vec<usize>>()?
            .into_iter()
            .try_fold(itemsize, usize::checked_mul)
            .ok_or_else(|| PyValueError::new_err("the array's size overflows"))?;
        let kept = OwnerRef::Object(value.clone().unbind());
        Ok(Self { addr, len: Some(len), owner: Some(Owner { readonly, kept }) })
    }
}

/// The failure of a length that exceeds the object.
pub(crate) fn too_long(len: usize, held: usize) -> CallError {
    CallError::refuse(format!("{len} bytes do not fit the object, which has {held}"))
}

/// The exception for an address without a length.
pub(crate) fn no_size() -> PyErr {
    PyTypeError::new_err("a size is needed: an integer address does not tell it")
}

/// The item size in a typestr of the array interface: `<f4`, or `<M8[ns]`.
fn itemsize(typestr: &str) -> Option<usize> {
    let digits = typestr.get(2..)?;
    digits.split('[').next()?.parse().ok()
}

/// Whether this is an array in one piece, in C order.
fn is_contiguous_array(value: &Bound<'_, PyAny>) -> bool {
    value
        .getattr("__array_interface__")
        .and_then(|i| i.get_item("strides"))
        .is_ok_and(|strides| strides.is_none())
}
