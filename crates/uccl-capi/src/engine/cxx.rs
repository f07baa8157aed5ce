//! The values that C++ callers pass and get, as the Itanium ABI and libstdc++ lay them out. They
//! are built without a C++ compiler.

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    mem::{align_of, size_of, transmute},
    ptr::{NonNull, null_mut},
    slice,
};

use uccl_wire::advert::{ADVERT_LEN, Advert, AdvertError};

use crate::failure::{Answer, Failure};

/// The type that C++ calls `uccl_engine`. Pointers to it are handles, and never followed.
pub enum UcclEngine {}

/// The type that C++ calls `uccl_conn`. Pointers to it are handles, and never followed.
pub enum UcclConn {}

/// A `FifoItem`: an advert, with names for those fields that callers look at or change.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct FifoItem {
    addr: u64,
    size: u32,
    rkey: u32,
    nmsgs: u32,
    rid: u32,
    idx: u64,
    padding: [u8; 32],
}

const _: () = assert!(size_of::<FifoItem>() == ADVERT_LEN && align_of::<FifoItem>() == 8);

impl FifoItem {
    pub(crate) fn of_bytes(bytes: [u8; ADVERT_LEN]) -> Self {
        // SAFETY: of the same size, and any bytes will do.
        unsafe { transmute(bytes) }
    }

    pub(crate) fn bytes(&self) -> [u8; ADVERT_LEN] {
        // SAFETY: of the same size, without gaps.
        unsafe { transmute(*self) }
    }

    pub(crate) fn advert(&self) -> Result<Advert, AdvertError> {
        Advert::decode(&self.bytes())
    }

    /// Narrows the item to a part. The memory's owner checks that the part lies within the region.
    pub(crate) fn narrow(&mut self, addr: u64, size: u32) {
        (self.addr, self.size) = (addr, size);
    }
}

/// Bytes of each half of a `notify_msg`.
pub(crate) const MSG_SIZE: usize = 256;

/// A `notify_msg`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct NotifyMsg {
    name: [u8; MSG_SIZE],
    msg: [u8; MSG_SIZE],
}

impl NotifyMsg {
    /// Both halves, or `None` if one is too long.
    pub(crate) fn new(name: &[u8], msg: &[u8]) -> Option<Self> {
        let half = |text: &[u8]| {
            let mut half = [0; MSG_SIZE];
            half.get_mut(..text.len())?.copy_from_slice(text);
            Some(half)
        };
        Some(Self { name: half(name)?, msg: half(msg)? })
    }

    pub(crate) fn name(&self) -> &[u8] {
        without_zeros(&self.name)
    }

    pub(crate) fn msg(&self) -> &[u8] {
        without_zeros(&self.msg)
    }
}

fn without_zeros(half: &[u8]) -> &[u8] {
    let len = half.iter().rposition(|&b| b != 0).map_or(0, |last| last + 1);
    &half[..len]
}

/// A `std::vector<T>`. As an argument it is passed by its address, and stays the caller's. As a
/// result it is written to an address that the caller passes, like any struct that does not fit two
/// registers.
#[repr(C)]
pub struct Vector<T> {
    begin: *mut T,
    end: *mut T,
    capacity: *mut T,
}

const _: () = assert!(size_of::<Vector<u8>>() == 24);

impl<T> Vector<T> {
    pub(crate) const EMPTY: Self =
        Self { begin: null_mut(), end: null_mut(), capacity: null_mut() };

    /// The vector of `len` elements at `begin`, where there is room for `room`.
    pub(crate) fn of_parts(begin: *mut T, len: usize, room: usize) -> Self {
        Self { begin, end: begin.wrapping_add(len), capacity: begin.wrapping_add(room) }
    }

    /// The first `count` elements.
    ///
    /// # Safety
    /// `vector` is NULL or the address of a vector, which stays as it is for `'a`.
    pub(crate) unsafe fn first<'a>(
        vector: *const Self,
        count: usize,
        what: &str,
    ) -> Answer<&'a [T]> {
        // SAFETY: the caller's promise.
        let all = unsafe { Self::all(vector, what) }?;
        all.get(..count).ok_or_else(|| {
            Failure::invalid(format!("{what} has {} elements, and num_iovs is {count}", all.len()))
        })
    }

    /// All elements.
    ///
    /// # Safety
    /// As for [`Self::first`].
    pub(crate) unsafe fn all<'a>(vector: *const Self, what: &str) -> Answer<&'a [T]> {
        // SAFETY: the caller's promise.
        let Some(vector) = (unsafe { vector.as_ref() }) else {
            return Err(Failure::invalid(format!("{what} is NULL")));
        };
        let bytes = vector.end.addr().saturating_sub(vector.begin.addr());
        if vector.begin.is_null() || bytes == 0 {
            return Ok(&[]);
        }
        // SAFETY: a vector's elements are from its beginning to its end.
        Ok(unsafe { slice::from_raw_parts(vector.begin, bytes / size_of::<T>()) })
    }

    /// A vector of these, which the caller will free.
    pub(crate) fn copied(elements: &[T]) -> Answer<Self>
    where
        T: Copy,
    {
        if elements.is_empty() {
            return Ok(Self::EMPTY);
        }
        let begin = allocate(Allocator::New, size_of_val(elements))?.cast::<T>().as_ptr();
        // SAFETY: room for as many; new memory is aligned for all that is not over-aligned.
        unsafe { begin.copy_from_nonoverlapping(elements.as_ptr(), elements.len()) };
        Ok(Self::of_parts(begin, elements.len(), elements.len()))
    }
}

/// A text that the caller frees with `delete[]`.
pub(crate) fn new_text(text: &str) -> Answer<*mut c_char> {
    let room = allocate(Allocator::NewArray, text.len() + 1)?.cast::<c_char>().as_ptr();
    // SAFETY: room for the text and its NUL.
    unsafe {
        room.copy_from_nonoverlapping(text.as_ptr().cast(), text.len());
        room.add(text.len()).write(0);
    }
    Ok(room)
}

/// Which of C++'s operators memory comes from.
#[derive(Clone, Copy)]
pub(crate) enum Allocator {
    New,
    NewArray,
}

impl Allocator {
    /// `operator new(size_t, std::nothrow_t const&)`, and `new[]`: no exception may come through
    /// here.
    fn symbol(self) -> &'static CStr {
        match self {
            Self::New => c"_ZnwmRKSt9nothrow_t",
            Self::NewArray => c"_ZnamRKSt9nothrow_t",
        }
    }
}

type Allocate = unsafe extern "C" fn(usize, *const c_int) -> *mut c_void;

/// Memory that C++ callers free: from the process's own operator, which a program may have
/// replaced. It is looked up, since the library is for C programs too, which may have no such
/// thing. There, as in libstdc++, it is malloc.
pub(crate) fn allocate(allocator: Allocator, bytes: usize) -> Answer<NonNull<c_void>> {
    // SAFETY: a name that ends with a NUL.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, allocator.symbol().as_ptr()) };
    // SAFETY: the operator's own type: its tag, `std::nothrow`, is an empty object of which only
    // the type counts.
    let room = match unsafe { transmute::<*mut c_void, Option<Allocate>>(found) } {
        // SAFETY: as above.
        Some(new) => unsafe { new(bytes, &0) },
        // SAFETY: it takes any size.
        None => unsafe { libc::malloc(bytes) },
    };
    NonNull::new(room).ok_or_else(|| {
        Failure::new(crate::api::uccl_status_t::UCCL_SYSTEM, format!("no memory for {bytes} bytes"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_keeps_all_but_zeros_at_its_end() {
        let message = NotifyMsg::new(b"a\0b", &[7; MSG_SIZE]).expect("it fits");
        assert_eq!((message.name(), message.msg()), (&b"a\0b"[..], &[7; MSG_SIZE][..]));
        assert!(NotifyMsg::new(&[1; MSG_SIZE + 1], b"").is_none());
        assert_eq!(NotifyMsg::new(b"", b"\0\0").expect("it fits").msg(), b"");
    }

    #[test]
    fn vectors_of_nothing() {
        // SAFETY: a vector, and NULL.
        unsafe {
            assert!(Vector::<u64>::all(&Vector::EMPTY, "ids").expect("empty").is_empty());
            assert!(Vector::<u64>::first(&Vector::EMPTY, 1, "ids").is_err());
            assert!(Vector::<u64>::all(std::ptr::null(), "ids").is_err());
        }
        assert!(Vector::<u64>::copied(&[]).expect("nothing").begin.is_null());
    }
}
