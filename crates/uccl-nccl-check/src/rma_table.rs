//! One-sided tables of all versions.

use std::ffi::CStr;

use uccl_nccl_abi::rma::{RmaV13, RmaV14, RmaV15, RmaV16};

/// A one-sided table. It stays valid while its library is loaded.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RmaTable {
    V13(&'static RmaV13),
    V14(&'static RmaV14),
    V15(&'static RmaV15),
    V16(&'static RmaV16),
}

/// Evaluates an expression with the table of any version.
macro_rules! with_rma {
    ($table:expr, $name:ident => $value:expr) => {
        match $table {
            RmaTable::V13($name) => $value,
            RmaTable::V14($name) => $value,
            RmaTable::V15($name) => $value,
            RmaTable::V16($name) => $value,
        }
    };
}
pub(crate) use with_rma;

impl RmaTable {
    pub(crate) fn version(self) -> u32 {
        match self {
            Self::V13(_) => 13,
            Self::V14(_) => 14,
            Self::V15(_) => 15,
            Self::V16(_) => 16,
        }
    }

    /// The plugin's name; `None` if the pointer is null.
    pub(crate) fn name(self) -> Option<String> {
        let name = with_rma!(self, table => table.name);
        if name.is_null() {
            return None;
        }
        // SAFETY: the interface has a text with an end here, which lives as long as the library.
        Some(unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned())
    }

    /// The functions that NCCL calls without a look, and whether they are there.
    pub(crate) fn needed(self) -> Vec<(&'static str, bool)> {
        let common = with_rma!(self, t => [
            ("init", t.init.is_some()),
            ("devices", t.devices.is_some()),
            ("getProperties", t.functions.get_properties.is_some()),
            ("listen", t.functions.listen.is_some()),
            ("connect", t.functions.connect.is_some()),
            ("createContext", t.functions.create_context.is_some()),
            ("regMrSym", t.functions.reg_mr_sym.is_some()),
            ("deregMrSym", t.functions.dereg_mr_sym.is_some()),
            ("destroyContext", t.functions.destroy_context.is_some()),
            ("closeColl", t.functions.close_coll.is_some()),
            ("closeListen", t.functions.close_listen.is_some()),
            ("iput", t.functions.put.is_some()),
            ("iputSignal", t.functions.put_signal.is_some()),
            ("iget", t.functions.get.is_some()),
            ("test", t.functions.test.is_some()),
            ("finalize", t.functions.finalize.is_some()),
        ]);
        let of_16 = match self {
            Self::V16(table) => table.get_rma_properties.is_some(),
            _ => true,
        };
        common.into_iter().chain([("getRmaProperties", of_16)]).collect()
    }
}
