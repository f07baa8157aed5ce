"""Runs this tree beside an earlier commit of it, in turn on this machine: has a change made anything slower?

On one host and over TCP: 64 bytes and 4 KiB as a write, a read, a send and a notification, 64 KiB
to 64 MiB as a write, a read and a send, and 1024 pieces of 4 KiB in one write. With `--only gpu`,
the cases of `gpu.py` with this project's command; with `python`, short messages from Python; with
`nixl`, the time of NIXL's callers to post many short pieces.

The kernel's placement of the two processes' threads changes a value by 10 % and more from one start
to the next, also of one program. So there are many short rounds, each starts its processes anew,
and a row is "unclear" where the rounds do not suffice.
"""

import argparse
import functools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from bench.before.peers import Build, Command, FromNixl, FromPython
from bench.gpu import cases as gpu_cases
from bench.gpu import rounds as gpu_rounds
from bench.lib import bars, summary, wheels
from bench.lib.cases import KIB, MIB, Case
from bench.lib.paths import PYTHON, ROOT, WORK
from bench.lib.rounds import Bench, names, present, say
from bench.nixl import cases as nixl_cases
from bench.nixl.peers import NixlContext
from bench.peers import BenchError, Peer

BEFORE = "before"
#: The bar: a share of the earlier commit's speed. A smaller share is a loss, a larger one may be
#: noise.
KEPT = 0.97
LINKS = ("local", "tcp")
SECTIONS = ("host", "gpu", "python", "nixl")
#: Sections that run the command, and sections that need a wheel.
BY_COMMAND, BY_WHEEL = {"host", "gpu"}, {"python", "nixl"}
SIZES = (64 * KIB, MIB, 16 * MIB, 64 * MIB)


def arguments() -> argparse.Namespace:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    made.add_argument(
        "--before",
        metavar="REVISION",
        default="HEAD~1",
        help="the earlier commit, built if need be",
    )
    made.add_argument("--before-bin", type=Path, help="its command, where it is built already")
    made.add_argument(
        "--uccl-bin", type=Path, default=ROOT / "target/release/uccl", help="this tree's command"
    )
    made.add_argument("--before-wheel", type=Path, help="its wheel, where it is built already")
    made.add_argument("--wheel", type=Path, help="this tree's wheel, where it is built already")
    made.add_argument(
        "--python",
        default=str(PYTHON) if PYTHON.exists() else sys.executable,
        help="the Python that the wheels are for; it has numpy, and NIXL (bench/nixl/run.py --install)",
    )
    made.add_argument(
        "--only", metavar="SECTION,...", default="host", help=f"sections: {', '.join(SECTIONS)}"
    )
    made.add_argument(
        "--gpus", default="0,1", help="the GPU of the side that measures, and of the other"
    )
    made.add_argument("--rounds", type=int, default=40, help="rounds")
    made.add_argument("--seconds", type=float, default=0.1, help="seconds a value is measured")
    made.add_argument(
        "--max-minutes", type=float, default=20, help="start no more work after so long"
    )
    made.add_argument("--revision", help="of this tree, where git cannot tell")
    made.add_argument("--json", metavar="FILE", help="also write everything as JSON")
    made.add_argument(
        "--check", action="store_true", help="exit 1 when a bar that was measured is not met"
    )
    options = made.parse_args()
    options.only = names(made, "--only", options.only, SECTIONS)
    return options


def git(*words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=60
    )
    if done.returncode:
        raise BenchError(f"git {words[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


def tree_of(revision: str) -> Path:
    """A tree of an earlier commit, kept for the next run."""
    commit = git("rev-parse", "--short=12", f"{revision}^{{commit}}")
    tree = WORK / "before" / commit
    if not tree.exists():
        git("worktree", "add", "--detach", str(tree), commit)
    return tree


def command_of(tree: Path) -> Path:
    """The command of an earlier commit, built from its tree."""
    say(f"building the command of {tree.name}")
    target = WORK / "before" / "target"
    done = subprocess.run(
        ["cargo", "build", "--quiet", "--release", "-p", "uccl-cli", "--target-dir", str(target)],
        cwd=tree,
    )
    if done.returncode:
        raise BenchError(f"{tree.name} does not build")
    made = tree / "uccl"
    made.unlink(missing_ok=True)
    (target / "release/uccl").rename(made)
    return made


def wheel_of(tree: Path, target: Path) -> Path:
    """A tree's wheel, built with this target folder of cargo's."""
    say(f"building the wheel of {tree.name}")
    folder = WORK / "before" / "wheels" / tree.name
    reason = wheels.build(tree, folder, {"CARGO_TARGET_DIR": str(target)})
    if reason:
        raise BenchError(f"the wheel of {tree.name} does not build: {reason}")
    return max(folder.glob("*.whl"), key=lambda file: file.stat().st_mtime)


def build_of(name: str, options: argparse.Namespace) -> Build:
    """One of the two builds, with the parts of the chosen sections. Builds the missing parts."""
    parts: dict[str, Peer] = {}
    is_ours = name == bars.OURS
    tree = functools.cache(lambda: ROOT if is_ours else tree_of(options.before))
    if BY_COMMAND & set(options.only):
        binary = options.uccl_bin if is_ours else options.before_bin or command_of(tree())
        parts[""] = Command(binary.resolve())
    if BY_WHEEL & set(options.only):
        target = ROOT / "target" if is_ours else WORK / "before" / "target"
        wheel = (options.wheel if is_ours else options.before_wheel) or wheel_of(tree(), target)
        folder = WORK / "before" / "modules" / name
        reason = wheels.install([wheel.resolve()], folder, options.python)
        if reason:
            raise BenchError(f"{wheel.name} cannot be unpacked: {reason}")
        faces = {"python": FromPython, "nixl": FromNixl}
        parts |= {by: face(folder) for by, face in faces.items() if by in options.only}
    return Build(name, parts)


def groups(only: set[str]) -> list[list[Case]]:
    """The cases of the chosen sections, in groups that differ only in size."""
    sections = {"host": host, "gpu": gpu, "python": python, "nixl": nixl}
    cases = [case for name in SECTIONS if name in only for case in sections[name]()]
    by_group: dict[Case, list[Case]] = {}
    for case in cases:
        by_group.setdefault(case.group, []).append(case)
    return list(by_group.values())


def host() -> list[Case]:
    made = []
    for link in LINKS:
        made += [
            Case(link, op, size, unit="us")
            for op in ("write", "read", "send", "notif")
            for size in (64, 4 * KIB)
        ]
        made += [Case(link, op, size) for op in ("write", "read", "send") for size in SIZES]
        made.append(Case(link, "write", 4 * KIB, iovs=1024))
    made += [Case("local", "write", size, memory="alloc", unit="us") for size in (64, 4 * KIB)]
    made += [
        Case("local", op, size, memory="alloc")
        for op in ("write", "read")
        for size in (64 * KIB, MIB, 64 * MIB)
    ]
    return made


def gpu() -> list[Case]:
    return gpu_cases.plan(set(gpu_cases.SECTIONS))


def python() -> list[Case]:
    shapes = [
        (link, op, size)
        for link in LINKS
        for op in ("write", "read", "send")
        for size in (64, 4 * KIB)
    ]
    return [Case(*shape, memory="host", unit="us", by="python") for shape in shapes]


def nixl() -> list[Case]:
    return [replace(case, by="nixl") for case in nixl_cases.plan({"post"})]


def bar(case: Case) -> bars.Bar:
    limit = {"at_least": KEPT} if case.unit == "GB/s" else {"at_most": 1 / KEPT}
    what = f"{case.title()} {bars.human(case.size)}"
    return bars.Bar("before", what, ((bars.OURS, case),), ((BEFORE, case),), **limit)  # type: ignore[arg-type]


def main() -> int:
    options = arguments()
    try:
        builds = [build_of(name, options) for name in (bars.OURS, BEFORE)]
    except BenchError as failed:
        say(str(failed))
        return 2
    context = NixlContext(
        seconds=options.seconds,
        uccl_bin=options.uccl_bin,
        gpus=gpu_rounds.gpus(options),
        python=options.python,
    )
    running, said = present(builds, [build.name for build in builds], context)
    if len(running) < len(builds):
        return 2
    cases = groups(options.only)
    bench = Bench(options, context, running, cases)
    bench.run()
    judged = (bars.judge(bar(case), bench.results) for group in cases for case in group)
    verdicts = [bars.surely(verdict, bench.results) for verdict in judged]
    return summary.finish(options, bench, said, verdicts)


if __name__ == "__main__":
    sys.exit(main())
