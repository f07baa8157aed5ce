//! `cargo xtask kernels`: compiles the CUDA kernels, with a toolchain that comes from PyPI.
//!
//! The PTX, which is text, is checked in: `crates/uccl-kernels/ptx`. This command makes it anew,
//! and `--check` compares it. Machine code goes to `kernels/out`, where the next build finds it.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Error, Result, bail, ensure};
use clap::Args;

use crate::{built, headers, python, shell::Program, tree};

/// Compile the kernels; with --check, compare with the PTX that is checked in
#[derive(Args)]
pub(crate) struct KernelsArgs {
    /// Change nothing: fail if the PTX does not match the sources, if a kernel spills or takes too
    /// many registers, or if its structs are not Rust's
    #[arg(long)]
    pub(crate) check: bool,
}

/// The toolchain's packages, each at its version: without versions, the compiler's package brings
/// parts of a newer toolkit that do not work with it.
const PACKAGES: [&str; 5] = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-cccl==13.0.85",
    "nvidia-cuda-runtime==13.0.96",
];

/// The architectures of machine code: Ampere, Hopper, Blackwell.
const ARCHITECTURES: [u32; 3] = [80, 90, 100];

/// The architecture of PTX: the oldest of them, since later GPUs run it too.
const PTX_ARCHITECTURE: u32 = 80;

/// The PTX's version as the compiler writes it, and as it is needed. A driver refuses PTX of a
/// version newer than the driver. 8.1, of CUDA 12.1, has everything that the kernels use, and the
/// assembler checks that each time.
const PTX_VERSIONS: (&str, &str) = (".version 9.0\n", ".version 8.1\n");

/// Two blocks of 256 threads, which copy, fit on a multiprocessor. A kernel that declares its
/// number of threads gets no more registers than fit; the local memory that it uses shows a lack of
/// registers.
const MOST_REGISTERS: u32 = 128;

/// A source of kernels.
struct Source {
    name: &'static str,
    /// The file, from the root of the repository.
    path: &'static str,
    /// The example that prints the layout of the kernels' parameters.
    layout: &'static str,
}

/// The kernels' sources.
const SOURCES: [Source; 3] = [
    Source { name: "copy", path: "kernels/copy.cu", layout: "kernel_layout" },
    Source { name: "ep", path: "kernels/ep/ep.cu", layout: "ep_kernel_layout" },
    Source { name: "ep_wide", path: "kernels/ep/wide.cu", layout: "ep_kernel_layout" },
];

/// A hint for the assembler that does not exist in PTX of the needed version.
const NEWER_HINT: &str = ".pragma \"used_bytes_mask";

/// Compiles all kernels, or compares them.
pub(crate) fn run(args: &KernelsArgs) -> Result<()> {
    let toolchain = Toolchain::provide()?;
    let folder = tree::scratch().join("kernels");
    fs::create_dir_all(&folder)?;
    let built = built::examples()?;
    headers::of_kernels(&built, args.check)?;
    for Source { name, path, layout } in SOURCES {
        toolchain.check_layout(built.executable(layout)?, &folder)?;
        let ptx = toolchain.ptx(name, path, &folder)?;
        let kept = tree::root().join(format!("crates/uccl-kernels/ptx/{name}.ptx"));
        if args.check {
            let same = fs::read_to_string(&kept).is_ok_and(|kept| kept == ptx);
            ensure!(same, "{} is not what {path} gives: run cargo xtask kernels", kept.display());
        } else {
            fs::write(&kept, &ptx).with_context(|| format!("cannot write {}", kept.display()))?;
            println!("wrote {}", kept.display());
        }
        let cubins = toolchain.assemble(name, &folder)?;
        if !args.check {
            toolchain.join(name, &cubins, &folder)?;
        }
    }
    Ok(())
}

/// Installs the toolchain, unless it is there.
pub(crate) fn fetch() -> Result<()> {
    Toolchain::provide().map(drop)
}

/// CUDA's compiler and the programs that belong to it.
struct Toolchain {
    programs: PathBuf,
}

impl Toolchain {
    /// The one that is installed already, or a new one.
    fn provide() -> Result<Self> {
        let folder = python::environment_of("cuda-13.0", &python::Requirements::alone(&PACKAGES))?
            .map_err(Error::msg)?;
        Ok(Self { programs: toolkit(&folder)?.join("bin") })
    }

    fn program(&self, name: &str) -> Program {
        Program::new(self.programs.join(name))
    }

    fn nvcc(&self) -> Program {
        // Names are relative to the root, so that the output does not depend on the repository's
        // place.
        self.program("nvcc").args(["-std=c++17", "-Werror", "all-warnings", "-Ikernels"])
    }

    /// Fails if the structs of the kernels differ from the library's, as the compiler sees them.
    fn check_layout(&self, example: &Path, folder: &Path) -> Result<()> {
        let assertions = match Program::new(example).ask()? {
            (true, text) => text,
            (false, said) => bail!("the layout of the kernels' parameters: {said}"),
        };
        let source = folder.join("layout.cu");
        fs::write(&source, assertions)?;
        let output = folder.join("layout.ptx");
        self.nvcc()
            .args([format!("-arch=compute_{PTX_ARCHITECTURE}").as_str(), "-ptx", "-o"])
            .args([&output, &source])
            .run()
            .context("the kernels' structs are not the library's")
    }

    /// Compiles a source to PTX that old drivers take.
    fn ptx(&self, name: &str, path: &str, folder: &Path) -> Result<String> {
        let output = folder.join(format!("{name}.ptx"));
        self.nvcc()
            .args([format!("-arch=compute_{PTX_ARCHITECTURE}").as_str(), "-ptx", "-o"])
            .args([output.as_path(), Path::new(path)])
            .run()?;
        let made = fs::read_to_string(&output)?;
        let (written, needed) = PTX_VERSIONS;
        ensure!(made.contains(written), "{} does not say {written}", output.display());
        let mut ptx = made.replacen(written, needed, 1);
        if ptx.contains(NEWER_HINT) {
            let lines = ptx.split_inclusive('\n').filter(|line| !line.contains(NEWER_HINT));
            ptx = lines.collect();
        }
        fs::write(&output, &ptx)?;
        Ok(ptx)
    }

    /// Makes machine code for each architecture from the PTX. Fails if a kernel takes too much.
    fn assemble(&self, name: &str, folder: &Path) -> Result<Vec<(u32, PathBuf)>> {
        let ptx = folder.join(format!("{name}.ptx"));
        let mut cubins = Vec::new();
        for architecture in ARCHITECTURES {
            let output = folder.join(format!("{name}.sm_{architecture}.cubin"));
            let program = self
                .program("ptxas")
                .args(["-v".to_owned(), format!("-arch=sm_{architecture}"), "-o".to_owned()])
                .args([&output, &ptx]);
            let mut said = String::new();
            program.watch(|line| said += &format!("{line}\n"))?;
            for used in usage(&said)? {
                println!("{name}, sm_{architecture}: {used:?}");
                used.judge()?;
            }
            cubins.push((architecture, output));
        }
        Ok(cubins)
    }

    /// Joins machine code and PTX in one file, for the next build.
    fn join(&self, name: &str, cubins: &[(u32, PathBuf)], folder: &Path) -> Result<()> {
        let out = tree::root().join("kernels/out");
        fs::create_dir_all(&out)?;
        let output = out.join(format!("{name}.fatbin"));
        let ptx = folder.join(format!("{name}.ptx"));
        let images = cubins.iter().map(|(architecture, cubin)| {
            format!("--image3=kind=elf,sm={architecture},file={}", cubin.display())
        });
        let forward = format!("--image3=kind=ptx,sm={PTX_ARCHITECTURE},file={}", ptx.display());
        self.program("fatbinary")
            .args(["-64", "--compress-all", &format!("--create={}", output.display())])
            .args(images.chain([forward]))
            .run()?;
        println!("wrote {}, {} KiB", output.display(), fs::metadata(&output)?.len() >> 10);
        Ok(())
    }
}

/// The toolkit's folder in an environment, for any version of Python.
fn toolkit(environment: &Path) -> Result<PathBuf> {
    let library = environment.join("lib");
    let folders = fs::read_dir(&library).with_context(|| library.display().to_string())?;
    let toolkits = folders.flatten().map(|entry| entry.path().join("site-packages/nvidia/cu13"));
    let mut with_compiler = toolkits.filter(|toolkit| toolkit.join("bin/nvcc").is_file());
    with_compiler.next().context("there is no nvcc")
}

/// A kernel's use of a multiprocessor, from `ptxas -v`.
#[derive(Debug, PartialEq, Eq)]
struct Usage {
    kernel: String,
    registers: u32,
    /// Bytes of local memory: spilled registers, and indexed arrays.
    local: u32,
}

impl Usage {
    fn judge(&self) -> Result<()> {
        let Self { kernel, registers, local } = self;
        ensure!(*local == 0, "{kernel} keeps {local} bytes in local memory");
        ensure!(
            *registers <= MOST_REGISTERS,
            "{kernel} takes {registers} registers, more than {MOST_REGISTERS}"
        );
        Ok(())
    }
}

/// Reads the output of `ptxas -v`.
fn usage(said: &str) -> Result<Vec<Usage>> {
    let mut found = Vec::new();
    let (mut kernel, mut local) = (None, None);
    for line in said.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            kernel = rest.split('\'').next().map(str::to_owned);
        } else if line.contains("bytes stack frame") {
            local = Some(line.split_whitespace().filter_map(|word| word.parse::<u32>().ok()).sum());
        } else if let Some((_, rest)) = line.split_once("Used ") {
            let registers = rest.split(' ').next().and_then(|number| number.parse().ok());
            let (Some(kernel), Some(local), Some(registers)) =
                (kernel.take(), local.take(), registers)
            else {
                bail!("cannot make sense of ptxas: {line}");
            };
            found.push(Usage { kernel, registers, local });
        }
    }
    ensure!(!found.is_empty(), "ptxas names no kernel");
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAID: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'copy' for 'sm_90'
ptxas info    : Function properties for copy
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 113 registers, used 1 barriers
ptxas info    : Compile time = 20.163 ms
";

    #[test]
    fn the_registers_and_local_memory_of_a_kernel_are_read() {
        let found = usage(SAID).expect("one kernel");
        assert_eq!(found, [Usage { kernel: "copy".to_owned(), registers: 113, local: 24 }]);
        assert!(found[0].judge().is_err());
        assert!(usage("ptxas info    : 0 bytes gmem").is_err());
        assert!(usage("ptxas info    : Used 113 registers").is_err());
    }

    #[test]
    fn spills_and_too_many_registers_are_faults() {
        let usage = |registers, local| Usage { kernel: "copy".to_owned(), registers, local };
        assert!(usage(128, 0).judge().is_ok());
        assert!(usage(129, 0).judge().is_err());
        assert!(usage(20, 1).judge().is_err());
    }
}
