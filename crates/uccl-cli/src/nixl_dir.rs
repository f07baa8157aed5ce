//! `uccl nixl-dir`: a folder for `NIXL_PLUGIN_DIR` that holds NIXL's plugins and this project's.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};
use clap::Args;
use uccl_nixl_dir::{PLUGIN, provide, provide_instead_of_ucx};

/// Finds the plugins of the NIXL that Python would import; the Python package runs the same text,
/// which is its file. Here is a link to it, so that cargo packages it with this crate.
const FIND: &str = include_str!("find_nixl.py");

/// Print a folder for NIXL_PLUGIN_DIR that holds NIXL's own plugins and UCCL's.
///
/// NIXL looks for plugins in one folder only. This one, in the user's cache, holds links to all of
/// them: export NIXL_PLUGIN_DIR=$(uccl nixl-dir)
#[derive(Args)]
pub(crate) struct NixlDirArgs {
    /// Where NIXL's own plugins are [default: those of the NIXL that python3 imports]
    #[arg(long, value_name = "DIR")]
    nixl_plugins: Option<PathBuf>,
    /// UCCL's plugin [default: libplugin_UCCL.so beside this program, or in ../lib/nixl from there]
    #[arg(long, value_name = "FILE")]
    plugin: Option<PathBuf>,
    /// UCCL's plugin under UCX's name too, for programs that ask NIXL for UCX alone
    #[arg(long)]
    instead_of_ucx: bool,
}

pub(crate) fn run(args: &NixlDirArgs) -> Result<()> {
    let ours = match &args.plugin {
        Some(file) => file.clone(),
        None => beside_this_program()?,
    };
    let theirs = match &args.nixl_plugins {
        Some(folder) => folder.clone(),
        None => pythons_nixl()?,
    };
    let provide = if args.instead_of_ucx { provide_instead_of_ucx } else { provide };
    println!("{}", provide(&ours, &theirs)?.display());
    Ok(())
}

/// Where an installation has the plugin, or a build.
fn beside_this_program() -> Result<PathBuf> {
    let program = env::current_exe().context("where this program is")?;
    let folder = program.parent().unwrap_or(Path::new("/"));
    let places = [folder.join("../lib/nixl").join(PLUGIN), folder.join(PLUGIN)];
    match places.iter().find(|place| place.exists()) {
        Some(found) => Ok(found.clone()),
        None => bail!(
            "{PLUGIN} is neither beside {} nor in ../lib/nixl from there: \
             cargo build --release -p uccl-nixl makes it, and --plugin says where it is",
            program.display()
        ),
    }
}

/// The folder of plugins that NIXL's Python package comes with.
fn pythons_nixl() -> Result<PathBuf> {
    const ELSE: &str = "if NIXL is elsewhere, say so with --nixl-plugins";
    let answer = Command::new("python3").args(["-c", FIND]).output();
    let answer = answer.with_context(|| format!("cannot ask python3 where NIXL is; {ELSE}"))?;
    if !answer.status.success() {
        let said = String::from_utf8_lossy(&answer.stderr);
        bail!("{} ({ELSE})", said.lines().last().unwrap_or("python3 does not know where NIXL is"));
    }
    Ok(PathBuf::from(String::from_utf8(answer.stdout)?.trim_end_matches('\n')))
}
