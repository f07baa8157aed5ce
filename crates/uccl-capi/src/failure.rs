//! Failures on their way to a caller: a status, and a text that the caller can ask for.

use std::{
    any::Any,
    cell::Cell,
    ffi::c_char,
    panic::{AssertUnwindSafe, catch_unwind},
};

use uccl_p2p::Error;
use uccl_wire::advert::AdvertError;

use crate::api::status::uccl_status_t;

/// Bytes of the longest text, with its NUL.
const ROOM: usize = 1024;

thread_local! {
    /// Always in the same place: callers may ask for the text before they have the status.
    static LAST: [Cell<u8>; ROOM] = const { [const { Cell::new(0) }; ROOM] };
}

/// Why a call failed.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) status: uccl_status_t,
    pub(crate) text: String,
}

/// The result of a call.
pub(crate) type Answer<T = ()> = Result<T, Failure>;

impl Failure {
    pub(crate) fn new(status: uccl_status_t, text: impl Into<String>) -> Self {
        Self { status, text: text.into() }
    }

    /// An argument makes no sense.
    pub(crate) fn invalid(text: impl Into<String>) -> Self {
        Self::new(uccl_status_t::UCCL_INVALID_ARGUMENT, text)
    }

    /// A handle that is not valid.
    pub(crate) fn no_handle(what: &str) -> Self {
        let text =
            format!("no such {what}: the handle is NULL, was never made, or has been destroyed");
        Self::new(uccl_status_t::UCCL_UNKNOWN_ID, text)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::new(uccl_status_t::of(&error), error.to_string())
    }
}

impl From<AdvertError> for Failure {
    fn from(error: AdvertError) -> Self {
        Self::invalid(error.to_string())
    }
}

/// The text of the thread's last failure, until its next.
pub(crate) fn last() -> *const c_char {
    // A thread that is ending has no text any more.
    LAST.try_with(|last| last.as_ptr().cast()).unwrap_or(c"".as_ptr())
}

/// Remembers the text for the thread, and returns the status.
pub(crate) fn remember(failure: Failure) -> uccl_status_t {
    let text = &failure.text[..failure.text.floor_char_boundary(ROOM - 1)];
    let bytes = text.bytes().map(|byte| if byte == 0 { b' ' } else { byte });
    // A thread that is ending does not ask for the text.
    let _ = LAST.try_with(|last| last.iter().zip(bytes.chain([0])).for_each(|(to, b)| to.set(b)));
    failure.status
}

/// Runs a call. Remembers its failure, or its panic, which ends here.
pub(crate) fn run<T>(call: impl FnOnce() -> Answer<T>) -> Result<T, uccl_status_t> {
    // The data that a panic leaves behind is guarded by the engine's locks, or was this call's own.
    let answer =
        catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| Err(panicked(&*panic)));
    answer.map_err(remember)
}

fn panicked(panic: &(dyn Any + Send)) -> Failure {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("without a message");
    Failure::new(
        uccl_status_t::UCCL_INTERNAL,
        format!("internal error, please report it: a call panicked: {text}"),
    )
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    fn last_text() -> String {
        // SAFETY: this thread's, and nothing has failed since.
        unsafe { CStr::from_ptr(last()) }.to_string_lossy().into_owned()
    }

    #[test]
    fn a_panic_ends_in_a_status() {
        assert_eq!(run(|| -> Answer<u8> { panic!("no {}", 7) }), Err(uccl_status_t::UCCL_INTERNAL));
        assert!(last_text().ends_with("panicked: no 7"), "{}", last_text());
        assert_eq!(run(|| -> Answer<u8> { panic!("plain") }), Err(uccl_status_t::UCCL_INTERNAL));
        assert!(last_text().ends_with("panicked: plain"), "{}", last_text());
    }

    #[test]
    fn each_thread_has_its_own_last_failure() {
        assert_eq!(remember(Failure::invalid("a\0b")), uccl_status_t::UCCL_INVALID_ARGUMENT);
        std::thread::spawn(|| assert_eq!(last_text(), "")).join().expect("no failure there");
        assert_eq!(last_text(), "a b");
        assert!(run(|| Ok(())).is_ok());
        assert_eq!(last_text(), "a b", "success leaves it");
        remember(Failure::invalid("é".repeat(ROOM)));
        assert_eq!(last_text(), "é".repeat(ROOM / 2 - 1), "cut between characters");
    }
}
