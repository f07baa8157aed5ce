//! The examples in C and C++, compiled against an installation by `cargo xtask install`, as users
//! do.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, bail};

use crate::{install, optimized::For, outcome::Outcome, shell::Program, tools, tree};

/// A CMake project that finds the library.
const CMAKE_LISTS: &str = "\
cmake_minimum_required(VERSION 3.16)
project(finds_uccl LANGUAGES C)
find_package(uccl 0.1 REQUIRED CONFIG)
add_executable(write write.c)
target_link_libraries(write PRIVATE uccl::uccl)
";

/// A program in C or C++.
struct Example {
    source: &'static str,
    compiler: &'static str,
    flags: &'static [&'static str],
}

const EXAMPLES: &[Example] = &[
    Example { source: "examples/c/write.c", compiler: "cc", flags: &["-std=gnu11"] },
    Example {
        source: "examples/cpp/engine.cpp",
        compiler: "c++",
        flags: &["-std=c++17", "-pthread"],
    },
];

/// Installs into a folder, moves the folder, and uses the library at the new place.
pub(crate) fn run() -> Result<Outcome> {
    for (lacks, there) in [
        ("a C++ compiler (g++)", tools::can_compile_cpp()),
        ("pkg-config", tools::has_pkg_config()),
    ] {
        if !there {
            return Ok(Outcome::skipped(format!("lacks {lacks}")));
        }
    }
    let prefix = install_and_move()?;
    for example in EXAMPLES {
        example.run(&prefix)?;
    }
    if !Program::new("cmake").args(["--version"]).works() {
        return Ok(Outcome::without(vec!["lacks cmake: finding the library with it".into()]));
    }
    with_cmake(&prefix).map(Outcome::from)
}

fn install_and_move() -> Result<PathBuf> {
    let (first, prefix) = (tree::scratch().join("install"), tree::scratch().join("installed"));
    for folder in [&first, &prefix] {
        if folder.exists() {
            fs::remove_dir_all(folder).with_context(|| folder.display().to_string())?;
        }
    }
    install::install(&first, For::Tests)?;
    fs::rename(&first, &prefix).with_context(|| first.display().to_string())?;
    Ok(prefix)
}

impl Example {
    fn run(&self, prefix: &Path) -> Result<()> {
        let program = prefix.join("example");
        Program::new(self.compiler)
            .args(["-Wall", "-Wextra", "-Werror", self.source, "-o"])
            .args([&program])
            .args(self.flags)
            .args(pkg_config(prefix)?.split_whitespace())
            .run()?;
        run_with(prefix, &program)
    }
}

/// The flags for the compiler and the linker, from pkg-config.
fn pkg_config(prefix: &Path) -> Result<String> {
    let program = Program::new("pkg-config").args(["--cflags", "--libs", "uccl"]);
    match program.env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig")).ask()? {
        (true, flags) => Ok(flags),
        (false, said) => bail!("pkg-config: {said}"),
    }
}

fn with_cmake(prefix: &Path) -> Result<()> {
    let folder = prefix.join("cmake");
    fs::create_dir_all(&folder)?;
    fs::write(folder.join("CMakeLists.txt"), CMAKE_LISTS)?;
    fs::copy(tree::root().join("examples/c/write.c"), folder.join("write.c"))?;
    let at = |what: &str, folder: &Path| format!("{what}{}", folder.display());
    Program::new("cmake")
        .args(["-S.", "-Bbuild", &at("-DCMAKE_PREFIX_PATH=", prefix)])
        .in_folder(&folder)
        .run()?;
    Program::new("cmake").args(["--build", "build"]).in_folder(&folder).run()?;
    run_with(prefix, &folder.join("build/write"))
}

fn run_with(prefix: &Path, program: &Path) -> Result<()> {
    let libraries = prefix.join("lib");
    Program::new(program).env("LD_LIBRARY_PATH", &libraries).limit(Duration::from_secs(60)).run()
}
