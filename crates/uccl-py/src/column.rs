//! Arguments of a vector call with an item for each iov: integers and blobs, in a list or packed in
//! an array.
//!
//! Calls have thousands of iovs, so each nanosecond of an item counts: no item causes an
//! allocation, a reference count or a lock, and exact `int` and `bytes` objects are read in place.

use std::fmt::Display;

use pyo3::{
    Borrowed,
    exceptions::PyOverflowError,
    ffi,
    prelude::*,
    types::{PyList, PyTuple},
};

use crate::{
    args,
    buffer::{self, Array, BufferView},
    error::CallError,
};

/// A list of anything.
pub(crate) enum Items<'py> {
    List(Bound<'py, PyList>),
    Tuple(Bound<'py, PyTuple>),
}

/// An item that its list holds: valid until Python code runs, which may change the list.
pub(crate) struct Item<'a, 'py>(Borrowed<'a, 'py, PyAny>);

/// Integers, or objects in the place of integers.
pub(crate) enum Column<'py> {
    /// 64-bit integers side by side.
    Array(Array),
    Items(Items<'py>),
}

/// Blobs of `LEN` bytes each.
pub(crate) enum Blobs<'py, const LEN: usize> {
    /// One after another.
    Packed(BufferView),
    Items(Items<'py>),
}

impl<'py> Items<'py> {
    /// A list or tuple, or the items of another iterable.
    pub(crate) fn of(items: &Bound<'py, PyAny>) -> PyResult<Self> {
        if let Some(items) = Self::as_is(items) {
            return Ok(items);
        }
        let list = PyList::empty(items.py());
        items.try_iter()?.try_for_each(|item| list.append(item?))?;
        Ok(Self::List(list))
    }

    fn as_is(items: &Bound<'py, PyAny>) -> Option<Self> {
        match items.cast::<PyList>() {
            Ok(list) => Some(Self::List(list.clone())),
            Err(_) => Some(Self::Tuple(items.cast::<PyTuple>().ok()?.clone())),
        }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::List(list) => list.len(),
            Self::Tuple(tuple) => tuple.len(),
        }
    }

    /// Calls `each` with the first `count` items.
    pub(crate) fn each(
        &self,
        count: usize,
        mut each: impl FnMut(usize, Item<'_, 'py>) -> Result<(), CallError>,
    ) -> Result<(), CallError> {
        for i in 0..count {
            each(i, self.get(i)?)?;
        }
        Ok(())
    }

    /// An item; an error if Python code has made the list shorter meanwhile.
    fn get(&self, i: usize) -> PyResult<Item<'_, 'py>> {
        let at = i as ffi::Py_ssize_t;
        let (py, item) = match self {
            // SAFETY: a live list, the GIL is held, and the index is checked.
            Self::List(list) => (list.py(), unsafe { ffi::PyList_GetItem(list.as_ptr(), at) }),
            // SAFETY: a live tuple, the GIL is held, and the index is checked.
            Self::Tuple(tuple) => (tuple.py(), unsafe { ffi::PyTuple_GetItem(tuple.as_ptr(), at) }),
        };
        // SAFETY: null, or borrowed from the list, which holds it for as long as an `Item` is
        // valid.
        unsafe { Borrowed::from_ptr_or_err(py, item) }.map(Item)
    }
}

impl<'py> Item<'_, 'py> {
    /// The bytes of an exact `bytes` object of this length.
    fn exact_blob<const LEN: usize>(&self) -> Option<&[u8; LEN]> {
        let object = self.0.as_ptr();
        // SAFETY: a live object, the GIL is held; bytes objects are as long as they say, and do not
        // change.
        unsafe {
            if ffi::PyBytes_CheckExact(object) == 0 || ffi::PyBytes_Size(object) != LEN as isize {
                return None;
            }
            Some(&*ffi::PyBytes_AsString(object).cast::<[u8; LEN]>())
        }
    }

    /// A reference of its own to the item.
    pub(crate) fn owned(self) -> Bound<'py, PyAny> {
        self.0.to_owned()
    }
}

impl<'py> Column<'py> {
    /// An array of 64-bit integers, or an iterable.
    pub(crate) fn of(items: &Bound<'py, PyAny>) -> PyResult<Self> {
        if let Some(items) = Items::as_is(items) {
            return Ok(Self::Items(items));
        }
        match Array::of(items)? {
            Some(array) => Ok(Self::Array(array)),
            None => Ok(Self::Items(Items::of(items)?)),
        }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Array(array) => array.len(),
            Self::Items(items) => items.len(),
        }
    }

    /// Sets each row from its integer, or with `other` from an item that is no exact `int`.
    pub(crate) fn fill<T>(
        &self,
        rows: &mut [T],
        set: impl Fn(&mut T, u64),
        other: impl Fn(&mut T, Bound<'py, PyAny>) -> Result<(), CallError>,
    ) -> Result<(), CallError> {
        let items = match self {
            Self::Array(array) if array.fill(rows, &set) => return Ok(()),
            Self::Array(_) => {
                return Err(PyOverflowError::new_err("a number of the array is negative").into());
            }
            Self::Items(items) => items,
        };
        items.each(rows.len(), |i, item| match args::exact_int(&item.0) {
            Some(number) => {
                set(&mut rows[i], number);
                Ok(())
            }
            None => other(&mut rows[i], item.owned()),
        })
    }

    /// Sets each row from its integer.
    pub(crate) fn fill_integers<T>(
        &self,
        rows: &mut [T],
        set: impl Fn(&mut T, u64),
    ) -> Result<(), CallError> {
        self.fill(rows, &set, |row, item| {
            set(row, item.extract()?);
            Ok(())
        })
    }
}

impl<'py, const LEN: usize> Blobs<'py, LEN> {
    /// One bytes-like object with all of them, or an iterable of bytes-like objects.
    pub(crate) fn of(items: &Bound<'py, PyAny>) -> PyResult<Self> {
        if let Some(items) = Items::as_is(items) {
            return Ok(Self::Items(items));
        }
        match buffer::packed(items) {
            Some(view) => Ok(Self::Packed(view)),
            None => Ok(Self::Items(Items::of(items)?)),
        }
    }

    /// Raises unless there are `count` blobs.
    pub(crate) fn expect(&self, function: &str, count: usize) -> Result<(), CallError> {
        match self {
            Self::Packed(view) => packed_length::<LEN>(function, count, view),
            Self::Items(items) => same_length(function, count, items.len()),
        }
    }

    /// Decodes the first `count` blobs: with `decode`, or with `of_object` if one is no `bytes` of
    /// that length.
    pub(crate) fn decode<T, E: Display>(
        &self,
        count: usize,
        decode: impl Fn(&[u8; LEN]) -> Result<T, E>,
        of_object: impl Fn(&Bound<'py, PyAny>) -> Result<T, CallError>,
    ) -> Result<Vec<T>, CallError> {
        let mut decoded = Vec::with_capacity(count);
        match self {
            Self::Packed(view) => {
                // SAFETY: the GIL is held meanwhile, and decoding runs no Python code.
                let bytes = unsafe { view.as_slice() };
                for blob in bytes.as_chunks().0.iter().take(count) {
                    decoded.push(decode(blob).map_err(CallError::refuse)?);
                }
            }
            Self::Items(items) => items.each(count, |_, item| {
                decoded.push(match item.exact_blob() {
                    Some(blob) => decode(blob).map_err(CallError::refuse)?,
                    None => of_object(&item.owned())?,
                });
                Ok(())
            })?,
        }
        Ok(decoded)
    }
}

/// Raises if two lists of one call differ in length.
pub(crate) fn same_length(function: &str, expected: usize, got: usize) -> Result<(), CallError> {
    if expected == got {
        return Ok(());
    }
    Err(CallError::runtime(format!(
        "{function}(): all lists must have num_iovs items ({expected} and {got} given)"
    )))
}

/// Raises unless a buffer has `count` blobs of `LEN` bytes.
pub(crate) fn packed_length<const LEN: usize>(
    function: &str,
    count: usize,
    view: &BufferView,
) -> Result<(), CallError> {
    if count.checked_mul(LEN) == Some(view.len()) {
        return Ok(());
    }
    Err(CallError::runtime(format!(
        "{function}(): {count} pieces of {LEN} bytes are needed, one after another, and not {} bytes",
        view.len()
    )))
}
