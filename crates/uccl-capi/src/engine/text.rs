//! `std::string` of libstdc++ since GCC 5, and the notifications that are made of it.

use super::cxx::{Allocator, Vector, allocate};
use crate::{
    args,
    failure::{Answer, Failure},
};

/// The most bytes that a string keeps within itself, without its NUL.
const SHORT: usize = 15;

/// A `std::string`. It may point into itself, so it is made where it stays.
#[repr(C)]
struct Text {
    begin: *mut u8,
    len: usize,
    /// The bytes of a short one, else how many there is room for, as the first eight.
    inside: [u8; SHORT + 1],
}

const _: () = assert!(size_of::<Text>() == 32);

impl Text {
    /// Room for a text of this length; `None` for a short one. A caller that makes no string in it
    /// leaks it.
    fn room(len: usize) -> Answer<Option<*mut u8>> {
        if len <= SHORT {
            return Ok(None);
        }
        Ok(Some(allocate(Allocator::New, len + 1)?.cast().as_ptr()))
    }

    /// Makes a string at `place`.
    ///
    /// # Safety
    /// There is room for one at `place`, and for the bytes and a NUL in the room.
    unsafe fn make(place: *mut Self, room: Option<*mut u8>, text: &[u8]) {
        // SAFETY: the caller's promise; a short text and its NUL fit inside.
        unsafe {
            let inside = (&raw mut (*place).inside).cast::<u8>();
            let begin = room.unwrap_or(inside);
            begin.copy_from_nonoverlapping(text.as_ptr(), text.len());
            begin.add(text.len()).write(0);
            if room.is_some() {
                inside.cast::<usize>().write(text.len());
            }
            (&raw mut (*place).begin).write(begin);
            (&raw mut (*place).len).write(text.len());
        }
    }

    /// # Safety
    /// It is a string of C++'s, which stays as it is for `'a`.
    unsafe fn bytes<'a>(&self) -> Answer<&'a [u8]> {
        // SAFETY: a string has as many bytes.
        unsafe { args::many(self.begin.cast_const(), self.len, "a string") }
    }
}

/// A `notify_msg_v`.
#[repr(C)]
pub struct NotifyMsgV {
    name: Text,
    msg: Text,
}

impl NotifyMsgV {
    /// Its name and its message.
    ///
    /// # Safety
    /// NULL, or the address of one that stays as it is for `'a`.
    pub(crate) unsafe fn parts<'a>(both: *const Self) -> Answer<(&'a [u8], &'a [u8])> {
        // SAFETY: the caller's promise.
        let both =
            unsafe { both.as_ref() }.ok_or_else(|| Failure::invalid("notify_msg is NULL"))?;
        // SAFETY: as above.
        Ok(unsafe { (both.name.bytes()?, both.msg.bytes()?) })
    }
}

/// A vector that is being made, of as many elements as there is room for.
pub(crate) struct Notifs {
    begin: *mut NotifyMsgV,
    made: usize,
    room: usize,
}

impl Notifs {
    pub(crate) fn with_room(room: usize) -> Answer<Self> {
        if room == 0 {
            return Ok(Self { begin: std::ptr::null_mut(), made: 0, room });
        }
        let begin = allocate(Allocator::New, room * size_of::<NotifyMsgV>())?.cast().as_ptr();
        Ok(Self { begin, made: 0, room })
    }

    /// Adds one; without memory for it, or room, everything stays as it was.
    pub(crate) fn push(&mut self, name: &[u8], msg: &[u8]) -> Answer {
        if self.made == self.room {
            return Err(Failure::invalid("there is no room for another notification"));
        }
        let (name_room, msg_room) = (Text::room(name.len())?, Text::room(msg.len())?);
        // SAFETY: an element within the room, which is aligned for pointers; each string has its
        // own room.
        unsafe {
            let next = self.begin.add(self.made);
            Text::make(&raw mut (*next).name, name_room, name);
            Text::make(&raw mut (*next).msg, msg_room, msg);
        }
        self.made += 1;
        Ok(())
    }

    /// The vector, which is the caller's, as its strings are.
    pub(crate) fn finish(self) -> Vector<NotifyMsgV> {
        Vector::of_parts(self.begin, self.made, self.room)
    }
}
