#!/usr/bin/env python3
"""Runs this tree beside an earlier commit of it, in turn on this machine: has a change made anything slower?

On one host and over TCP: 64 bytes and 4 KiB as a write, a read, a send and a notification, 64 KiB to 64 MiB as a
write, a read and a send, and 1024 pieces of 4 KiB in one write. With `--only gpu`, what `gpu.py` measures of this project's command.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import bars
import gpu_cases
import summary
from cases import KIB, MIB, Case
from paths import ROOT, WORK
from peers import Context, Failed, Peer, Sample
from peers import uccl as command
from rounds import Bench, names, present, say

BEFORE = "before"
#: What an earlier commit's speed is held to: less than this of it is a loss, and more may be noise.
KEPT = 0.97
LINKS = ("local", "tcp")
SECTIONS = ("host", "gpu")
SIZES = (64 * KIB, MIB, 16 * MIB, 64 * MIB)


def arguments() -> argparse.Namespace:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    made.add_argument("--before", metavar="REVISION", default="HEAD~1", help="the earlier commit, built if need be")
    made.add_argument("--before-bin", type=Path, help="its command, where it is built already")
    made.add_argument("--uccl-bin", type=Path, default=ROOT / "target/release/uccl", help="this tree's command")
    made.add_argument("--only", metavar="SECTION,...", default="host", help=f"sections: {', '.join(SECTIONS)}")
    made.add_argument("--gpus", default="0,1", help="the GPU of the side that measures, and of the other")
    made.add_argument("--rounds", type=int, default=9, help="rounds")
    made.add_argument("--seconds", type=float, default=0.4, help="seconds a value is measured")
    made.add_argument("--max-minutes", type=float, default=20, help="start no more work after so long")
    made.add_argument("--revision", help="of this tree, where git cannot tell")
    made.add_argument("--json", metavar="FILE", help="also write everything as JSON")
    made.add_argument("--check", action="store_true", help="exit 1 when a bar that was measured is not met")
    options = made.parse_args()
    options.only = names(made, "--only", options.only, SECTIONS)
    return options


def git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise Failed(f"git {words[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


def build(revision: str) -> Path:
    """The command of an earlier commit, built in a tree of its own that is kept for the next run."""
    commit = git("rev-parse", "--short=12", f"{revision}^{{commit}}")
    tree = WORK / "before" / commit
    if not tree.exists():
        git("worktree", "add", "--detach", str(tree), commit)
    say(f"building {commit} ({revision})")
    target = WORK / "before" / "target"
    done = subprocess.run(
        ["cargo", "build", "--quiet", "--release", "-p", "uccl-cli", "--target-dir", str(target)], cwd=tree
    )
    if done.returncode:
        raise Failed(f"{commit} does not build")
    made = tree / "uccl"
    made.unlink(missing_ok=True)
    (target / "release/uccl").rename(made)
    return made


class Build(Peer):
    """`uccl bench` of one build. Every byte is looked at in a last, untimed round."""

    def __init__(self, name: str, binary: Path, gpus: str):
        self.name, self._binary = name, binary
        self._gpus = gpus.split(",")

    def available(self, context: Context) -> str | None:
        return command.why_no_binary(self._binary)

    def version(self, context: Context) -> str:
        return command.version(self._binary)

    def covers(self, case: Case) -> bool:
        return True

    def measure(self, cases: list[Case], context: Context) -> list[Sample]:
        group = cases[0].group
        words = [
            *("bench", "--json", "-", "--op", group.op, "--iovs", str(group.iovs), *self._memory(group)),
            *("--size", ",".join(str(case.size) for case in cases), "--inflight", "1", "--buffers", "1"),
            *("--duration", f"{round(context.seconds * 1000)}ms"),
        ]
        found = command.rows(self._binary, words, limit_s=context.limit_s(cases), env={})
        by_size = {row["size_bytes"]: row for row in found}
        wrong = [row["size_bytes"] for row in found if row.get("verified") == "no"]
        if wrong or any(case.size not in by_size for case in cases):
            raise Failed(f"wrong bytes of sizes {wrong}" if wrong else "a size is missing from its rows")
        return [Sample(case, command.value(by_size[case.size], case.unit)) for case in cases]

    def _memory(self, case: Case) -> list[str]:
        """The link, and whose memory is on its ends."""
        transport = ["--transport", "local" if case.link == "gpu" else case.link]
        if case.memory in ("any", "host"):
            return transport
        if case.memory == "alloc":
            return [*transport, "--memory", "alloc"]
        ours, theirs = self._gpus
        return [*transport, "--device", "gpu", "--peer-device", case.memory, "--gpu", ours, "--peer-gpu", theirs]


def groups(only: set[str]) -> list[list[Case]]:
    """What is measured: cases that differ only in size together."""
    cases = [*(host() if "host" in only else []), *(gpu_cases.plan(set(gpu_cases.SECTIONS)) if "gpu" in only else [])]
    by_group: dict[Case, list[Case]] = {}
    for case in cases:
        by_group.setdefault(case.group, []).append(case)
    return list(by_group.values())


def host() -> list[Case]:
    made = []
    for link in LINKS:
        made += [Case(link, op, size, unit="us") for op in ("write", "read", "send", "notif") for size in (64, 4 * KIB)]
        made += [Case(link, op, size) for op in ("write", "read", "send") for size in SIZES]
        made.append(Case(link, "write", 4 * KIB, iovs=1024))
    made += [Case("local", "write", size, memory="alloc", unit="us") for size in (64, 4 * KIB)]
    made += [Case("local", op, size, memory="alloc") for op in ("write", "read") for size in (64 * KIB, MIB, 64 * MIB)]
    return made


def bar(case: Case) -> bars.Bar:
    limit = {"at_most": 1 / KEPT} if case.unit == "us" else {"at_least": KEPT}
    what = f"{case.title()} {bars.human(case.size)}"
    return bars.Bar("before", what, ((bars.OURS, case),), ((BEFORE, case),), **limit)


def main() -> int:
    options = arguments()
    try:
        before = options.before_bin or build(options.before)
    except Failed as failed:
        say(str(failed))
        return 2
    binaries = {bars.OURS: options.uccl_bin, BEFORE: before}
    builds = [Build(name, binary.resolve(), options.gpus) for name, binary in binaries.items()]
    context = Context(seconds=options.seconds, uccl_bin=options.uccl_bin)
    running, said = present(builds, [build.name for build in builds], context)
    if len(running) < len(builds):
        return 2
    cases = groups(options.only)
    bench = Bench(options, context, running, cases)
    bench.run()
    verdicts = [bars.judge(bar(case), bench.results) for group in cases for case in group]
    return summary.finish(options, bench, said, verdicts)


if __name__ == "__main__":
    sys.exit(main())
