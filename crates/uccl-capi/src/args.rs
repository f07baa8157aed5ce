//! Arguments from C, checked as far as possible.

use std::{
    ffi::{CStr, c_char, c_void},
    ptr::NonNull,
    slice,
};

use crate::failure::{Answer, Failure};

fn missing(what: &str) -> Failure {
    Failure::invalid(format!("{what} is NULL"))
}

/// A string.
///
/// # Safety
/// It is NULL, or ends with a NUL and stays as it is for `'a`.
pub(crate) unsafe fn text<'a>(ptr: *const c_char, what: &str) -> Answer<&'a str> {
    if ptr.is_null() {
        return Err(missing(what));
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(ptr) };
    text.to_str().map_err(|_| Failure::invalid(format!("{what} is not UTF-8")))
}

/// `count` things in a row; any pointer will do, even NULL, if there are none.
///
/// # Safety
/// It is NULL, or points to as many, which stay as they are for `'a`.
pub(crate) unsafe fn many<'a, T>(ptr: *const T, count: usize, what: &str) -> Answer<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    if count > isize::MAX as usize / size_of::<T>().max(1) {
        return Err(Failure::invalid(format!("{what}: no memory has room for {count}")));
    }
    match NonNull::new(ptr.cast_mut()) {
        // SAFETY: the caller's promise.
        Some(first) => Ok(unsafe { slice::from_raw_parts(first.as_ptr(), count) }),
        None => Err(missing(what)),
    }
}

/// One thing.
///
/// # Safety
/// It is NULL, or points to one, which stays as it is for `'a`.
pub(crate) unsafe fn one<'a, T>(ptr: *const T, what: &str) -> Answer<&'a T> {
    // SAFETY: the caller's promise.
    unsafe { ptr.as_ref() }.ok_or_else(|| missing(what))
}

/// The place for an answer.
pub(crate) struct Out<T>(NonNull<T>);

impl<T> Out<T> {
    /// A place for one.
    ///
    /// # Safety
    /// It is NULL, or may be written as long as this lives.
    pub(crate) unsafe fn new(ptr: *mut T, what: &str) -> Answer<Self> {
        NonNull::new(ptr).map(Self).ok_or_else(|| missing(what))
    }

    pub(crate) fn put(&self, value: T) {
        // SAFETY: the promise made to `new`. The place need not be initialised, nor aligned.
        unsafe { self.0.write_unaligned(value) }
    }
}

/// Writes an answer that the caller may not want.
///
/// # Safety
/// It is NULL, or may be written.
pub(crate) unsafe fn put_if_wanted<T>(ptr: *mut T, value: T) {
    if !ptr.is_null() {
        // SAFETY: the caller's promise.
        unsafe { ptr.write(value) }
    }
}

/// The place for a text, with its NUL.
pub(crate) struct TextOut {
    buffer: NonNull<c_char>,
    capacity: usize,
}

impl TextOut {
    /// A place for `capacity` bytes.
    ///
    /// # Safety
    /// It is NULL, or may be written as long as this lives.
    pub(crate) unsafe fn new(ptr: *mut c_char, capacity: usize, what: &str) -> Answer<Self> {
        NonNull::new(ptr).map(|buffer| Self { buffer, capacity }).ok_or_else(|| missing(what))
    }

    pub(crate) fn put(&self, text: &str) -> Answer {
        let needed = text.len() + 1;
        if needed > self.capacity {
            let capacity = self.capacity;
            return Err(Failure::invalid(format!(
                "{needed} bytes are needed for {text:?}, and there is room for {capacity}"
            )));
        }
        // SAFETY: room for the text and its NUL, by the promise made to `new`.
        unsafe {
            self.buffer.as_ptr().copy_from_nonoverlapping(text.as_ptr().cast(), text.len());
            self.buffer.add(text.len()).write(0);
        }
        Ok(())
    }
}

/// An address in the engine's type.
pub(crate) fn address(ptr: *const c_void) -> usize {
    // Peers and the kernel reach the memory by it.
    ptr.expose_provenance()
}

#[cfg(test)]
mod tests {
    use std::ptr::{null, null_mut};

    use super::*;

    #[test]
    fn null_is_refused_by_name() {
        // SAFETY: nothing is behind NULL.
        unsafe {
            assert_eq!(text(null(), "name").expect_err("refused").text, "name is NULL");
            assert_eq!(many::<u64>(null(), 2, "iovs").expect_err("refused").text, "iovs is NULL");
            assert!(many::<u64>(null(), 0, "iovs").expect("none").is_empty());
            assert!(many(&7_u64, usize::MAX, "iovs").is_err());
            assert!(
                one::<u64>(null(), "advert").is_err() && Out::<u8>::new(null_mut(), "").is_err()
            );
            assert!(TextOut::new(null_mut(), 9, "text").is_err());
            put_if_wanted::<u64>(null_mut(), 7);
        }
    }

    #[test]
    fn a_text_is_written_whole_or_not_at_all() {
        let mut buffer = [7_i8 as c_char; 4];
        // SAFETY: the buffer outlives `out`, which writes to it.
        let out = unsafe { TextOut::new(buffer.as_mut_ptr(), 4, "text") }.expect("a place");
        assert!(out.put("four").expect_err("too long").text.starts_with("5 bytes"));
        out.put("abc").expect("it fits");
        assert_eq!(buffer, [b'a', b'b', b'c', 0].map(|b| b as c_char));
    }
}
