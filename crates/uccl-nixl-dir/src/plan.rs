//! The links that a folder has to hold.

use std::{
    collections::BTreeMap,
    fmt::Write,
    fs,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use sha2::{Digest, Sha256};

use crate::Error;

/// The plugins' place in a folder.
pub(crate) const PLUGINS: &str = "lib/plugins";

/// The links of a folder: the path of each in it, and its target.
pub(crate) struct Plan {
    pub(crate) links: BTreeMap<PathBuf, PathBuf>,
}

impl Plan {
    /// Links to `ours` under each of the names, to all other files in `theirs`, and to the files
    /// around it that plugins look for.
    pub(crate) fn of(names: &[&str], ours: &Path, theirs: &Path) -> Result<Self, Error> {
        let ours = fs::canonicalize(ours).map_err(|_| Error::NoPlugin(ours.to_owned()))?;
        let no_nixl = || Error::NoNixl(theirs.to_owned());
        let plugins = fs::canonicalize(theirs).map_err(|_| no_nixl())?;
        let mut links = BTreeMap::new();
        for path in entries(&plugins)? {
            link(&mut links, PLUGINS, &path);
        }
        if !links.keys().any(|name| is_plugin(name)) {
            return Err(no_nixl());
        }
        if let Some(libraries) = plugins.parent() {
            let beside = entries(libraries)?;
            beside.iter().filter(|path| **path != plugins).for_each(|p| link(&mut links, "lib", p));
            // A folder of libraries that auditwheel adds to a wheel.
            for path in libraries.parent().map(entries).transpose()?.unwrap_or_default() {
                if path.extension().is_some_and(|extension| extension == "libs") {
                    link(&mut links, "", &path);
                }
            }
        }
        // The last link wins: `ours` replaces NIXL's plugins of these names, and all others remain.
        links.extend(names.iter().map(|name| (Path::new(PLUGINS).join(name), ours.clone())));
        Ok(Self { links })
    }

    /// A name that no other links have.
    pub(crate) fn name(&self) -> String {
        let mut hash = Sha256::new();
        for (at, target) in &self.links {
            for path in [at, target] {
                hash.update(path.as_os_str().as_bytes());
                hash.update([0]);
            }
        }
        hash.finalize().iter().take(16).fold(String::new(), |mut name, byte| {
            let _ = write!(name, "{byte:02x}");
            name
        })
    }

    /// Whether a folder holds these links. Its other contents do not matter.
    pub(crate) fn is_at(&self, folder: &Path) -> bool {
        let there = |(at, target): (&PathBuf, &PathBuf)| {
            fs::read_link(folder.join(at)).is_ok_and(|found| found == *target)
        };
        self.links.iter().all(there)
    }
}

fn entries(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    let read = fs::read_dir(folder).map_err(Error::io(folder))?;
    let paths = read.map(|entry| entry.map(|entry| entry.path()));
    paths.collect::<Result<_, _>>().map_err(Error::io(folder))
}

fn link(links: &mut BTreeMap<PathBuf, PathBuf>, folder: &str, target: &Path) {
    if let Some(name) = target.file_name() {
        links.insert(Path::new(folder).join(name), target.to_owned());
    }
}

fn is_plugin(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().as_bytes();
    name.starts_with(b"libplugin_") && name.ends_with(b".so")
}
