//! The buffer protocol, declared here because the limited API lists it only since Python 3.11.
//!
//! The functions have been exported with this layout by every CPython since 3.0; PEP 688 and the
//! stable ABI of 3.11 froze it.

use std::{
    borrow::Cow,
    ffi::{CStr, c_char, c_int, c_void},
    mem::MaybeUninit,
};

use pyo3::{exceptions::PyTypeError, ffi, prelude::*, pybacked::PyBackedBytes, types::PyBytes};
use uccl_p2p::{Bytes, NotifPayload};

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
/// Contiguous bytes, with shape and format.
const CONTIGUOUS: c_int = 0x8 | FORMAT;
/// Items at any stride, with their format.
const STRIDED: c_int = 0x18 | FORMAT;
const FORMAT: c_int = 0x4;

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
        Self::request(object, SIMPLE)
    }

    fn request(object: &Bound<'_, PyAny>, flags: c_int) -> PyResult<Option<Self>> {
        // SAFETY: `object` is a live object and the GIL is held.
        if unsafe { PyObject_CheckBuffer(object.as_ptr()) } == 0 {
            return Ok(None);
        }
        let mut view = Box::new(MaybeUninit::<RawView>::zeroed());
        // SAFETY: as above; `view` points to writable memory of the struct's size, at an address
        // that stays (exporters may point into it).
        if unsafe { PyObject_GetBuffer(object.as_ptr(), view.as_mut_ptr(), flags) } != 0 {
            return Err(PyErr::fetch(object.py()));
        }
        // SAFETY: the call above succeeded, so the struct is filled.
        Ok(Some(Self(unsafe { view.assume_init() })))
    }

    /// The object that owns the memory.
    pub(crate) fn object<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        // SAFETY: null, or an object that the view holds until it is released.
        unsafe { Bound::from_borrowed_ptr_or_opt(py, self.0.obj.cast()) }
    }

    /// The start of the memory.
    pub(crate) fn addr(&self) -> usize {
        self.0.buf as usize
    }

    /// The length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.0.len.unsigned_abs()
    }

    /// Whether the memory is read-only.
    pub(crate) fn is_readonly(&self) -> bool {
        self.0.readonly != 0
    }

    /// The memory.
    ///
    /// # Safety
    /// The GIL is held and no Python code runs while the slice is used, so that the memory does not
    /// change.
    pub(crate) unsafe fn as_slice(&self) -> &[u8] {
        if self.len() == 0 {
            return &[];
        }
        // SAFETY: the exporter keeps `len` bytes at `buf` readable until the view is released.
        unsafe { std::slice::from_raw_parts(self.0.buf.cast(), self.len()) }
    }

    /// A copy of the memory.
    pub(crate) fn to_vec(&self) -> Vec<u8> {
        // SAFETY: this is called with the GIL held, and a copy runs no Python code.
        unsafe { self.as_slice() }.to_vec()
    }

    /// The format of the items in the notation of the struct module; only for views that requested
    /// it.
    fn format(&self) -> &[u8] {
        if self.0.format.is_null() {
            return b"B";
        }
        // SAFETY: exporters keep the string, which ends with a zero, until the view is released.
        unsafe { CStr::from_ptr(self.0.format) }.to_bytes()
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

/// An array of 64-bit integers in one dimension.
pub(crate) struct Array {
    view: BufferView,
    len: usize,
    /// The distance of two items in bytes.
    stride: isize,
    signed: bool,
}

impl Array {
    /// The object's integers. `None` if the object is no such array, but may be an iterable; an
    /// error if it is an array of other numbers.
    pub(crate) fn of(object: &Bound<'_, PyAny>) -> PyResult<Option<Self>> {
        // An object without such a buffer may still be an iterable.
        let Ok(Some(view)) = BufferView::request(object, STRIDED) else { return Ok(None) };
        let raw = &*view.0;
        if raw.ndim != 1 || raw.shape.is_null() || raw.strides.is_null() {
            return Ok(None);
        }
        // SAFETY: of one dimension, as checked above, and kept by the exporter until the view is
        // released.
        let (len, stride) = unsafe { ((*raw.shape).unsigned_abs(), *raw.strides) };
        let format = view.format();
        let signed = match format.strip_prefix(native_order(format)).unwrap_or(format) {
            _ if raw.itemsize != 8 => None,
            b"Q" | b"L" | b"N" | b"P" => Some(false),
            b"q" | b"l" | b"n" => Some(true),
            _ => None,
        };
        match signed {
            Some(signed) => Ok(Some(Self { view, len, stride, signed })),
            None if matches!(format.last(), Some(b'e' | b'f' | b'd' | b'g')) => {
                Err(PyTypeError::new_err(format!(
                    "an array of 64-bit integers is needed, not one of format {:?}",
                    String::from_utf8_lossy(format)
                )))
            }
            None => Ok(None),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Sets each row from its number, up to the shorter length; false if a number is negative.
    pub(crate) fn fill<T>(&self, rows: &mut [T], set: impl Fn(&mut T, u64)) -> bool {
        let mut all = 0;
        let mut at = self.view.0.buf.cast::<u8>();
        for row in rows.iter_mut().take(self.len) {
            // SAFETY: one of `len` items, which the exporter keeps readable until the view is
            // released.
            let number = unsafe { at.cast::<u64>().read_unaligned() };
            at = at.wrapping_offset(self.stride);
            all |= number;
            set(row, number);
        }
        !self.signed || all.cast_signed() >= 0
    }
}

/// The prefix of a format that only states this machine's byte order.
fn native_order(format: &[u8]) -> &[u8] {
    let own = if cfg!(target_endian = "little") { b'<' } else { b'>' };
    match format.first() {
        Some(first) if [b'@', b'=', own].contains(first) => &format[..1],
        _ => &[],
    }
}

/// The memory of an object that has it in one piece; `None` for others, and for an array of
/// objects.
pub(crate) fn packed(object: &Bound<'_, PyAny>) -> Option<BufferView> {
    let view = BufferView::request(object, CONTIGUOUS).ok().flatten();
    view.filter(|view| view.format() != b"O")
}

impl Drop for BufferView {
    fn drop(&mut self) {
        let view: *mut RawView = &mut *self.0;
        // Without an interpreter there is nothing left to release the view to.
        Python::try_attach(|_| {
            // SAFETY: the view was filled by PyObject_GetBuffer, is released once, and the GIL is
            // held.
            unsafe { PyBuffer_Release(view) }
        });
    }
}

/// The longest bytes that are copied. Longer ones are shared with the Python object.
const SHARED: usize = 32 << 10;

/// The payload of a notification, from a bytes-like object. Long `bytes`, which cannot change, are
/// shared and not copied.
pub(crate) fn payload<'a>(object: &'a Bound<'_, PyAny>) -> PyResult<NotifPayload<'a>> {
    Ok(match object.cast::<PyBytes>() {
        Ok(bytes) if bytes.as_bytes().len() > SHARED => {
            Bytes::from_owner(PyBackedBytes::from(bytes.clone())).into()
        }
        _ => match bytes(object)? {
            Cow::Borrowed(bytes) => bytes.into(),
            Cow::Owned(bytes) => bytes.into(),
        },
    })
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
