#!/usr/bin/env python3
"""Runs NIXL with this project's backend and with UCX in turn, and holds the project's bars against them."""

import argparse
import os
import re
import signal
import sys
from pathlib import Path

import bars
import install
import nixl_cases
import nixl_peers
import summary
import wheels
from paths import PYTHON
from rounds import Bench, names, present, say


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    known = [peer.name for peer in nixl_peers.every()]
    parser.add_argument("--install", action="store_true", help="install NIXL first, as bench/run.py does")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="a folder of wheels: NIXL, this project")
    parser.add_argument(
        "--only", metavar="SECTION,...", help=f"sections: {', '.join(nixl_cases.SECTIONS)}"
    )
    parser.add_argument("--peers", metavar="NAME,...", help=f"backends: {', '.join(known)}")
    parser.add_argument("--gpus", default="0,1", help="the GPU of the side that measures, and of the other")
    parser.add_argument("--progress-thread", action="store_true", help="agents with a progress thread")
    parser.add_argument("--rounds", type=int, default=5, help="rounds")
    parser.add_argument("--seconds", type=float, default=0.3, help="seconds a value is measured")
    parser.add_argument("--max-minutes", type=float, default=20, help="start no more work after so long")
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
    parser.add_argument("--revision", help="of the project, where git cannot tell")
    parser.add_argument("--json", metavar="FILE", help="also write everything as JSON")
    parser.add_argument("--check", action="store_true", help="exit 1 when a bar that was measured is not met")
    options = parser.parse_args()
    if not re.fullmatch(r"\d+,\d+", options.gpus):
        parser.error("--gpus: two numbers, as in 0,1")
    options.only = names(parser, "--only", options.only, nixl_cases.SECTIONS)
    options.peers = names(parser, "--peers", options.peers, known)
    return options


def main() -> int:
    options = arguments()
    # Each backend comes from where this run says.
    os.environ.pop("NIXL_PLUGIN_DIR", None)
    if options.install:
        for name, reason in install.install(with_torch=False).items():
            say(f"{name}: not installed: {reason}")
        options.python = str(PYTHON)
    folders, failures = wheels.unpack(options.wheels, options.python) if options.wheels else ({}, {})
    for peer, reason in failures.items():
        say(f"{peer}: its wheels cannot be unpacked: {reason}")
    context = nixl_peers.NixlContext(
        seconds=options.seconds,
        uccl_bin=Path(),
        gpus=tuple(int(number) for number in options.gpus.split(",")),
        python=options.python,
        folders=folders,
        progress_thread=options.progress_thread,
        plugin_dir=options.plugin_dir,
    )
    every = nixl_peers.every()
    running, said = present(every, options.peers, context)
    # One case at a time, so that both measure it within a few seconds.
    groups = [[case] for case in nixl_cases.plan(set(options.only))]
    bench = Bench(options, context, running, groups)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        bench.run()
    except KeyboardInterrupt:
        say("interrupted: what was measured so far follows")
    finally:
        for peer in every:
            peer.close()
    verdicts = [bars.judge(bar, bench.results) for bar in nixl_cases.bars() if bar.section in options.only]
    return summary.finish(options, bench, said, verdicts)


if __name__ == "__main__":
    sys.exit(main())
