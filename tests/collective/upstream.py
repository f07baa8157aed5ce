"""UCCL's benchmark_uccl_collective.py, of a clone of its repository, over this project's ``uccl.collective``.

    python tests/collective/upstream.py CHECKOUT [--revision 814070cd] [-- ARGUMENT ...]

Two processes, or four for ``--ring``, by torchrun, in every mode of the program. On GPUs it runs as it is. Without one, it
runs with assertions off, and with the CPU in place of ``cuda``: its tensors are on "cuda" and it asserts that.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = "p2p/benchmarks/benchmark_uccl_collective.py"
MODES: dict[str, tuple[int, list[str]]] = {
    "plain": (2, []),
    "async": (2, ["--async-api"]),
    "dual": (2, ["--dual"]),
    "ring": (4, ["--ring"]),
}
#: The program's text runs behind this where there is no GPU.
ON_CPUS = """
import sys, torch
from torch.overrides import TorchFunctionMode
class OnCpus(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)
torch.cuda.set_device = lambda _: None
torch.Tensor.cuda = lambda self, *_, **__: self
import runpy
sys.argv = sys.argv[1:]
with OnCpus():
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(program: Path, mode: str, arguments: list[str]) -> subprocess.CompletedProcess:
    """Runs the program in one mode."""
    import torch

    ranks, flags = MODES[mode]
    has_gpus = torch.cuda.device_count() > 0
    if has_gpus:
        ranks = min(ranks, torch.cuda.device_count())
    file = program
    env = {**os.environ, "PYTHONOPTIMIZE": "" if has_gpus else "1"}
    if not has_gpus:
        file = program.with_name("on_cpus.py")
        file.write_text(ON_CPUS)
        flags = [str(program), *flags]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={ranks}", str(file), *flags, *arguments]
    return subprocess.run(command, env=env, text=True, capture_output=True, timeout=550)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", help="a clone, with or without a work tree")
    parser.add_argument("--revision", default="814070cd")
    parser.add_argument("arguments", nargs="*", help="of the program")
    options = parser.parse_args()
    show = ["git", "-C", options.checkout, "show", f"{options.revision}:{PROGRAM}"]
    text = subprocess.run(show, check=True, capture_output=True, text=True).stdout
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "benchmark_uccl_collective.py")
        program.write_text(text)
        for mode in MODES:
            ran = run(program, mode, options.arguments)
            said = ran.stdout + ran.stderr
            well = (
                ran.returncode == 0
                and "completed successfully" in said
                and "WARNING: " not in ran.stdout
            )
            print(f"{mode}: {'ok' if well else 'FAILED'}")
            print("\n".join(line for line in said.splitlines() if "Gbps" in line or not well))
            failed += [] if well else [mode]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
