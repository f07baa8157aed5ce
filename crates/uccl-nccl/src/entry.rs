//! The functions that NCCL calls.

pub(crate) mod connecting;
pub(crate) mod lifecycle;
pub(crate) mod messages;

use std::{
    ffi::c_void,
    panic::{AssertUnwindSafe, catch_unwind},
};

use uccl_nccl_abi::NcclResult;

use crate::{fault::Fault, log};

/// Does a call, and tells NCCL its result; the reason of a failure goes to NCCL's log. Panics end
/// here.
pub(crate) fn guarded(call: impl FnOnce() -> Result<(), Fault>) -> NcclResult {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(())) => NcclResult::SUCCESS,
        Ok(Err(fault)) => {
            log::warn(&fault.to_string());
            fault.result()
        }
        Err(_) => {
            log::warn("a defect: a panic, of which standard error tells more");
            NcclResult::INTERNAL_ERROR
        }
    }
}

/// As [`guarded`] for calls of communicators, which log their first failure themselves.
fn quiet(call: impl FnOnce() -> Result<(), Fault>) -> NcclResult {
    let mut result = NcclResult::SUCCESS;
    let done = guarded(|| match call() {
        Err(Fault::Flow(error)) => {
            result = Fault::Flow(error).result();
            Ok(())
        }
        other => other,
    });
    if done == NcclResult::SUCCESS { result } else { done }
}

/// A reference from NCCL's pointer.
///
/// # Safety
///
/// It is null, or points to a `T` that lives for the call.
pub(crate) unsafe fn known<'a, T>(call: &'static str, at: *const c_void) -> Result<&'a T, Fault> {
    // SAFETY: the caller's.
    unsafe { at.cast::<T>().as_ref() }.ok_or(Fault::Misuse(call, "a null pointer"))
}

/// Writes a result of a call.
///
/// # Safety
///
/// It is null, or writable.
pub(crate) unsafe fn give<T>(call: &'static str, to: *mut T, value: T) -> Result<(), Fault> {
    if to.is_null() {
        return Err(Fault::Misuse(call, "no place for the result"));
    }
    // SAFETY: the caller's.
    unsafe { to.write(value) };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_ends_at_the_border() {
        assert_eq!(guarded(|| panic!("on purpose")), NcclResult::INTERNAL_ERROR);
        assert_eq!(quiet(|| panic!("on purpose")), NcclResult::INTERNAL_ERROR);
        assert_eq!(guarded(|| Ok(())), NcclResult::SUCCESS);
    }

    #[test]
    fn null_pointers_are_refused() {
        // SAFETY: both take null.
        unsafe {
            assert!(known::<u8>("test", std::ptr::null()).is_err());
            assert!(give("test", std::ptr::null_mut::<u8>(), 1).is_err());
        }
    }
}
