#!/usr/bin/env python3
"""Runs this project and its peers side by side on this machine, and holds the project's bars against them."""

import argparse
import json
import os
import shlex
import signal
import sys
from dataclasses import asdict
from pathlib import Path

import bars
import congestion
import install
import machine
import peers
import report
from cases import Case, plan
from paths import ROOT
from rounds import Bench, names, present, revision, say

SECTIONS = ("tcp", "local", "small", "vector")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--install", action="store_true", help="install the peers first")
    parser.add_argument(
        "--with-torch", action="store_true", help="with --install: also torch, for gloo (gigabytes)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds, under three minutes")
    parser.add_argument("--only", metavar="SECTION,...", help=f"sections to run: {', '.join(SECTIONS)}")
    parser.add_argument("--peers", metavar="NAME,...", help="peers to run (default: all)")
    parser.add_argument("--rounds", type=int, help="rounds (default: 5, quick 2)")
    parser.add_argument("--seconds", type=float, help="seconds a value is measured (default: 1, quick 0.25)")
    parser.add_argument(
        "--max-minutes", type=float, help="start no more work after so long (default: 40, quick 2.8)"
    )
    parser.add_argument(
        "--idle", type=float, default=0.88, help="share of the machine that must be idle before a repetition"
    )
    parser.add_argument(
        "--nice", type=int, default=0, help="niceness of everything that is measured; negative as root only"
    )
    parser.add_argument(
        "--uccl-bin", type=Path, default=ROOT / "target/release/uccl", help="the project's command"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="also write everything as JSON; - is stdout, without the tables"
    )
    parser.add_argument("--check", action="store_true", help="exit 1 when a bar that was measured is not met")
    options = parser.parse_args()
    options.rounds = options.rounds or (2 if options.quick else 5)
    options.seconds = options.seconds or (0.25 if options.quick else 1.0)
    options.max_minutes = options.max_minutes or (2.8 if options.quick else 40.0)
    options.only = names(parser, "--only", options.only, SECTIONS)
    options.peers = names(parser, "--peers", options.peers, [peer.name for peer in peers.every()])
    return options


def groups(options: argparse.Namespace) -> list[list[Case]]:
    """What is measured: cases that differ only in size together."""
    cases = plan(options.quick, set(options.only))
    return [
        [case for case in cases if case.group == group] for group in dict.fromkeys(c.group for c in cases)
    ]


def gate(options: argparse.Namespace) -> machine.Gate:
    """What keeps other work of the machine out of the values."""
    return machine.Gate(
        idle=options.idle,
        wait_s=5.0 if options.quick else 20.0,
        budget_s=60 * options.max_minutes / 4,
        repeats=1 if options.quick else 2,
    )


def document(options: argparse.Namespace, bench: Bench, said: dict, verdicts: list[bars.Verdict]) -> dict:
    """Everything about the run, as it goes into JSON."""
    gate = bench.gate
    return {
        "schema": 1,
        "command": shlex.join(["python3", *sys.argv]),
        "revision": revision(),
        "machine": machine.facts(),
        "options": {
            # Where the tree is says nothing to others.
            key: os.path.relpath(value, ROOT) if isinstance(value, Path) else value
            for key, value in vars(options).items()
        },
        "rounds_done": bench.rounds_done,
        "took_s": round(bench.took_s, 1),
        "gate": {"idle": gate.idle, "noise": gate.noise, **gate.log.as_dict()},
        "peers": said,
        "values": bench.results.as_list(),
        "failures": bench.results.failures_as_list(),
        "bars": [
            {**asdict(v), "section": v.bar.section, "what": v.bar.what, "bar": v.bar.limit()}
            for v in verdicts
        ],
    }


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
    # Stopped from outside, it still prints what it has.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        bench.run()
    except KeyboardInterrupt:
        say("interrupted: what was measured so far follows")
    verdicts = [
        bars.judge(bar, bench.results) for bar in bars.table(options.quick) if bar.section in options.only
    ]
    everything = document(options, bench, said, verdicts)
    if options.json != "-":
        lines = [
            *report.machine_lines(everything),
            *report.case_lines(bench.results),
            *report.bar_lines(verdicts),
        ]
        print("\n".join([*lines, *report.failure_lines(bench.results)]))
    if options.json == "-":
        json.dump(everything, sys.stdout, indent=1)
        print()
    elif options.json:
        Path(options.json).write_text(json.dumps(everything, indent=1) + "\n")
    return 1 if options.check and any(verdict.state == "NOT" for verdict in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
