#!/usr/bin/env python3
"""Runs this tree beside an earlier commit of it, in turn on this machine: has a change made anything slower?

What is small and what is large, on one host and over TCP: 64 bytes as a write, a send and a notification, 64 KiB and 16 MiB as
a write and a send, and 1024 pieces of 4 KiB in one write.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import bars
import summary
from cases import KIB, MIB, Case
from paths import ROOT, WORK
from peers import Context, Failed, Peer, Sample
from peers import uccl as command
from rounds import Bench, present, say

BEFORE = "before"
#: What an earlier commit's speed is held to: less than this of it is a loss, and more may be noise.
KEPT = 0.97
LINKS = ("local", "tcp")


def arguments() -> argparse.Namespace:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    made.add_argument("--before", metavar="REVISION", default="HEAD~1", help="the earlier commit, built if need be")
    made.add_argument("--before-bin", type=Path, help="its command, where it is built already")
    made.add_argument("--uccl-bin", type=Path, default=ROOT / "target/release/uccl", help="this tree's command")
    made.add_argument("--rounds", type=int, default=9, help="rounds")
    made.add_argument("--seconds", type=float, default=0.4, help="seconds a value is measured")
    made.add_argument("--max-minutes", type=float, default=20, help="start no more work after so long")
    made.add_argument("--revision", help="of this tree, where git cannot tell")
    made.add_argument("--json", metavar="FILE", help="also write everything as JSON")
    made.add_argument("--check", action="store_true", help="exit 1 when a bar that was measured is not met")
    return made.parse_args()


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

    def __init__(self, name: str, binary: Path):
        self.name, self._binary = name, binary

    def available(self, context: Context) -> str | None:
        return command.why_no_binary(self._binary)

    def version(self, context: Context) -> str:
        return command.version(self._binary)

    def covers(self, case: Case) -> bool:
        return True

    def measure(self, cases: list[Case], context: Context) -> list[Sample]:
        group = cases[0].group
        words = [
            *("bench", "--json", "-", "--transport", group.link, "--op", group.op, "--iovs", str(group.iovs)),
            *("--size", ",".join(str(case.size) for case in cases), "--inflight", "1", "--buffers", "1"),
            *("--duration", f"{round(context.seconds * 1000)}ms"),
        ]
        found = command.rows(self._binary, words, limit_s=context.limit_s(cases), env={})
        by_size = {row["size_bytes"]: row for row in found}
        wrong = [row["size_bytes"] for row in found if row.get("verified") == "no"]
        if wrong or any(case.size not in by_size for case in cases):
            raise Failed(f"wrong bytes of sizes {wrong}" if wrong else "a size is missing from its rows")
        return [Sample(case, command.value(by_size[case.size], case.unit)) for case in cases]


def groups() -> list[list[Case]]:
    """What is measured: cases that differ only in size together."""
    made = []
    for link in LINKS:
        made += [[Case(link, op, 64, unit="us")] for op in ("write", "send", "notif")]
        made += [[Case(link, op, size) for size in (64 * KIB, 16 * MIB)] for op in ("write", "send")]
        made.append([Case(link, "write", 4 * KIB, iovs=1024)])
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
    builds = [Build(bars.OURS, options.uccl_bin.resolve()), Build(BEFORE, before.resolve())]
    context = Context(seconds=options.seconds, uccl_bin=options.uccl_bin)
    running, said = present(builds, [build.name for build in builds], context)
    if len(running) < len(builds):
        return 2
    cases = groups()
    bench = Bench(options, context, running, cases)
    bench.run()
    verdicts = [bars.judge(bar(case), bench.results) for group in cases for case in group]
    return summary.finish(options, bench, said, verdicts)


if __name__ == "__main__":
    sys.exit(main())
