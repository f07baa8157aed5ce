//! Makes a folder as a whole or not at all, even while other processes make it too.

use std::{
    fs, io,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use tempfile::TempDir;

use crate::{Error, plan::Plan};

/// Number of attempts, as other processes may interfere.
const TRIES: u32 = 20;

/// Makes the folder of a plan below `root` and returns its path.
pub(crate) fn make(plan: &Plan, root: &Path) -> Result<PathBuf, Error> {
    let folder = root.join(plan.name());
    // Nothing is written before this check: the cache may be read-only and hold the folder.
    if plan.is_at(&folder) {
        return Ok(folder);
    }
    fs::create_dir_all(root).map_err(Error::io(root))?;
    let ours = draft(root)?;
    fill(ours.path(), plan)?;
    for _ in 0..TRIES {
        let renamed = fs::rename(ours.path(), &folder);
        if renamed.is_ok() || plan.is_at(&folder) {
            return Ok(folder);
        }
        match renamed {
            // A different folder is in the way, such as one that somebody has tidied up.
            Err(error) if occupied(&error) => clear(root, &folder)?,
            other => other.map_err(Error::io(&folder))?,
        }
    }
    Err(Error::io(&folder)(io::ErrorKind::AlreadyExists.into()))
}

fn occupied(error: &io::Error) -> bool {
    use io::ErrorKind::{AlreadyExists, DirectoryNotEmpty, NotADirectory};
    matches!(error.kind(), AlreadyExists | DirectoryNotEmpty | NotADirectory)
}

/// Moves a folder away in one step, then removes it. A folder that is already gone is fine.
fn clear(root: &Path, folder: &Path) -> Result<(), Error> {
    let away = draft(root)?;
    match fs::rename(folder, away.path().join("old")) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Error::io(folder)(error)),
        _ => Ok(()),
    }
}

/// A folder under a name of its own. Its drop removes it unless it was renamed.
fn draft(root: &Path) -> Result<TempDir, Error> {
    tempfile::Builder::new().prefix(".").tempdir_in(root).map_err(Error::io(root))
}

fn fill(draft: &Path, plan: &Plan) -> Result<(), Error> {
    for (at, target) in &plan.links {
        let link = draft.join(at);
        if let Some(folder) = link.parent() {
            fs::create_dir_all(folder).map_err(Error::io(folder))?;
        }
        symlink(target, &link).map_err(Error::io(&link))?;
    }
    Ok(())
}
