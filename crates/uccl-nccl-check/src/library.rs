//! A plugin's library: loaded as NCCL loads it, and searched for tables.

use std::{
    ffi::{CStr, CString, c_void},
    os::unix::ffi::OsStrExt,
    path::Path,
    ptr::NonNull,
};

use anyhow::{Context as _, Result, bail};
use uccl_nccl_abi::{
    net::{NetV8, NetV9, NetV10, NetV11, NetV12},
    tuner::{TunerV4, TunerV5},
};

use crate::rma_table::RmaTable;

/// A table of a network plugin. It stays valid while its library is loaded.
#[derive(Clone, Copy, Debug)]
pub(crate) enum NetTable {
    V8(&'static NetV8),
    V9(&'static NetV9),
    V10(&'static NetV10),
    V11(&'static NetV11),
    V12(&'static NetV12),
}

/// Evaluates an expression with the table of any version.
macro_rules! with_table {
    ($table:expr, $name:ident => $value:expr) => {
        match $table {
            NetTable::V8($name) => $value,
            NetTable::V9($name) => $value,
            NetTable::V10($name) => $value,
            NetTable::V11($name) => $value,
            NetTable::V12($name) => $value,
        }
    };
}
pub(crate) use with_table;

impl NetTable {
    pub(crate) fn version(self) -> u32 {
        match self {
            Self::V8(_) => 8,
            Self::V9(_) => 9,
            Self::V10(_) => 10,
            Self::V11(_) => 11,
            Self::V12(_) => 12,
        }
    }

    /// The network's name; `None` if the pointer is null.
    pub(crate) fn name(self) -> Option<String> {
        let name = with_table!(self, table => table.name);
        if name.is_null() {
            return None;
        }
        // SAFETY: the interface has a text with an end here, which lives as long as the library.
        Some(unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned())
    }
}

/// A table of a tuner plugin.
#[derive(Clone, Copy, Debug)]
pub(crate) enum TunerTable {
    V4(&'static TunerV4),
    V5(&'static TunerV5),
}

impl TunerTable {
    pub(crate) fn version(self) -> u32 {
        match self {
            Self::V4(_) => 4,
            Self::V5(_) => 5,
        }
    }
}

/// A loaded library.
pub(crate) struct Library(NonNull<c_void>);

impl Library {
    /// Loads a file as NCCL does: all symbols at once, none for others.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let name = CString::new(path.as_os_str().as_bytes()).context("the library's path")?;
        // SAFETY: the path ends with a zero; the library's constructors are its own business.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        match NonNull::new(handle) {
            Some(handle) => Ok(Self(handle)),
            None => bail!("NCCL would not find it: {}", last_error()),
        }
    }

    /// Unloads it.
    ///
    /// # Safety
    ///
    /// No table of it is used afterwards.
    pub(crate) unsafe fn close(self) -> Result<()> {
        // SAFETY: the handle is of `dlopen`, and closed once.
        match unsafe { libc::dlclose(self.0.as_ptr()) } {
            0 => Ok(()),
            _ => bail!("dlclose: {}", last_error()),
        }
    }

    /// All network tables that this program knows, the oldest first.
    pub(crate) fn nets(&self) -> Vec<NetTable> {
        let all = [
            self.table(c"ncclNetPlugin_v8").map(NetTable::V8),
            self.table(c"ncclNetPlugin_v9").map(NetTable::V9),
            self.table(c"ncclNetPlugin_v10").map(NetTable::V10),
            self.table(c"ncclNetPlugin_v11").map(NetTable::V11),
            self.table(c"ncclNetPlugin_v12").map(NetTable::V12),
        ];
        all.into_iter().flatten().collect()
    }

    /// All tuner tables that this program knows.
    pub(crate) fn tuners(&self) -> Vec<TunerTable> {
        let all = [
            self.table(c"ncclTunerPlugin_v4").map(TunerTable::V4),
            self.table(c"ncclTunerPlugin_v5").map(TunerTable::V5),
        ];
        all.into_iter().flatten().collect()
    }

    /// All one-sided tables that this program knows, the oldest first.
    pub(crate) fn rmas(&self) -> Vec<RmaTable> {
        let of_13 = self.table(c"ncclRmaPlugin_v13").or_else(|| self.table(c"ncclGinPlugin_v13"));
        let all = [
            of_13.map(RmaTable::V13),
            self.table(c"ncclRmaPlugin_v14").map(RmaTable::V14),
            self.table(c"ncclRmaPlugin_v15").map(RmaTable::V15),
            self.table(c"ncclRmaPlugin_v16").map(RmaTable::V16),
        ];
        all.into_iter().flatten().collect()
    }

    fn table<T>(&self, symbol: &CStr) -> Option<&'static T> {
        // SAFETY: the handle is open; the symbol ends with a zero.
        let found = unsafe { libc::dlsym(self.0.as_ptr(), symbol.as_ptr()) };
        // SAFETY: a symbol of this name is a constant table of this layout, by NCCL's interface.
        // It is used no longer than the library is loaded (`close`).
        unsafe { found.cast::<T>().as_ref() }
    }
}

fn last_error() -> String {
    // SAFETY: takes nothing.
    let said = unsafe { libc::dlerror() };
    if said.is_null() {
        return "the loader does not say why".into();
    }
    // SAFETY: the loader's text, which lives until the next call of the loader by this thread.
    unsafe { CStr::from_ptr(said) }.to_string_lossy().into_owned()
}
