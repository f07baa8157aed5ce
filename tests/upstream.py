"""Runs UCCL's own p2p tests, unchanged, against this module: those that need no other vendor's
library.

``python tests/upstream.py CHECKOUT`` where CHECKOUT is a clone of uccl-project/uccl at its main
branch, in an environment with this project's wheel and torch. All but two need one or two NVIDIA
GPUs; tests that lack them are skipped and named. ``test_gpu_index_mapping.py`` compares PCI
addresses of ``parse_metadata``, which returns the index here: it is expected to fail.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

#: The number of processes of each test, and the number of GPUs that they need.
TESTS = {
    "test_engine_nvlink": (2, 1),
    "test_engine_nvlink_metadata": (2, 1),
    "test_engine_onesided_ipc": (2, 1),
    "test_engine_read": (1, 1),
    "test_engine_write": (1, 1),
    "test_gpu_index_mapping": (1, 2),
    "test_ray_api": (2, 1),
    "test_register_memory_cache": (1, 0),
    "test_remove_remote_endpoint": (2, 0),
}
DIFFERS = {"test_gpu_index_mapping"}
SECONDS = 300


def gpus() -> int:
    code = "import torch; print(torch.cuda.device_count())"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return int(found.stdout)


def run(folder: Path, name: str, processes: int) -> str | None:
    """Runs a test; returns the reason of a failure."""
    launch = (
        ["-m", "torch.distributed.run", f"--nproc_per_node={processes}"] if processes > 1 else []
    )
    command = [sys.executable, *launch, f"{name}.py"]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            timeout=SECONDS,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    except subprocess.TimeoutExpired:
        return f"did not end within {SECONDS} s"
    # torchrun's own report is 2,000 characters long, and the test's reason stands before it.
    return None if done.returncode == 0 else done.stdout[-8000:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("tests", nargs="*", default=list(TESTS), help="names; all unless given")
    options = parser.parse_args()
    have, failed = gpus(), False
    for name in options.tests:
        processes, needs = TESTS[name]
        if have < needs:
            print(f"skipped  {name}: lacks {needs} GPUs")
            continue
        why = run(options.checkout / "p2p" / "tests", name, processes)
        expected = (why is not None) == (name in DIFFERS)
        failed |= not expected
        print(
            f"{'passed' if why is None else 'differs' if expected else 'FAILED':8} {name}",
            flush=True,
        )
        if why is not None:
            print(why)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
