//! A copy of the working tree, in which guards are broken.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, anyhow, ensure};

use super::list::Mutant;
use crate::{shell::Program, tree};

/// The copy. It and its builds are kept for the next run.
pub(super) struct TreeCopy {
    folder: PathBuf,
}

impl TreeCopy {
    /// Copies the working tree as it is now. Unchanged files are not written, so that little is
    /// built again.
    pub(super) fn make() -> Result<Self> {
        let copy = Self { folder: tree::scratch().join("mutants/tree") };
        let (well, files) = Program::new("git")
            .args(["ls-files", "--cached", "--others", "--exclude-standard"])
            .ask()?;
        ensure!(well, "git: {files}");
        for file in files.lines() {
            let from = tree::root().join(file);
            // The file is deleted, and the deletion is not committed.
            let Ok(bytes) = fs::read(&from) else { continue };
            copy.write(file, &bytes)?;
        }
        Ok(copy)
    }

    fn write(&self, file: &str, bytes: &[u8]) -> Result<()> {
        let to = self.folder.join(file);
        if fs::read(&to).is_ok_and(|there| there == bytes) {
            return Ok(());
        }
        fs::create_dir_all(to.parent().unwrap_or(&self.folder))?;
        fs::write(&to, bytes).with_context(|| to.display().to_string())
    }

    /// Breaks a guard in the copy until the returned value is dropped.
    pub(super) fn with(&self, mutant: &Mutant) -> Result<BrokenGuard<'_>> {
        // Reads the copy's file: the tree may have changed since.
        let sound = fs::read_to_string(self.folder.join(&mutant.file))?;
        let broken = mutant.apply(&sound).map_err(|e| anyhow!(e))?;
        let restored = BrokenGuard { copy: self, file: mutant.file.clone(), sound };
        self.write(&mutant.file, broken.as_bytes())?;
        Ok(restored)
    }

    /// Cargo, in the copy.
    pub(super) fn cargo(&self, loom: bool) -> Program {
        let target = self.folder.with_file_name("target");
        // Builds incrementally: one file changes at a time, and the builds are kept for the next
        // mutant.
        let cargo = Program::cargo(&[]).in_folder(&self.folder).env("CARGO_INCREMENTAL", "1");
        if !loom {
            return cargo.env("CARGO_TARGET_DIR", target);
        }
        // The flag changes every crate's build.
        cargo
            .env("RUSTFLAGS", "--cfg loom")
            .env("CARGO_TARGET_DIR", Path::new(&target).with_file_name("loom"))
            .env("CARGO_PROFILE_DEV_OPT_LEVEL", "1")
    }
}

/// A broken guard. Its drop restores the file.
pub(super) struct BrokenGuard<'a> {
    copy: &'a TreeCopy,
    file: String,
    sound: String,
}

impl Drop for BrokenGuard<'_> {
    fn drop(&mut self) {
        if let Err(e) = self.copy.write(&self.file, self.sound.as_bytes()) {
            eprintln!("{} stays broken in the copy: {e:#}", self.file);
        }
    }
}
