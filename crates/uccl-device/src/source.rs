//! Reads files below a root. A missing file is `None`.

use std::{
    fs,
    path::{Path, PathBuf},
    str::FromStr,
};

/// The folder that stands for `/`.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    root: PathBuf,
}

impl Source {
    pub(crate) fn new(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// Whether this is the running machine, so that system calls describe the same machine.
    pub(crate) fn is_live(&self) -> bool {
        self.root == Path::new("/")
    }

    /// `path` is relative to the root.
    pub(crate) fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        self.root.join(path)
    }

    /// A file's text without surrounding white space; `None` if missing, unreadable or empty.
    pub(crate) fn text(&self, path: impl AsRef<Path>) -> Option<String> {
        let text = fs::read_to_string(self.path(path)).ok()?;
        let text = text.trim();
        (!text.is_empty()).then(|| text.to_owned())
    }

    /// A file's text as a value.
    pub(crate) fn value<T: FromStr>(&self, path: impl AsRef<Path>) -> Option<T> {
        self.text(path)?.parse().ok()
    }

    /// A file's `0x…` number.
    pub(crate) fn hex(&self, path: impl AsRef<Path>) -> Option<u32> {
        let text = self.text(path)?;
        u32::from_str_radix(text.strip_prefix("0x").unwrap_or(&text), 16).ok()
    }

    /// The names in a folder, sorted; empty if it is missing.
    pub(crate) fn names(&self, folder: impl AsRef<Path>) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.path(folder)) else { return Vec::new() };
        let mut names: Vec<_> =
            entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    /// The target of a symbolic link, which need not exist.
    pub(crate) fn link(&self, path: impl AsRef<Path>) -> Option<PathBuf> {
        fs::read_link(self.path(path)).ok()
    }

    /// The last component of a symbolic link's target, for example a driver's name.
    pub(crate) fn link_name(&self, path: impl AsRef<Path>) -> Option<String> {
        Some(self.link(path)?.file_name()?.to_str()?.to_owned())
    }

    /// The path with all symbolic links resolved.
    pub(crate) fn resolved(&self, path: impl AsRef<Path>) -> Option<PathBuf> {
        fs::canonicalize(self.path(path)).ok()
    }
}
