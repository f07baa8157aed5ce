"""Runs this project and its peers side by side between two GPUs of this machine, and holds its bars against them."""

import argparse
import sys
from pathlib import Path

from bench.gpu import cases as gpu_cases
from bench.gpu import peers as gpu_peers
from bench.gpu import rounds as gpu_run
from bench.lib.paths import ROOT


def arguments() -> argparse.Namespace:
    known = [peer.name for peer in gpu_peers.every()]
    parser = gpu_run.parser(__doc__, gpu_cases, known, who="who runs", seconds=0.2)
    parser.add_argument("--python", default=sys.executable, help="the Python that has torch")
    parser.add_argument(
        "--uccl-bin", type=Path, default=ROOT / "target/release/uccl", help="the project's command"
    )
    return gpu_run.parse(parser, gpu_cases, known)


def main() -> int:
    options = arguments()
    context = gpu_peers.GpuContext(
        seconds=options.seconds,
        uccl_bin=options.uccl_bin,
        gpus=gpu_run.gpus(options),
        python=options.python,
        folders=gpu_run.unpacked(options),
    )
    return gpu_run.run(options, context, gpu_peers.every(), gpu_cases)


if __name__ == "__main__":
    sys.exit(main())
