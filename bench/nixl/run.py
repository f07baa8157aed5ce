"""Runs NIXL with this project's backend and with UCX in turn, and holds the project's bars against them."""

import argparse
import os
import sys
from pathlib import Path

from bench.gpu import rounds as gpu_run
from bench.lib import install
from bench.lib.paths import PYTHON
from bench.lib.rounds import say
from bench.nixl import cases as nixl_cases
from bench.nixl import peers as nixl_peers


def arguments() -> argparse.Namespace:
    known = [peer.name for peer in nixl_peers.every()]
    parser = gpu_run.parser(__doc__, nixl_cases, known, who="backends", seconds=0.3)
    parser.add_argument(
        "--install", action="store_true", help="install NIXL first, as bench/host/run.py does"
    )
    parser.add_argument(
        "--progress-thread", action="store_true", help="agents with a progress thread"
    )
    parser.add_argument(
        "--python",
        default=str(PYTHON) if PYTHON.exists() else sys.executable,
        help="the Python that runs NIXL, for GPU memory with torch",
    )
    parser.add_argument(
        "--plugin-dir",
        type=Path,
        metavar="DIR",
        help="a folder with this project's plugin instead of its wheel's",
    )
    parser.add_argument(
        "--before-plugin-dir",
        type=Path,
        metavar="DIR",
        help="a folder with an earlier plugin, to be measured beside the others",
    )
    return gpu_run.parse(parser, nixl_cases, known)


def main() -> int:
    options = arguments()
    # This run's options, and not the environment, select each backend's folder.
    os.environ.pop("NIXL_PLUGIN_DIR", None)
    if options.install:
        for name, reason in install.install(with_torch=False).items():
            say(f"{name}: not installed: {reason}")
        options.python = str(PYTHON)
    context = nixl_peers.NixlContext(
        seconds=options.seconds,
        uccl_bin=Path(),
        gpus=gpu_run.gpus(options),
        python=options.python,
        folders=gpu_run.unpacked(options),
        progress_thread=options.progress_thread,
        plugin_dir=options.plugin_dir,
        before_plugin_dir=options.before_plugin_dir,
    )
    return gpu_run.run(options, context, nixl_peers.every(), nixl_cases)


if __name__ == "__main__":
    sys.exit(main())
