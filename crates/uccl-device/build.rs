//! Machine code of the kernels becomes part of the library if it is there: `UCCL_KERNELS_FATBIN` names the
//! file, or `cargo xtask kernels` has made it. Without it the library has PTX.

use std::{env, path::PathBuf};

fn main() {
    println!("cargo::rustc-check-cfg=cfg(uccl_fatbin)");
    println!("cargo::rerun-if-env-changed=UCCL_KERNELS_FATBIN");
    let manifest = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    let path = match env::var_os("UCCL_KERNELS_FATBIN") {
        Some(path) if path.is_empty() => return,
        Some(path) => PathBuf::from(path),
        None => manifest.join("../../kernels/out/copy.fatbin"),
    };
    // The folder, which is there: a file that is missing would have everything built anew each time.
    println!("cargo::rerun-if-changed=build.rs");
    let kernels = manifest.join("../../kernels");
    if kernels.is_dir() {
        println!("cargo::rerun-if-changed={}", kernels.display());
    }
    if path.is_file() {
        println!("cargo::rerun-if-changed={}", path.display());
        println!("cargo::rustc-cfg=uccl_fatbin");
        println!("cargo::rustc-env=UCCL_KERNELS_FATBIN_PATH={}", path.display());
    } else if env::var_os("UCCL_KERNELS_FATBIN").is_some() {
        println!("cargo::error=UCCL_KERNELS_FATBIN names no file: {}", path.display());
    }
}
