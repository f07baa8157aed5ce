//! Includes machine code of the kernels in the library if it exists: in the folder that
//! `UCCL_KERNELS` names, or else in the one that `cargo xtask kernels` fills. Without it the
//! library has PTX alone.

use std::{
    env, fs,
    path::{self, Path, PathBuf},
};

/// The modules, as `ptx` has them.
const NAMES: [&str; 3] = ["copy", "ep", "ep_wide"];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=UCCL_KERNELS");
    let manifest = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    let named = env::var_os("UCCL_KERNELS").map(PathBuf::from);
    let folder = match &named {
        Some(folder) if folder.as_os_str().is_empty() => None,
        Some(folder) => path::absolute(folder).ok(),
        None => Some(manifest.join("../../kernels/out")),
    };
    // Watches the folder above, which exists: a missing file would cause a full rebuild each time.
    let above = manifest.join("../../kernels");
    if above.is_dir() {
        println!("cargo::rerun-if-changed={}", above.display());
    }
    let mut source = String::new();
    for name in NAMES {
        let file = folder.as_ref().map(|folder| folder.join(format!("{name}.fatbin")));
        let there = file.as_deref().filter(|file| file.is_file());
        if let (Some(_), Some(file), None) = (&named, &file, there) {
            println!("cargo::error=UCCL_KERNELS names a folder without {}", file.display());
        }
        source += &line(name, there);
    }
    let to = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default()).join("machine_code.rs");
    if let Err(error) = fs::write(&to, source) {
        println!("cargo::error=cannot write {}: {error}", to.display());
    }
}

/// The static of a module for the library: the bytes of the file, or none.
fn line(name: &str, file: Option<&Path>) -> String {
    let code = match file {
        Some(file) => {
            println!("cargo::rerun-if-changed={}", file.display());
            format!("Some(&AlignedBytes(*include_bytes!({file:?})))")
        }
        None => "None".to_owned(),
    };
    format!("static {}_CODE: Option<&AlignedBytes<[u8]>> = {code};\n", name.to_uppercase())
}
