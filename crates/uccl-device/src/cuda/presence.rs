//! Finds whether any code of this process uses CUDA. Every registration asks, so it must be fast.

use std::{
    ffi::c_void,
    ptr,
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use libc::{c_int, dl_phdr_info, size_t};
use libloading::os::unix::{Library, RTLD_LAZY};

use super::{
    driver::Vendor,
    raw::{Code, Handle, NOT_INITIALISED},
};

/// `RTLD_NOLOAD` of Linux's C libraries: find a library that is loaded already, and load nothing.
const ONLY_IF_LOADED: i32 = 4;

type GetCurrent = unsafe extern "C" fn(*mut Handle) -> Code;

static DRIVER: LazySymbol<GetCurrent> = LazySymbol::new();

/// Whether any code of this process has loaded CUDA's driver and initialised it. This function does
/// neither.
pub(super) fn cuda_is_in_use() -> bool {
    let find = || Vendor::Cuda.libraries().iter().find_map(|name| find_get_current(name));
    let Some(get_current) = DRIVER.get(loads(), find) else { return false };
    let mut current = ptr::null_mut();
    // SAFETY: the pointer is to a live handle, and the library stays loaded. The call works in any
    // process; where the driver is not initialised, it returns `NOT_INITIALISED`.
    unsafe { get_current(&raw mut current) != NOT_INITIALISED }
}

fn find_get_current(library: &str) -> Option<GetCurrent> {
    // SAFETY: this loads no library, so no initialiser runs.
    let library = unsafe { Library::open(Some(library), RTLD_LAZY | ONLY_IF_LOADED) }.ok()?;
    // SAFETY: the type is that of CUDA's headers.
    let found = *unsafe { library.get::<GetCurrent>(b"cuCtxGetCurrent") }.ok()?;
    // Never closed, so that the library stays loaded.
    std::mem::forget(library);
    Some(found)
}

/// A symbol of a library that other code may load. After a vain search, it is not searched for
/// again until another library has been loaded: the loader would search all its paths for a library
/// that it does not know.
struct LazySymbol<T> {
    found: OnceLock<T>,
    /// The value of [`loads`] at the last vain search; 0 if there was none.
    absent_at: AtomicU64,
}

impl<T: Copy> LazySymbol<T> {
    const fn new() -> Self {
        Self { found: OnceLock::new(), absent_at: AtomicU64::new(0) }
    }

    /// Returns the symbol, and searches for it with `find` if that may help. `loads` was counted
    /// before, so a library that is loaded meanwhile counts as later.
    fn get(&self, loads: u64, find: impl FnOnce() -> Option<T>) -> Option<T> {
        if let Some(found) = self.found.get() {
            return Some(*found);
        }
        if loads != 0 && loads == self.absent_at.load(Relaxed) {
            return None;
        }
        let found = find().map(|found| *self.found.get_or_init(|| found));
        if found.is_none() {
            self.absent_at.store(loads, Relaxed);
        }
        found
    }
}

/// How many libraries this process has loaded so far, including those unloaded since; 0 if the
/// loader does not report it.
fn loads() -> u64 {
    unsafe extern "C" fn first(info: *mut dl_phdr_info, size: size_t, loads: *mut c_void) -> c_int {
        if size >= std::mem::offset_of!(dl_phdr_info, dlpi_subs) {
            // SAFETY: the loader's struct, which is long enough to contain the member; and the
            // integer below.
            unsafe { *loads.cast::<u64>() = (*info).dlpi_adds };
        }
        // The count is the same for all libraries: one is enough.
        1
    }
    let mut loads = 0_u64;
    // SAFETY: the function is called before this returns, with the integer's address.
    unsafe { libc::dl_iterate_phdr(Some(first), (&raw mut loads).cast()) };
    loads
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_missing_symbol_is_looked_for_again_after_a_load_and_no_sooner() {
        let (awaited, searches) = (LazySymbol::new(), Cell::new(0));
        let search = |loads, found: Option<u8>| {
            let find = || {
                searches.set(searches.get() + 1);
                found
            };
            (awaited.get(loads, find), searches.get())
        };
        assert_eq!(search(30, None), (None, 1));
        assert_eq!(search(30, Some(1)), (None, 1));
        assert_eq!(search(31, None), (None, 2));
        assert_eq!(search(32, Some(7)), (Some(7), 3));
        assert_eq!(search(33, None), (Some(7), 3));
    }

    #[test]
    fn where_loads_are_not_counted_every_look_is_a_search() {
        let awaited = LazySymbol::new();
        assert_eq!(awaited.get(0, || None::<u8>), None);
        assert_eq!(awaited.get(0, || Some(3)), Some(3));
    }

    #[test]
    fn a_library_that_is_loaded_is_counted() {
        let before = loads();
        assert!(before > 0, "the C library tells");
        // SAFETY: parts of the C library that no Rust program is linked with; they have no
        // initialisers.
        let loaded = ["libutil.so.1", "libanl.so.1", "libBrokenLocale.so.1"]
            .map(|name| unsafe { Library::open(Some(name), RTLD_LAZY) });
        assert!(loaded.iter().any(Result::is_ok), "{loaded:?}");
        assert!(loads() > before);
    }
}
