//! The Python of another processor, in qemu. Debian's packages for it are unpacked into a folder
//! and not installed on this system.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use super::cross::Target;
use crate::{shell::Program, tools, tree};

/// Debian's packages that the wheel needs: Python, and the library that NIXL's plugin is linked
/// with.
const PACKAGES: [&str; 2] = ["python3", "libstdc++6"];

/// An emulator, and the folder that programs take for the root.
pub(super) struct Emulation {
    emulator: String,
    root: PathBuf,
}

impl Emulation {
    /// Provides the emulator and the folder, or the name of the missing part.
    pub(super) fn provide(target: &Target) -> Result<Result<Self, String>> {
        let emulator = format!("qemu-{}", target.name);
        let is_there = || Program::new(&emulator).args(["--version"]).works();
        if !is_there() {
            tools::try_to_install(&["qemu-user"]);
            if !is_there() {
                return Ok(Err(format!("lacks {emulator} (Debian's qemu-user)")));
            }
        }
        let root = tree::scratch().join(format!("root-{}", target.name));
        let made = Self { emulator, root };
        if !made.works() {
            if let Err(error) = made.unpack(target.debian) {
                return Ok(Err(format!("lacks Debian's Python for it: {error:#}")));
            }
            if !made.works() {
                return Ok(Err(format!("Python does not run in {}", made.emulator)));
            }
        }
        Ok(Ok(made))
    }

    /// The emulated Python.
    pub(super) fn python(&self) -> Program {
        let python = self.root.join("usr/bin/python3");
        Program::new(&self.emulator).args([
            "-L".as_ref(),
            self.root.as_os_str(),
            python.as_os_str(),
        ])
    }

    fn works(&self) -> bool {
        self.python().args(["-c", "import multiprocessing"]).works()
    }

    /// Downloads Debian's packages, with lists of their own, and unpacks them.
    fn unpack(&self, architecture: &str) -> Result<()> {
        let apt = Apt { folder: self.root.with_extension("apt"), architecture };
        for folder in ["lists/partial", "archives/partial"] {
            fs::create_dir_all(apt.folder.join(folder))?;
        }
        fs::write(apt.status(), "")?;
        apt.get().args(["update"]).run()?;
        apt.get()
            .args(["install", "--download-only", "--yes", "--no-install-recommends"])
            .args(PACKAGES)
            .run()?;
        fs::create_dir_all(&self.root)?;
        let archives = apt.folder.join("archives");
        for entry in fs::read_dir(&archives).with_context(|| archives.display().to_string())? {
            let file = entry?.path();
            if file.extension().is_some_and(|extension| extension == "deb") {
                unpack(&file, &self.root)?;
            }
        }
        Ok(())
    }
}

fn unpack(package: &Path, to: &Path) -> Result<()> {
    let (well, said) = Program::new("dpkg-deb").args(["--extract"]).args([package, to]).ask()?;
    anyhow::ensure!(well, "dpkg-deb: {said}");
    Ok(())
}

/// apt for another machine: it uses this machine's sources and installs nothing.
struct Apt<'a> {
    folder: PathBuf,
    architecture: &'a str,
}

impl Apt<'_> {
    fn status(&self) -> PathBuf {
        self.folder.join("status")
    }

    fn get(&self) -> Program {
        let folder = self.folder.display();
        let settings = [
            format!("APT::Architecture={}", self.architecture),
            format!("APT::Architectures::={}", self.architecture),
            format!("Dir::State::Lists={folder}/lists"),
            format!("Dir::State::Status={}", self.status().display()),
            format!("Dir::Cache={folder}"),
            "Debug::NoLocking=1".into(),
            "APT::Sandbox::User=root".into(),
        ];
        let settings = settings.into_iter().map(|setting| format!("--option={setting}"));
        Program::new("apt-get").args(settings).env("DEBIAN_FRONTEND", "noninteractive")
    }
}
