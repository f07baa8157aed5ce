//! The compiled GPU kernels: PTX, which is part of every build, and machine code if it existed at
//! build time.
//!
//! The sources are CUDA C++; `cargo xtask kernels` compiles them. The launcher of a kernel knows
//! its parameters, and describes them with [`cpp`], which makes the header of them in C++.

pub mod cpp;

/// A module of kernels, as GPU drivers take it.
#[derive(Clone, Copy)]
pub struct Image {
    /// Text for Ampere, with a zero byte at its end. Every later GPU runs it too. The driver
    /// compiles it once for each driver and GPU, and keeps the result in its cache on disk.
    pub ptx: &'static str,
    machine_code: Option<&'static AlignedBytes<[u8]>>,
}

impl Image {
    /// A whole fatbin, aligned to 16 bytes, with code for Ampere, Hopper and Blackwell. `None` if
    /// there was none at build time.
    pub fn machine_code(&self) -> Option<&'static [u8]> {
        self.machine_code.map(|code| &code.0)
    }
}

/// Copies of any number of pieces: `kernels/copy.cu`.
pub static COPY: Image =
    Image { ptx: concat!(include_str!("../ptx/copy.ptx"), "\0"), machine_code: COPY_CODE };

/// Expert parallelism: `kernels/ep/ep.cu`.
pub static EP: Image =
    Image { ptx: concat!(include_str!("../ptx/ep.ptx"), "\0"), machine_code: EP_CODE };

/// The same for groups with more ranks than a word has bits: `kernels/ep/wide.cu`.
pub static EP_WIDE: Image =
    Image { ptx: concat!(include_str!("../ptx/ep_wide.ptx"), "\0"), machine_code: EP_WIDE_CODE };

/// Aligned, because the driver reads the beginning as a struct.
#[repr(C, align(16))]
struct AlignedBytes<T: ?Sized>(T);

include!(concat!(env!("OUT_DIR"), "/machine_code.rs"));

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    #[test]
    fn drivers_of_cuda_12_1_and_later_take_them() {
        for image in [COPY, EP, EP_WIDE] {
            assert!(CStr::from_bytes_with_nul(image.ptx.as_bytes()).is_ok());
            for line in [".version 8.1\n", ".target sm_80\n"] {
                assert!(image.ptx.contains(line), "{line}");
            }
        }
        // The launcher of the expert-parallelism kernels looks up each of them.
        for name in ["uccl_copy_table", "uccl_copy_small", "uccl_copy_wide"] {
            assert!(COPY.ptx.contains(&format!(".entry {name}(")), "{name}");
        }
    }

    /// The magic number of a fatbin, as `fatbinary` writes it.
    #[test]
    fn machine_code_is_a_fatbin() {
        for code in [COPY, EP, EP_WIDE].iter().filter_map(Image::machine_code) {
            assert_eq!(code.first_chunk(), Some(&0xBA55_ED50_u32.to_le_bytes()));
            assert_eq!(code.as_ptr() as usize % 16, 0);
        }
    }
}
