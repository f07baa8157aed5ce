//! A copy of the working tree, in which guards are broken.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, anyhow, ensure};

use super::list::Mutant;
use crate::{shell::Program, tree};

/// The copy; it and what is built in it stay for the next time.
pub(super) struct Copy {
    folder: PathBuf,
}

impl Copy {
    /// As the working tree is now. Files that are the same stay as they are, so that little is built again.
    pub(super) fn make() -> Result<Self> {
        let copy = Self { folder: tree::scratch().join("mutants/tree") };
        let (well, files) = Program::new("git")
            .args(["ls-files", "--cached", "--others", "--exclude-standard"])
            .ask()?;
        ensure!(well, "git: {files}");
        for file in files.lines() {
            let from = tree::root().join(file);
            // Deleted and not yet committed.
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

    /// The copy without a guard, until what this returns is dropped.
    pub(super) fn with(&self, mutant: &Mutant) -> Result<Broken<'_>> {
        // Of the copy: the tree may have changed since.
        let sound = fs::read_to_string(self.folder.join(&mutant.file))?;
        let broken = mutant.apply(&sound).map_err(|e| anyhow!(e))?;
        let restored = Broken { copy: self, file: mutant.file.clone(), sound };
        self.write(&mutant.file, broken.as_bytes())?;
        Ok(restored)
    }

    /// Cargo, in the copy.
    pub(super) fn cargo(&self, loom: bool) -> Program {
        let target = self.folder.with_file_name("target");
        // One file changes at a time, and what is built stays for the next.
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

/// A guard is broken; dropped, it is whole again.
pub(super) struct Broken<'a> {
    copy: &'a Copy,
    file: String,
    sound: String,
}

impl Drop for Broken<'_> {
    fn drop(&mut self) {
        if let Err(e) = self.copy.write(&self.file, self.sound.as_bytes()) {
            eprintln!("{} stays broken in the copy: {e:#}", self.file);
        }
    }
}
