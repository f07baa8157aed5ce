//! The compiled kernels that are part of this library.

use crate::cuda::{device::Context, error::GpuError, module::Module};

/// The kernels as PTX. Every GPU from Ampere on runs it. The driver compiles it once for each driver and GPU, and keeps
/// the result in its cache on disk.
const PTX: &str = concat!(include_str!("../../../ptx/copy.ptx"), "\0");

/// Machine code for the GPUs named in xtask/src/kernels.rs, if it was there at build time.
#[cfg(uccl_fatbin)]
static FATBIN: Option<&Aligned<[u8]>> =
    Some(&Aligned(*include_bytes!(env!("UCCL_KERNELS_FATBIN_PATH"))));
#[cfg(not(uccl_fatbin))]
static FATBIN: Option<&Aligned<[u8]>> = None;

/// Aligned, as the driver reads the beginning as a struct.
#[repr(C, align(16))]
struct Aligned<T: ?Sized>(T);

/// Loads the kernels. Machine code is used if there is some, the driver takes it, and `portable` is not set; otherwise
/// PTX.
pub(super) fn load(context: &'static Context, portable: bool) -> Result<Module, GpuError> {
    if let Some(fatbin) = FATBIN.filter(|_| !portable) {
        // SAFETY: a whole fatbin, as `cargo xtask kernels` has made it.
        match unsafe { Module::load_binary(context, &fatbin.0) } {
            Ok(module) => return Ok(module),
            Err(lost @ GpuError::Poisoned { .. }) => return Err(lost),
            // It was made for a newer driver or another GPU: try PTX.
            Err(_) => {}
        }
    }
    Module::load_ptx(context, PTX)
}

/// Whether this build has machine code, so that the driver need not compile anything.
pub(super) const fn has_machine_code() -> bool {
    FATBIN.is_some()
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    #[test]
    fn the_kernels_are_there_for_drivers_of_cuda_12_1_and_later() {
        assert!(CStr::from_bytes_with_nul(PTX.as_bytes()).is_ok());
        for line in [".version 8.1\n", ".target sm_80\n"] {
            assert!(PTX.contains(line), "{line}");
        }
        for name in ["uccl_copy_table", "uccl_copy_small", "uccl_copy_wide"] {
            assert!(PTX.contains(&format!(".entry {name}(")), "{name}");
        }
    }
}
