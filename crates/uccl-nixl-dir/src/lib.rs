//! A folder that holds NIXL's own plugins and this project's, for `NIXL_PLUGIN_DIR`.
//!
//! NIXL looks for plugins in one folder, and what `NIXL_PLUGIN_DIR` names replaces the one that it comes with. So that
//! nothing is lost, [`provide`] makes a folder of links to all of them. Links alone would not do: a plugin finds its own
//! libraries from where the loader found the plugin (`$ORIGIN`), which is the link and not what it points to. Therefore
//! what surrounds NIXL's folder of plugins is linked too:
//!
//! ```text
//! <cache>/uccl/nixl/<hash of all links>/
//!     lib/plugins/libplugin_UCCL.so    -> this project's
//!     lib/plugins/*                    -> NIXL's
//!     lib/*                            -> what lies beside NIXL's folder of plugins
//!     *.libs                           -> what lies beside that: libraries that a wheel brings along
//! ```

mod make;
mod place;
mod plan;

use std::{
    io,
    path::{Path, PathBuf},
};

pub use place::Roots;

/// The file that NIXL loads for the backend `UCCL`.
pub const PLUGIN: &str = "libplugin_UCCL.so";

/// Why there is no such folder.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// This project's plugin is not where it should be.
    #[error(
        "there is no plugin at {}: it is left out where no C++ compiler is found; install g++ and build again",
        .0.display()
    )]
    NoPlugin(PathBuf),
    /// NIXL's plugins are not where they should be.
    #[error("{} holds no plugins of NIXL (libplugin_*.so)", .0.display())]
    NoNixl(PathBuf),
    /// The file system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// What was read or written.
        path: PathBuf,
        /// What it answered.
        source: io::Error,
    },
}

impl Error {
    fn io(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        |source| Self::Io { path, source }
    }
}

/// The folder to name in `NIXL_PLUGIN_DIR`, made unless it is there already.
///
/// `ours` is this project's plugin, `theirs` NIXL's folder of plugins. The folder lies in the user's cache, or if
/// that cannot be written in a folder of the user's among temporary files. Any number of processes may do this at once.
///
/// # Errors
///
/// There is nothing to link, or no place can be written.
pub fn provide(ours: &Path, theirs: &Path) -> Result<PathBuf, Error> {
    provide_in(&Roots::of_this_user(), ours, theirs)
}

/// As [`provide`], in places of the caller's choice.
///
/// # Errors
///
/// As those of [`provide`].
pub fn provide_in(roots: &Roots, ours: &Path, theirs: &Path) -> Result<PathBuf, Error> {
    let plan = plan::Plan::of(ours, theirs)?;
    let mut refused = None;
    for root in roots.usable() {
        match root.and_then(|root| make::make(&plan, &root)) {
            Ok(folder) => return Ok(folder.join(plan::PLUGINS)),
            // The first says where it should have been.
            Err(error) => refused = refused.or(Some(error)),
        }
    }
    Err(refused.unwrap_or_else(|| Error::io(theirs)(io::ErrorKind::NotFound.into())))
}
