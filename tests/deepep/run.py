"""Runs DeepEP's own suites, unchanged, on this project's ``deep_ep``.

    python tests/deepep/run.py CHECKOUT --ranks 2,4                     # a process for each rank, each with a GPU
    python tests/deepep/run.py CHECKOUT --ranks 2 --on emulated         # ranks in threads, on the emulated GPU of tests/ep
    python tests/deepep/run.py CHECKOUT --ranks 8 --on cpu --only shrink

``CHECKOUT`` is a folder with DeepEP's sources; nothing in it is compiled or changed. Its helpers
(``deep_ep/utils``) are copied beside the modules of ``python/deep_ep``, in a folder of their own
that Python finds first. One helper is replaced: ``bench_kineto`` looks for kernels by DeepEP's
names, so ``timing.py`` times whole calls. ``uccl`` has to be installed, or be found by
``PYTHONPATH``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
OURS = HERE.parents[1] / "python" / "deep_ep" / "deep_ep"
#: Sizes that a CPU ends within seconds.
SMALL = {
    "legacy/test_low_latency.py": "--num-tokens 20 --hidden 1024 --num-experts 48 --num-topk 4",
    "legacy/test_intranode.py": "--num-tokens 40 --hidden 512 --num-experts 48 --num-topk 4",
    "elastic/test_ep.py": "--num-tokens 12 --hidden 256 --num-experts 16 --num-topk 3",
    "elastic/test_barrier.py": "",
}
ELASTIC = "elastic/test_ep.py"
#: The number of output lines that are printed of a failed suite.
LINES = 12


@dataclass(frozen=True)
class Mode:
    """A suite and its arguments."""

    name: str
    suite: str
    arguments: str = ""
    least: int = 1
    """The least number of ranks: the suite's shrink test has ranks 1, 3 and 5 fail."""


#: Arguments of the test of DeepEP's second interface. With each the test tries all modes of calls.
SETTINGS = {
    "": "",
    "unsynced": "--do-cpu-sync 0",
    "masked": "--masked-ratio 0.3",
    "masked unsynced": "--masked-ratio 0.5 --do-cpu-sync 0",
    "unbalanced": "--unbalanced-ratio 2",
    "unbalanced precise": "--unbalanced-ratio 1.5 --precise-unbalanced-ratio",
    "single reductions": "--allow-multiple-reduction 0",
    "single reductions unsynced": "--allow-multiple-reduction 0 --do-cpu-sync 0 --masked-ratio 0.3",
    "flat overlapping": "--allow-hybrid-mode 0 --prefer-overlap-with-compute 1",
    # Without --do-cpu-sync 0: the suite would compare the received rows with all rows of a second
    # call.
    "deterministic": "--deterministic",
}
MODES = [
    Mode("low latency", "legacy/test_low_latency.py"),
    Mode("low latency logfmt", "legacy/test_low_latency.py", "--use-logfmt"),
    Mode("low latency no nvlink", "legacy/test_low_latency.py", "--disable-nvlink"),
    Mode("low latency shrink", "legacy/test_low_latency.py", "--shrink-test", least=6),
    Mode("intranode", "legacy/test_intranode.py"),
    *(
        Mode(f"elastic {name}".rstrip(), ELASTIC, f"--skip-perf-test {arguments}".rstrip())
        for name, arguments in SETTINGS.items()
    ),
    Mode("barrier", "elastic/test_barrier.py"),
]


def overlay(checkout: Path, folder: Path) -> None:
    """Copies DeepEP's helpers beside our modules."""
    package = folder / "deep_ep"
    shutil.copytree(OURS, package, ignore=shutil.ignore_patterns("__pycache__"))
    for helper in sorted((checkout / "deep_ep" / "utils").glob("*.py")):
        place = package / "utils" / helper.name
        if helper.name == "testing.py":
            shutil.copy(helper, place.with_name("_testing.py"))
            shutil.copy(HERE / "timing.py", place)
        elif not place.exists():
            shutil.copy(helper, place)


def free_port() -> int:
    """A TCP port without a listener."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run(mode: Mode, ranks: int, options: argparse.Namespace, folder: Path) -> tuple[str, str]:
    """Runs a mode. Returns its result in words and its output."""
    if ranks < mode.least:
        return f"not run: needs {mode.least} ranks", ""
    script = options.checkout / "tests" / mode.suite
    sizes = SMALL[mode.suite] if options.on != "cuda" else ""
    arguments = [
        *sizes.split(),
        *mode.arguments.split(),
        *options.more.split(),
        "--num-processes",
        str(ranks),
    ]
    in_threads = [] if options.on == "cuda" else [str(HERE / "in_threads.py"), options.on]
    # The suite runs in its own folder, so relative paths are made absolute.
    paths = [
        str(folder),
        *(
            os.path.abspath(path)
            for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)
            if path
        ),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        # If a rank fails, the others wait this long for it, and a shrink test waits for each
        # missing rank.
        "UCCL_EP_TIMEOUT_SECS": str(options.timeout),
    }
    if not options.compiled:
        # Helpers are decorated with torch.compile, which needs a C compiler and takes a minute.
        environment["TORCHDYNAMO_DISABLE"] = "1"
    command = [sys.executable, *in_threads, str(script), *arguments]
    try:
        done = subprocess.run(
            command,
            env=environment,
            cwd=script.parent,
            text=True,
            timeout=options.limit,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except subprocess.TimeoutExpired as late:
        told = late.stdout or ""
        return f"failed: not over after {options.limit} s", told if isinstance(
            told, str
        ) else told.decode(errors="replace")
    return "passed" if done.returncode == 0 else f"failed: {done.returncode}", done.stdout


def main() -> int:
    """Runs the modes that the command line selects."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=lambda path: Path(path).resolve())
    parser.add_argument("--ranks", default="2", help="how many, with commas between them")
    parser.add_argument("--on", choices=["cuda", "emulated", "cpu"], default="cuda")
    parser.add_argument(
        "--only",
        default="",
        help="words, with commas between them: modes whose names have one of them",
    )
    parser.add_argument("--without", default="", help="the same, of modes that are left out")
    parser.add_argument("--more", default="", help="more arguments for each suite")
    parser.add_argument(
        "--timeout", type=float, default=15, help="seconds that a call waits for its peers"
    )
    parser.add_argument("--limit", type=float, default=240, help="seconds that a mode may take")
    parser.add_argument(
        "--budget", type=float, default=float("inf"), help="seconds behind which no mode is begun"
    )
    parser.add_argument("--compiled", action="store_true", help="with torch.compile")
    options = parser.parse_args()
    words, others = (
        [word for word in text.split(",") if word] for text in (options.only, options.without)
    )
    failed, started = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        overlay(options.checkout, folder)
        for ranks in map(int, options.ranks.split(",")):
            for mode in MODES:
                if (
                    words
                    and not any(word in mode.name for word in words)
                    or any(word in mode.name for word in others)
                ):
                    continue
                begun = time.monotonic()
                if begun - started > options.budget:
                    said, printed = "not run: no time is left", ""
                else:
                    said, printed = run(mode, ranks, options, folder)
                print(
                    f"{ranks} ranks, {mode.name}: {said} ({time.monotonic() - begun:.0f} s)",
                    flush=True,
                )
                if said.startswith("failed"):
                    failed += 1
                    print("    " + "\n    ".join(printed.splitlines()[-LINES:]), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
