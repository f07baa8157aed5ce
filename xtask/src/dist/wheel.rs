//! The wheels and the source distribution: made, inspected, and used.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use super::{
    PartOutcome,
    cross::{GLIBC, Target},
    emulated::Emulation,
    environment::Environment,
    folder,
};
use crate::{python, shell::Program, tree};

/// Time limit for an optimized build of everything for another machine.
const LIMIT: Duration = Duration::from_secs(60 * 60);

/// The paths of the plugins of NIXL and NCCL in the source tree's `python` folder and in the wheel.
const PLUGINS: [&str; 2] = ["uccl/nixl/libplugin_UCCL.so", "uccl/lib/libnccl-net-uccl.so"];

/// The document with an example that moves data between two processes and checks it.
const EXAMPLE: &str = "python/README.md";

/// Makes a wheel, and uses it if that is possible.
pub(super) fn make(target: &Target) -> Result<PartOutcome> {
    let with = match Environment::provide()? {
        Ok(with) => with,
        Err(reason) => return Ok(PartOutcome::lacking(reason)),
    };
    if let Some(reason) = target.lacking() {
        return Ok(PartOutcome::lacking(reason));
    }
    let wheel = build(target, &with)?;
    let mut made = PartOutcome::from(needs(&wheel, target, &with)?);
    if target.is_here() {
        made.found.push(try_here(&wheel)?);
        return Ok(made);
    }
    match Emulation::provide(target)? {
        Ok(emulated) => made.found.push(try_emulated(&emulated, &wheel, &with)?),
        Err(reason) => made.lacks.push(format!("made, and not run: {reason}")),
    }
    Ok(made)
}

/// Makes the source distribution, and a wheel from it, as pip does where no wheel fits.
pub(super) fn sdist() -> Result<PartOutcome> {
    let with = match Environment::provide()? {
        Ok(with) => with,
        Err(reason) => return Ok(PartOutcome::lacking(reason)),
    };
    let here = tree::scratch().join("dist-sdist");
    empty(&here)?;
    with.program("maturin").args(["sdist", "--out"]).args([&here]).run()?;
    let sdist = only(&here, "tar.gz")?;
    let program = with.pip_wheel(&sdist, &here)?;
    // Uses a target folder without files of an earlier build: all files of a source distribution
    // have the same old date, so cargo would not notice that they have changed.
    program.env("CARGO_TARGET_DIR", here.join("target")).limit(LIMIT).run()?;
    let tried = try_here(&only(&here, "whl")?)?;
    publish(&sdist)?;
    Ok(format!("a wheel was built from it: {tried}").into())
}

fn build(target: &Target, with: &Environment) -> Result<PathBuf> {
    let here = tree::scratch().join(format!("dist-{}", target.name));
    empty(&here)?;
    let program = with.pip_wheel(tree::root(), &here)?;
    let built = target.prepare(program, with)?.limit(LIMIT).run();
    if !target.is_here() {
        // The plugins are for another processor: they are useless in the source tree, and nobody
        // would notice.
        for plugin in PLUGINS {
            let _ = fs::remove_file(tree::root().join("python").join(plugin));
        }
    }
    built?;
    publish(&only(&here, "whl")?)
}

/// The report of auditwheel, with the field that is read here.
#[derive(Deserialize)]
struct Audit {
    /// The oldest platform that has everything that the wheel needs.
    overall_tag: String,
}

/// Fails if the wheel needs more than its name says. Returns its needs as text.
fn needs(wheel: &Path, target: &Target, with: &Environment) -> Result<String> {
    let name = wheel.file_name().unwrap_or_default().to_string_lossy().into_owned();
    ensure!(name.contains(&target.platform()), "{name} is not for {}", target.platform());
    let listed =
        Program::new(with.python()).args(["-m", "zipfile", "--list"]).args([wheel]).ask()?;
    for plugin in PLUGINS {
        ensure!(listed.0 && listed.1.contains(plugin), "{name} has no {plugin}");
    }
    let (well, said) = with.program("auditwheel").args(["show", "--json"]).args([wheel]).ask()?;
    ensure!(well, "auditwheel show: {said}");
    let Audit { overall_tag } = serde_json::from_str(&said).context("what auditwheel says")?;
    let needed = glibc(&overall_tag)
        .with_context(|| format!("{name} is {overall_tag}, and not for systems with glibc"))?;
    ensure!(needed <= GLIBC, "{name} is {overall_tag}: it needs more than it says");
    let (major, minor) = needed;
    Ok(format!("{name}: needs glibc {major}.{minor} (auditwheel: {overall_tag})"))
}

/// The version of glibc in a platform's name.
fn glibc(platform: &str) -> Option<(u32, u32)> {
    let mut numbers = platform.strip_prefix("manylinux_")?.split('_');
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// The transports that the wheel is used over: the best one, and TCP.
const PATHS: [&str; 2] = ["", "tcp"];

/// Moves data with the wheel alone, on this machine.
fn try_here(wheel: &Path) -> Result<String> {
    let folder = tree::scratch().join("clean");
    let python = python::make_environment(&folder, true)?;
    python::install(&python, wheel)?;
    move_data(&folder, || Program::new(&python).args(["-I"]))
}

/// Moves data with the wheel on an emulated processor.
fn try_emulated(emulated: &Emulation, wheel: &Path, with: &Environment) -> Result<String> {
    let folder = tree::scratch().join("dist-emulated");
    empty(&folder)?;
    let unpacked = folder.join("wheel");
    Program::new(with.python())
        .args(["-m", "zipfile", "--extract"])
        .args([wheel, &unpacked])
        .run()?;
    let moved = move_data(&folder, || emulated.python().env("PYTHONPATH", &unpacked))?;
    Ok(format!("{moved} (emulated)"))
}

/// Runs the example over each transport and returns its results.
fn move_data(folder: &Path, python: impl Fn() -> Program) -> Result<String> {
    let text = fs::read_to_string(tree::root().join(EXAMPLE))?;
    let example = text
        .split_once("```python\n")
        .and_then(|(_, rest)| rest.split_once("```"))
        .with_context(|| format!("{EXAMPLE} has no example in Python"))?;
    let file = folder.join("example.py");
    fs::write(&file, example.0)?;
    let mut moved = Vec::new();
    for path in PATHS {
        let program = python().args([&file]).in_folder(folder).env("UCCL_P2P_TRANSPORT", path);
        let (well, said) = program.limit(Duration::from_secs(120)).ask()?;
        ensure!(well && said.contains(" True"), "the example of {EXAMPLE}, {path}: {said}");
        moved.extend(said.lines().filter(|line| line.starts_with("moved")).map(str::to_owned));
    }
    Ok(moved.join(", "))
}

/// Copies a file into the release.
fn publish(file: &Path) -> Result<PathBuf> {
    let to = folder().join(file.file_name().unwrap_or_default());
    fs::copy(file, &to).with_context(|| to.display().to_string())?;
    Ok(to)
}

/// The only file with this ending.
fn only(folder: &Path, ending: &str) -> Result<PathBuf> {
    let files = super::files(folder)?;
    let mut found = files.into_iter().filter(|file| file.to_string_lossy().ends_with(ending));
    match (found.next(), found.next()) {
        (Some(file), None) => Ok(file),
        (None, _) => bail!("no {ending} was made in {}", folder.display()),
        (Some(_), Some(_)) => bail!("more than one {ending} was made in {}", folder.display()),
    }
}

fn empty(folder: &Path) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder)
            .with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))
}

#[cfg(test)]
mod tests {
    use super::{super::cross, *};

    #[test]
    fn the_version_of_glibc_is_read() {
        assert_eq!(glibc("manylinux_2_28_x86_64"), Some((2, 28)));
        assert_eq!(glibc("linux_x86_64"), None);
        assert!(glibc("manylinux_2_5_x86_64").is_some_and(|needed| needed <= GLIBC));
        assert!(glibc("manylinux_2_34_aarch64").is_some_and(|needed| needed > GLIBC));
    }

    #[test]
    fn wheels_are_named_after_their_platform() {
        assert_eq!(cross::AARCH64.platform(), "manylinux_2_28_aarch64");
    }
}
