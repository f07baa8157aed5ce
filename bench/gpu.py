#!/usr/bin/env python3
"""Runs this project and its peers side by side between two GPUs of this machine, and holds its bars against them."""

import argparse
import json
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import bars
import gpu_cases
import gpu_peers
import machine
import report
import wheels
from paths import ROOT
from rounds import Bench, names, present, revision, say


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


def gpu_facts() -> list[str]:
    """The GPUs, their driver and how they are linked, as the vendor's tool tells."""
    lines = []
    for command in (
        ["nvidia-smi", "--query-gpu=index,name,driver_version,memory.total", "--format=csv,noheader"],
        ["nvidia-smi", "topo", "-m"],
    ):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired) as error:
            return [f"unknown: {error}"]
        # The table of links ends with the explanation of its words, and has colours.
        text = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout).split("Legend")[0]
        lines += [
            " ".join(line.split()) for line in text.splitlines() if line.startswith(("GPU", *"0123456789"))
        ]
    return lines


def command() -> str:
    """The command line, without the places of files."""
    words = [Path(word).name if word.startswith(("/", ".")) else word for word in sys.argv[1:]]
    return shlex.join(["python3", "bench/gpu.py", *words])


def document(options: argparse.Namespace, bench: Bench, said: dict, verdicts: list[bars.Verdict]) -> dict:
    """Everything about the run, as it goes into JSON."""
    return {
        "schema": 1,
        "command": command(),
        "revision": options.revision or revision(),
        "machine": {**machine.facts(), "gpus": gpu_facts()},
        "options": {
            key: Path(str(value)).name if key in ("wheels", "uccl_bin", "python", "json") else value
            for key, value in vars(options).items()
        },
        "rounds_done": bench.rounds_done,
        "took_s": round(bench.took_s, 1),
        "peers": said,
        "values": bench.results.as_list(),
        "failures": bench.results.failures_as_list(),
        "bars": [
            {**asdict(v), "section": v.bar.section, "what": v.bar.what, "bar": v.bar.limit()} for v in verdicts
        ],
    }


def head_lines(everything: dict) -> list[str]:
    """The facts that every table needs beside it."""
    facts, options = everything["machine"], everything["options"]
    lines = [
        f"command   {everything['command']}",
        f"machine   {facts['cpu']}, {facts['cpus']} CPUs, Linux {facts['kernel']}",
        *(f"GPU       {line}" for line in facts["gpus"]),
        f"date      {facts['date']}, project at {everything['revision']}",
        f"rounds    {everything['rounds_done']} whole of {options['rounds']}, about {options['seconds']} s a value,"
        f" {everything['took_s']:.0f} s in all",
    ]
    for name, peer in everything["peers"].items():
        lines.append(f"peer      {name:10} {peer.get('version') or 'absent: ' + peer['absent']}")
    return lines


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
    everything = document(options, bench, said, verdicts)
    lines = [*head_lines(everything), *report.case_lines(bench.results), *report.bar_lines(verdicts)]
    print("\n".join([*lines, *report.failure_lines(bench.results)]))
    if options.json:
        Path(options.json).write_text(json.dumps(everything, indent=1) + "\n")
    return 1 if options.check and any(verdict.state == "NOT" for verdict in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
