"""Runs this project and its peers side by side on this machine, and holds the project's bars against them."""

import argparse
import os
import sys
from pathlib import Path

from bench import peers
from bench.lib import bars, congestion, install, machine, summary
from bench.lib.cases import Case, plan
from bench.lib.paths import ROOT
from bench.lib.rounds import Bench, names, present, say

SECTIONS = ("tcp", "local", "small", "vector")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--install", action="store_true", help="install the peers first")
    parser.add_argument(
        "--with-torch", action="store_true", help="with --install: also torch, for gloo (gigabytes)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer sizes and rounds, under three minutes"
    )
    parser.add_argument(
        "--only", metavar="SECTION,...", help=f"sections to run: {', '.join(SECTIONS)}"
    )
    parser.add_argument("--peers", metavar="NAME,...", help="peers to run (default: all)")
    parser.add_argument("--rounds", type=int, help="rounds (default: 5, quick 2)")
    parser.add_argument(
        "--seconds", type=float, help="seconds a value is measured (default: 1, quick 0.25)"
    )
    parser.add_argument(
        "--max-minutes",
        type=float,
        help="start no more work after so long (default: 40, quick 2.8)",
    )
    parser.add_argument(
        "--idle",
        type=float,
        default=0.88,
        help="share of the machine that must be idle before a repetition",
    )
    parser.add_argument(
        "--nice",
        type=int,
        default=0,
        help="niceness of everything that is measured; negative as root only",
    )
    parser.add_argument(
        "--uccl-bin", type=Path, default=ROOT / "target/release/uccl", help="the project's command"
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="also write everything as JSON; - is stdout, without the tables",
    )
    parser.add_argument(
        "--check", action="store_true", help="exit 1 when a bar that was measured is not met"
    )
    options = parser.parse_args()
    options.rounds = options.rounds or (2 if options.quick else 5)
    options.seconds = options.seconds or (0.25 if options.quick else 1.0)
    options.max_minutes = options.max_minutes or (2.8 if options.quick else 40.0)
    options.only = names(parser, "--only", options.only, SECTIONS)
    options.peers = names(parser, "--peers", options.peers, [peer.name for peer in peers.every()])
    return options


def groups(options: argparse.Namespace) -> list[list[Case]]:
    """The cases of the run, in groups that differ only in size."""
    cases = plan(options.quick, set(options.only))
    return [
        [case for case in cases if case.group == group]
        for group in dict.fromkeys(c.group for c in cases)
    ]


def gate(options: argparse.Namespace) -> machine.Gate:
    """The gate that keeps other work of the machine out of the values."""
    return machine.Gate(
        idle=options.idle,
        wait_s=5.0 if options.quick else 20.0,
        budget_s=60 * options.max_minutes / 4,
        repeats=1 if options.quick else 2,
    )


def main() -> int:
    options = arguments()
    if options.install:
        for name, reason in install.install(options.with_torch).items():
            say(f"{name}: not installed: {reason}")
    if options.nice:
        os.nice(options.nice)
    reason = congestion.build()
    if reason:
        say(f"cannot build the congestion control shim: {reason}")
        return 2
    context = peers.Context(seconds=options.seconds, uccl_bin=options.uccl_bin)
    running, said = present(peers.every(), options.peers, context)
    bench = Bench(options, context, running, groups(options), gate(options))
    bench.run()
    verdicts = [
        bars.judge(bar, bench.results)
        for bar in bars.table(options.quick)
        if bar.section in options.only
    ]
    return summary.finish(options, bench, said, verdicts)


if __name__ == "__main__":
    sys.exit(main())
