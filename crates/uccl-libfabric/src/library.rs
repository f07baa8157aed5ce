//! libfabric, loaded at run time.

use std::{
    collections::HashMap,
    error::Error as _,
    ffi::{CStr, c_char, c_int, c_void},
    path::{Path, PathBuf},
    ptr::NonNull,
    sync::LazyLock,
};

use libloading::Library as Loaded;
use parking_lot::Mutex;
use uccl_fabric::rail::RailError;

use super::{raw, signals::Signals};

/// The library's name, if the settings name no other.
const FILE: &str = "libfabric.so.1";

type GetInfo = unsafe extern "C" fn(
    u32,
    *const c_char,
    *const c_char,
    u64,
    *const raw::Info,
    *mut *mut raw::Info,
) -> c_int;
type OpenFabric =
    unsafe extern "C" fn(*mut raw::FabricAttr, *mut *mut raw::Fabric, *mut c_void) -> c_int;

/// The functions of a loaded library. If a function has several versions, the lookup gives the
/// newest, which works with structs of any length.
pub(super) struct Library {
    pub(super) get_info: GetInfo,
    pub(super) free_info: unsafe extern "C" fn(*mut raw::Info),
    pub(super) dup_info: unsafe extern "C" fn(*const raw::Info) -> *mut raw::Info,
    pub(super) open_fabric: OpenFabric,
    version: unsafe extern "C" fn() -> u32,
    strerror: unsafe extern "C" fn(c_int) -> *const c_char,
    get_params: Option<unsafe extern "C" fn(*mut *mut Param, *mut c_int) -> c_int>,
    free_params: Option<unsafe extern "C" fn(*mut Param)>,
    name: String,
}

/// `struct fi_param`: an environment variable that the library reads.
#[repr(C)]
struct Param {
    name: *const c_char,
    kind: c_int,
    help: *const c_char,
    value: *const c_char,
}

/// The interface version that a library of this version is asked for.
fn asked_of(version: u32) -> u32 {
    raw::API_VERSION.min(version)
}

impl Library {
    /// Loads the library from this file, from this folder, or from where the system finds it. It
    /// stays loaded.
    ///
    /// # Errors
    /// When there is none, it is not libfabric, or it is older than 1.15.
    pub(super) fn load(path: Option<&Path>) -> Result<&'static Self, RailError> {
        static LOADED: LazyLock<Mutex<HashMap<PathBuf, &'static Library>>> =
            LazyLock::new(Mutex::default);
        let path = match path {
            Some(path) if path.is_dir() => path.join(FILE),
            Some(path) => path.to_owned(),
            None => FILE.into(),
        };
        let mut loaded = LOADED.lock();
        if let Some(library) = loaded.get(&path) {
            return Ok(library);
        }
        let library: &'static Self = Box::leak(Box::new(Self::open(&path)?));
        loaded.insert(path, library);
        Ok(library)
    }

    fn open(path: &Path) -> Result<Self, RailError> {
        let name = path.display().to_string();
        let _signals = Signals::keep();
        // SAFETY: this runs the initialisers of a library that the user has installed or named for
        // this purpose.
        let loaded = unsafe { Loaded::new(path) }.map_err(|e| {
            let reason = e.source().map_or_else(|| e.to_string(), ToString::to_string);
            RailError::Unavailable(format!(
                "libfabric cannot be loaded: {reason}. Install it (Debian, Ubuntu: libfabric1; RHEL: \
                 libfabric; with Slingshot and EFA it comes with their drivers), or name its file \
                 or folder with UCCL_LIBFABRIC_SO"
            ))
        })?;
        let library = Self::find_all(&loaded, name)?;
        std::mem::forget(loaded);
        let version = library.version();
        if version < (1, 15) {
            return Err(RailError::Unavailable(format!(
                "{} is libfabric {}.{}, and 1.15 or later is needed",
                library.name, version.0, version.1
            )));
        }
        tracing::debug!(file = library.name, ?version, "loaded libfabric");
        Ok(library)
    }

    fn find_all(loaded: &Loaded, name: String) -> Result<Self, RailError> {
        // SAFETY: the types of these are those of the functions in libfabric's public headers; the
        // caller never unloads the library.
        unsafe {
            Ok(Self {
                get_info: find(loaded, "fi_getinfo", &name)?,
                free_info: find(loaded, "fi_freeinfo", &name)?,
                dup_info: find(loaded, "fi_dupinfo", &name)?,
                open_fabric: find(loaded, "fi_fabric", &name)?,
                version: find(loaded, "fi_version", &name)?,
                strerror: find(loaded, "fi_strerror", &name)?,
                get_params: find(loaded, "fi_getparams", &name).ok(),
                free_params: find(loaded, "fi_freeparams", &name).ok(),
                name,
            })
        }
    }

    /// The file that it was loaded from, as it was named.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// The interface version that it is asked for.
    pub(super) fn api_version(&self) -> u32 {
        // SAFETY: it takes nothing.
        asked_of(unsafe { (self.version)() })
    }

    /// Major and minor version.
    pub(super) fn version(&self) -> (u32, u32) {
        // SAFETY: it takes nothing.
        split_version(unsafe { (self.version)() })
    }

    /// The library's message for one of its error numbers, of either sign.
    pub(super) fn words(&self, errno: i32) -> String {
        // SAFETY: any number will do; the answer is a constant of the library, which stays loaded.
        text(unsafe { (self.strerror)(errno.saturating_abs()) })
            .unwrap_or_else(|| format!("error {errno}"))
    }

    /// The error for a failed call that returned this number.
    pub(super) fn error(&self, what: impl std::fmt::Display, code: i32) -> RailError {
        let errno = code.saturating_abs();
        if errno < raw::FI_EOTHER {
            return RailError::os(what, errno);
        }
        RailError::Provider { what: what.to_string(), why: self.words(errno) }
    }

    /// The value of one of the library's own environment variables. `None` if it is not set or the
    /// library has no such variable.
    pub(super) fn setting(&self, name: &str) -> Option<String> {
        let (get, free) = (self.get_params?, self.free_params?);
        let (mut list, mut count) = (std::ptr::null_mut(), 0);
        // SAFETY: both pointers point to live variables, which are set to a list and its length.
        let failed = unsafe { get(&raw mut list, &raw mut count) } != 0;
        let list = NonNull::new(list).filter(|_| !failed)?;
        let len = usize::try_from(count).unwrap_or(0);
        // SAFETY: the library made a list of that many.
        let params = unsafe { std::slice::from_raw_parts(list.as_ptr(), len) };
        let found = params.iter().find(|param| text(param.name).as_deref() == Some(name));
        let value = found.and_then(|param| text(param.value));
        // SAFETY: it is the library's list, and nothing points into it any more.
        unsafe { free(list.as_ptr()) };
        value
    }
}

/// # Safety
/// `F` must be the function pointer type of the function with this name. The library must never be
/// unloaded.
unsafe fn find<F: Copy>(loaded: &Loaded, symbol: &str, file: &str) -> Result<F, RailError> {
    // SAFETY: the caller's promise.
    let found = unsafe { loaded.get::<F>(symbol) };
    found
        .map(|symbol| *symbol)
        .map_err(|_| RailError::Unavailable(format!("{file} is not libfabric: it has no {symbol}")))
}

/// The two halves of a version number.
pub(super) fn split_version(version: u32) -> (u32, u32) {
    (version >> 16, version & 0xffff)
}

/// The text at a pointer from the library; `None` for null.
pub(super) fn text(pointer: *const c_char) -> Option<String> {
    // SAFETY: a text from the library is null or has an end, and is not changed meanwhile.
    let text = unsafe { (!pointer.is_null()).then(|| CStr::from_ptr(pointer)) };
    text.map(|text| text.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(path: &str) -> String {
        Library::load(Some(Path::new(path))).err().expect("refused").to_string()
    }

    #[test]
    fn a_library_that_is_missing_is_a_reason_with_a_remedy() {
        let reason = refused("/nowhere/libfabric.so.1");
        assert!(reason.contains("/nowhere/libfabric.so.1"), "{reason}");
        assert!(reason.contains("libfabric1") && reason.contains("UCCL_LIBFABRIC_SO"), "{reason}");
    }

    #[test]
    fn another_library_is_a_reason() {
        assert_eq!(refused("libc.so.6"), "libc.so.6 is not libfabric: it has no fi_getinfo");
    }

    #[test]
    fn a_folder_stands_for_the_library_in_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let reason = refused(&folder.path().display().to_string());
        assert!(reason.contains(&format!("{}/{FILE}", folder.path().display())), "{reason}");
    }

    #[test]
    fn a_library_is_asked_for_the_newest_interface_that_both_know() {
        let version = |major: u32, minor: u32| major << 16 | minor;
        for (library, asked) in [((1, 15), (1, 15)), ((1, 22), (1, 22)), ((2, 1), (1, 22))] {
            let (library, asked) = (version(library.0, library.1), version(asked.0, asked.1));
            assert_eq!(asked_of(library), asked, "{:?}", split_version(library));
        }
    }
}
