//! A folder that holds NIXL's own plugins and this project's, for `NIXL_PLUGIN_DIR`.
//!
//! NIXL looks for plugins in one folder, and `NIXL_PLUGIN_DIR` replaces the one that NIXL comes
//! with. To keep all plugins, [`provide`] makes a folder of links to both sets. Links to the
//! plugins alone would not do: a plugin finds its own libraries relative to the path that the
//! loader found it by (`$ORIGIN`), which is the link's and not its target's. Therefore the files
//! around NIXL's folder of plugins are linked too:
//!
//! ```text
//! <cache>/uccl/nixl/<hash of all links>/
//!     lib/plugins/libplugin_UCCL.so    -> this project's
//!     lib/plugins/*                    -> NIXL's
//!     lib/*                            -> the files beside NIXL's folder of plugins
//!     *.libs                           -> libraries that a wheel brings along, one level up
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
/// The file that NIXL loads for the backend `UCX`.
const UCX: &str = "libplugin_UCX.so";
/// The plugin's names in a folder: its own, and UCX's where it stands in for UCX.
const OWN_NAME: &[&str] = &[PLUGIN];
const BOTH_NAMES: &[&str] = &[PLUGIN, UCX];

/// The reasons why the folder cannot be provided.
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
        /// The path that was read or written.
        path: PathBuf,
        /// The error that the file system returned.
        source: io::Error,
    },
}

impl Error {
    fn io(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        |source| Self::Io { path, source }
    }
}

/// Returns the folder for `NIXL_PLUGIN_DIR`, and makes it unless it exists.
///
/// `ours` is this project's plugin, `theirs` NIXL's folder of plugins. The folder lies in the
/// user's cache or, if the cache cannot be written, in the user's own folder among temporary files.
/// Any number of processes may call this at once.
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
    provide_under(OWN_NAME, roots, ours, theirs)
}

/// As [`provide`], and NIXL finds this project's plugin under UCX's name too: for programs that ask
/// for the backend `UCX` and cannot be told another.
///
/// # Errors
///
/// As those of [`provide`].
pub fn provide_instead_of_ucx(ours: &Path, theirs: &Path) -> Result<PathBuf, Error> {
    provide_instead_of_ucx_in(&Roots::of_this_user(), ours, theirs)
}

/// As [`provide_instead_of_ucx`], in places of the caller's choice.
///
/// # Errors
///
/// As those of [`provide`].
pub fn provide_instead_of_ucx_in(
    roots: &Roots,
    ours: &Path,
    theirs: &Path,
) -> Result<PathBuf, Error> {
    provide_under(BOTH_NAMES, roots, ours, theirs)
}

fn provide_under(
    names: &[&str],
    roots: &Roots,
    ours: &Path,
    theirs: &Path,
) -> Result<PathBuf, Error> {
    let plan = plan::Plan::of(names, ours, theirs)?;
    let mut refused = None;
    for root in roots.usable() {
        match root.and_then(|root| make::make(&plan, &root)) {
            Ok(folder) => return Ok(folder.join(plan::PLUGINS)),
            // The first error names the preferred place.
            Err(error) => refused = refused.or(Some(error)),
        }
    }
    Err(refused.unwrap_or_else(|| Error::io(theirs)(io::ErrorKind::NotFound.into())))
}
