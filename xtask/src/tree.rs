//! Paths of the repository's folders.

use std::path::{Path, PathBuf};

pub(crate) fn root() -> &'static Path {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().unwrap_or(manifest)
}

/// The folder that cargo builds into.
pub(crate) fn target() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(folder) => root().join(folder),
        None => root().join("target"),
    }
}

/// The folder for the files that these commands make.
pub(crate) fn scratch() -> PathBuf {
    target().join("xtask")
}
