"""One run with GPUs in it, from its options to its verdicts; `gpu.py` and `nixl.py` share it."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from bench.lib import bars, summary, wheels
from bench.lib.rounds import Bench, names, present, say
from bench.peers import Context, Peer


def parser(
    text: str | None, cases: ModuleType, known: list[str], *, who: str, seconds: float
) -> argparse.ArgumentParser:
    """The options of both programs, with a description of the peers and the default seconds of a
    value."""
    made = argparse.ArgumentParser(
        description=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    made.add_argument(
        "--wheels", type=Path, metavar="DIR", help="a folder of wheels: the peers, this project"
    )
    made.add_argument(
        "--only", metavar="SECTION,...", help=f"sections: {', '.join(cases.SECTIONS)}"
    )
    made.add_argument("--peers", metavar="NAME,...", help=f"{who}: {', '.join(known)}")
    made.add_argument(
        "--gpus", default="0,1", help="the GPU of the side that measures, and of the other"
    )
    made.add_argument("--rounds", type=int, default=5, help="rounds")
    made.add_argument("--seconds", type=float, default=seconds, help="seconds a value is measured")
    made.add_argument(
        "--max-minutes", type=float, default=20, help="start no more work after so long"
    )
    made.add_argument("--revision", help="of the project, where git cannot tell")
    made.add_argument("--json", metavar="FILE", help="also write everything as JSON")
    made.add_argument(
        "--check", action="store_true", help="exit 1 when a bar that was measured is not met"
    )
    return made


def parse(made: argparse.ArgumentParser, cases: ModuleType, known: list[str]) -> argparse.Namespace:
    """The options, checked; `only` and `peers` are lists."""
    options = made.parse_args()
    if not re.fullmatch(r"\d+,\d+", options.gpus):
        made.error("--gpus: two numbers, as in 0,1")
    options.only = names(made, "--only", options.only, cases.SECTIONS)
    options.peers = names(made, "--peers", options.peers, known)
    return options


def gpus(options: argparse.Namespace) -> tuple[int, int]:
    """The GPU of the side that measures, and of the other."""
    ours, theirs = options.gpus.split(",")
    return int(ours), int(theirs)


def unpacked(options: argparse.Namespace) -> dict[str, Path]:
    """The folders of the peers with wheels, after unpacking."""
    if not options.wheels:
        return {}
    folders, failures = wheels.unpack(options.wheels, options.python)
    for peer, reason in failures.items():
        say(f"{peer}: its wheels cannot be unpacked: {reason}")
    return folders


def run(
    options: argparse.Namespace, context: Context, every: Sequence[Peer], cases: ModuleType
) -> int:
    """Measures, prints and keeps everything; the exit status."""
    running, said = present(every, options.peers, context)
    # One case at a time, so that all peers measure it within a few seconds.
    groups = [[case] for case in cases.plan(set(options.only))]
    bench = Bench(options, context, running, groups)
    try:
        bench.run()
    finally:
        for peer in every:
            getattr(peer, "close", lambda: None)()
    verdicts = [
        bars.judge(bar, bench.results) for bar in cases.bars() if bar.section in options.only
    ]
    return summary.finish(options, bench, said, verdicts)
