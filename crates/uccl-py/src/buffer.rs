//! The buffer protocol, declared here because the limited API lists it only since Python 3.11.
//!
//! The functions have been exported with this layout by every CPython since 3.0; PEP 688 and the
//! stable ABI of 3.11 froze it.

use std::{
    borrow::Cow,
    ffi::{c_char, c_int, c_void},
    mem::MaybeUninit,
};

use pyo3::{exceptions::PyTypeError, ffi, prelude::*, types::PyBytes};

/// `Py_buffer` of CPython's `Include/pybuffer.h`.
#[repr(C)]
struct RawView {
    buf: *mut c_void,
    obj: *mut ffi::PyObject,
    len: ffi::Py_ssize_t,
    itemsize: ffi::Py_ssize_t,
    readonly: c_int,
    ndim: c_int,
    format: *mut c_char,
    shape: *mut ffi::Py_ssize_t,
    strides: *mut ffi::Py_ssize_t,
    suboffsets: *mut ffi::Py_ssize_t,
    internal: *mut c_void,
}

/// Contiguous bytes in C order, writable or not.
const SIMPLE: c_int = 0;

unsafe extern "C" {
    fn PyObject_CheckBuffer(obj: *mut ffi::PyObject) -> c_int;
    fn PyObject_GetBuffer(obj: *mut ffi::PyObject, view: *mut RawView, flags: c_int) -> c_int;
    fn PyBuffer_Release(view: *mut RawView);
}

/// An object's memory, which cannot be freed or resized while this lives.
pub(crate) struct BufferView(Box<RawView>);

// SAFETY: the view is only read after it was filled, and released under the GIL (see Drop).
unsafe impl Send for BufferView {}
// SAFETY: as above; shared access only reads its fields.
unsafe impl Sync for BufferView {}

impl BufferView {
    /// The object's memory; `None` if it has no buffer protocol, an error if it is not contiguous.
    pub(crate) fn of(object: &Bound<'_, PyAny>) -> PyResult<Option<Self>> {
        // SAFETY: `object` is a live object and the GIL is held.
        if unsafe { PyObject_CheckBuffer(object.as_ptr()) } == 0 {
            return Ok(None);
        }
        let mut view = Box::new(MaybeUninit::<RawView>::zeroed());
        // SAFETY: as above; `view` points to writable memory of the struct's size, at an address that
        // stays (exporters may point into it).
        if unsafe { PyObject_GetBuffer(object.as_ptr(), view.as_mut_ptr(), SIMPLE) } != 0 {
            return Err(PyErr::fetch(object.py()));
        }
        // SAFETY: the call above succeeded, so the struct is filled.
        Ok(Some(Self(unsafe { view.assume_init() })))
    }

    /// Where the memory starts.
    pub(crate) fn addr(&self) -> usize {
        self.0.buf as usize
    }

    /// How long it is, in bytes.
    pub(crate) fn len(&self) -> usize {
        self.0.len.unsigned_abs()
    }

    /// Whether it may only be read.
    pub(crate) fn is_readonly(&self) -> bool {
        self.0.readonly != 0
    }

    /// A copy of the memory.
    pub(crate) fn to_vec(&self) -> Vec<u8> {
        if self.len() == 0 {
            return Vec::new();
        }
        // SAFETY: the exporter keeps `len` bytes at `buf` readable until the view is released; the GIL
        // is held, so no Python code changes them meanwhile.
        unsafe { std::slice::from_raw_parts(self.0.buf.cast::<u8>(), self.len()) }.to_vec()
    }

    /// Copies `bytes` to the start of the memory; false if that may only be read or is too short.
    pub(crate) fn copy_from(&mut self, bytes: &[u8]) -> bool {
        if self.is_readonly() || self.len() < bytes.len() {
            return false;
        }
        // SAFETY: the exporter keeps `len` bytes at `buf` writable until the view is released, and
        // `bytes` is no longer than that; `bytes` is Rust's own memory, so the two do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.0.buf.cast(), bytes.len()) };
        true
    }
}

impl Drop for BufferView {
    fn drop(&mut self) {
        let view: *mut RawView = &mut *self.0;
        // Without an interpreter there is nothing left to release the view to.
        Python::try_attach(|_| {
            // SAFETY: the view was filled by PyObject_GetBuffer, is released once, and the GIL is held.
            unsafe { PyBuffer_Release(view) }
        });
    }
}

/// The bytes of a bytes-like object.
pub(crate) fn bytes<'a>(object: &'a Bound<'_, PyAny>) -> PyResult<Cow<'a, [u8]>> {
    if let Ok(bytes) = object.cast::<PyBytes>() {
        return Ok(Cow::Borrowed(bytes.as_bytes()));
    }
    match BufferView::of(object)? {
        Some(view) => Ok(Cow::Owned(view.to_vec())),
        None => Err(PyTypeError::new_err(format!(
            "a bytes-like object is required, not {}",
            object.get_type().name()?
        ))),
    }
}
