//! The places for folders.

use std::{
    env, fs, io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
};

use rustix::process::geteuid;

use crate::Error;

/// The places for folders, in the order in which they are tried.
#[derive(Clone, Debug)]
pub struct Roots {
    /// The user's cache; `None` if the environment names none.
    pub cache: Option<PathBuf>,
    /// A folder for temporary files, in which others may write too.
    pub temporary: PathBuf,
}

impl Roots {
    /// The places that the environment names: `XDG_CACHE_HOME`, else `HOME`; `TMPDIR`.
    #[must_use]
    pub fn of_this_user() -> Self {
        let folder = |name| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let cache =
            folder("XDG_CACHE_HOME").or_else(|| folder("HOME").map(|home| home.join(".cache")));
        Self { cache, temporary: env::temp_dir() }
    }

    /// The usable places. Each one is examined only when its turn comes.
    pub(crate) fn usable(&self) -> impl Iterator<Item = Result<PathBuf, Error>> {
        let below = |root: &Path| root.join("uccl").join("nixl");
        let cache = self.cache.iter().map(move |cache| Ok(below(cache)));
        cache.chain([()].into_iter().map(move |()| private(&self.temporary).map(|own| below(&own))))
    }
}

/// A folder of this user's own where others may write. Plugins are code, so nobody else may change
/// its contents.
fn private(temporary: &Path) -> Result<PathBuf, Error> {
    let user = geteuid().as_raw();
    let path = temporary.join(format!("uccl-{user}"));
    match fs::DirBuilder::new().mode(0o700).create(&path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(Error::io(&path)(error));
        }
        _ => {}
    }
    let found = fs::symlink_metadata(&path).map_err(Error::io(&path))?;
    if found.is_dir() && found.uid() == user && found.mode() & 0o022 == 0 {
        return Ok(path);
    }
    Err(Error::io(&path)(io::Error::new(
        io::ErrorKind::PermissionDenied,
        "others may write there, or it is theirs",
    )))
}
