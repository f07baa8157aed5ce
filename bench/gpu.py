#!/usr/bin/env python3
"""Runs this project and its peers side by side between two GPUs of this machine, and holds its bars against them."""

import argparse
import re
import signal
import sys
from pathlib import Path

import bars
import gpu_cases
import gpu_peers
import summary
import wheels
from paths import ROOT
from rounds import Bench, names, present, say


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    known = [peer.name for peer in gpu_peers.every()]
    parser.add_argument(
        "--wheels", type=Path, metavar="DIR", help="a folder of wheels: the peers, this project"
    )
    parser.add_argument("--only", metavar="SECTION,...", help=f"sections: {', '.join(gpu_cases.SECTIONS)}")
    parser.add_argument("--peers", metavar="NAME,...", help=f"who runs: {', '.join(known)}")
    parser.add_argument("--gpus", default="0,1", help="the GPU of the side that measures, and of the other")
    parser.add_argument("--rounds", type=int, default=5, help="rounds")
    parser.add_argument("--seconds", type=float, default=0.2, help="seconds a value is measured")
    parser.add_argument("--max-minutes", type=float, default=20, help="start no more work after so long")
    parser.add_argument("--python", default=sys.executable, help="the Python that has torch")
    parser.add_argument(
        "--uccl-bin", type=Path, default=ROOT / "target/release/uccl", help="the project's command"
    )
    parser.add_argument("--revision", help="of the project, where git cannot tell")
    parser.add_argument("--json", metavar="FILE", help="also write everything as JSON")
    parser.add_argument("--check", action="store_true", help="exit 1 when a bar that was measured is not met")
    options = parser.parse_args()
    if not re.fullmatch(r"\d+,\d+", options.gpus):
        parser.error("--gpus: two numbers, as in 0,1")
    options.only = names(parser, "--only", options.only, gpu_cases.SECTIONS)
    options.peers = names(parser, "--peers", options.peers, known)
    return options


def main() -> int:
    options = arguments()
    gpus = tuple(int(number) for number in options.gpus.split(","))
    folders, failures = wheels.unpack(options.wheels, options.python) if options.wheels else ({}, {})
    for peer, reason in failures.items():
        say(f"{peer}: its wheels cannot be unpacked: {reason}")
    context = gpu_peers.GpuContext(
        seconds=options.seconds,
        uccl_bin=options.uccl_bin,
        gpus=gpus,
        python=options.python,
        folders=folders,
    )
    every = gpu_peers.every()
    running, said = present(every, options.peers, context)
    # One case at a time, so that everybody measures it within a few seconds.
    groups = [[case] for case in gpu_cases.plan(set(options.only))]
    bench = Bench(options, context, running, groups)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        bench.run()
    except KeyboardInterrupt:
        say("interrupted: what was measured so far follows")
    finally:
        for peer in every:
            getattr(peer, "close", lambda: None)()
    verdicts = [bars.judge(bar, bench.results) for bar in gpu_cases.bars() if bar.section in options.only]
    return summary.finish(options, bench, said, verdicts)


if __name__ == "__main__":
    sys.exit(main())
