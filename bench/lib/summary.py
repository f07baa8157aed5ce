"""The kept and printed results of a run; all programs that run rounds share it."""

import argparse
import json
import re
import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from bench.lib import machine, report
from bench.lib.bars import Verdict
from bench.lib.rounds import Bench, revision

#: Options that are files.
_FILES = (
    "wheels",
    "uccl_bin",
    "before_bin",
    "wheel",
    "before_wheel",
    "python",
    "json",
    "plugin_dir",
    "before_plugin_dir",
)


def gpu_facts() -> list[str]:
    """The GPUs, their driver and their links, as nvidia-smi reports them."""
    lines = []
    for command in (
        [
            "nvidia-smi",
            "--query-gpu=index,name,driver_version,memory.total",
            "--format=csv,noheader",
        ],
        ["nvidia-smi", "topo", "-m"],
    ):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired) as error:
            return [f"unknown: {error}"]
        # The table of links ends with the explanation of its words, and has colours.
        text = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout).split("Legend")[0]
        lines += [
            " ".join(line.split())
            for line in text.splitlines()
            if line.startswith(("GPU", *"0123456789"))
        ]
    return lines


def command() -> str:
    """The command line, without the places of files."""
    words = [Path(word).name if word.startswith(("/", ".")) else word for word in sys.argv[1:]]
    spec = sys.modules["__main__"].__spec__
    program = ["-m", spec.name] if spec else [Path(sys.argv[0]).name]
    return shlex.join(["python3", *program, *words])


def document(
    options: argparse.Namespace, bench: Bench, said: dict, verdicts: list[Verdict]
) -> dict:
    """Everything about the run, for JSON."""
    return {
        "schema": 1,
        "command": command(),
        "revision": vars(options).get("revision") or revision(),
        "machine": {**machine.facts(), "gpus": gpu_facts()},
        "options": {
            # Folders of files mean nothing on another machine.
            key: Path(str(value)).name if key in _FILES and value else value
            for key, value in vars(options).items()
        },
        "rounds_done": bench.rounds_done,
        "took_s": round(bench.took_s, 1),
        **({"gate": bench.gate.as_dict()} if bench.gate else {}),
        "peers": said,
        "values": bench.results.as_list(),
        "failures": bench.results.failures_as_list(),
        "bars": [
            {**asdict(v), "section": v.bar.section, "what": v.bar.what, "bar": v.bar.limit()}
            for v in verdicts
        ],
    }


def head_lines(everything: dict) -> list[str]:
    """The facts that stand above every table."""
    facts, options = everything["machine"], everything["options"]
    available = ", ".join(facts["tcp_congestion_available"])
    lines = [
        f"command   {everything['command']}",
        f"machine   {facts['cpu']}, {facts['cpus']} CPUs, {facts['memory_gib']} GiB, Linux {facts['kernel']}",
        *(f"GPU       {line}" for line in facts["gpus"]),
        f"date      {facts['date']}, project at {everything['revision']}",
        f"TCP       default {facts['tcp_congestion_default']} (of {available})",
        f"rounds    {everything['rounds_done']} whole of {options['rounds']}, about {options['seconds']} s a value,"
        f" {everything['took_s']:.0f} s in all",
    ]
    if gate := everything.get("gate"):
        lines.append(
            f"quiet     gate at {gate['idle']:.0%} idle: waited {gate['waited_s']:.0f} s, gave up {gate['gave_up']} times;"
            f" over {gate['noise']:.0%} noise: {gate['repeated']} repeated, {gate['kept_noisy']} noisy to the end"
        )
    for name, peer in everything["peers"].items():
        lines.append(f"peer      {name:10} {peer.get('version') or 'absent: ' + peer['absent']}")
    return lines


def finish(options: argparse.Namespace, bench: Bench, said: dict, verdicts: list[Verdict]) -> int:
    """Prints everything, keeps it where that is asked for, and returns the exit status."""
    everything = document(options, bench, said, verdicts)
    text = json.dumps(everything, indent=1)
    if options.json == "-":
        print(text)
    else:
        lines = [
            *head_lines(everything),
            *report.case_lines(bench.results),
            *report.bar_lines(verdicts),
        ]
        print("\n".join([*lines, *report.failure_lines(bench.results)]))
        if options.json:
            Path(options.json).write_text(text + "\n")
    return 1 if options.check and any(verdict.state == "NOT" for verdict in verdicts) else 0
