"""Normal mode's dispatch and combine on GPUs beside UCCL-EP's, NCCL's all_to_all and the driver's copies, in one run.

    python3 -m bench.lib.install --wheels DIR --peers uccl-0.1.1        # where there is a network; and this project's wheel
    python3 -m bench.ep.beside --wheels DIR --ranks 2 --num-tokens 4096 --num-sms 24

Each participant has processes of its own, one for each GPU, and takes its turn in every round,
while the others do nothing. First, the tokens that each of the two libraries receives are compared
with the sent ones. A call is timed from entry to usable output: alone, from a common start, host
time included (called), and as one of eight calls queued behind each other (queued). Times are of
CUDA events, the slowest rank's.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from bench.ep.group import Group
from bench.ep.inputs import Shape
from bench.ep.report import COPY, NCCL, OURS, SYMM, THEIRS, WHAT, Measured, report
from bench.ep.timing import HOW
from bench.lib import wheels
from bench.lib.proc import BenchError

#: Seconds until processes must be ready, and limits of a shape's checks and of a measurement.
START_S, PREPARE_S, MEASURE_S = 120, 120, 60
#: No shape begins with less time left than this, in seconds.
LEAST_S = 20
#: By name: the kind of process in bench/ep/rank.py.
KIND = {OURS: "ours", THEIRS: "upstream", NCCL: "nccl", SYMM: "symm_mem", COPY: "copy"}
#: The default participants. Symmetric memory needs NVSHMEM, which not every PyTorch comes with.
USUAL = (OURS, THEIRS, NCCL, COPY)
#: By name: the key in `wheels.WHEELS` of the wheels that it needs.
PEER = {OURS: "uccl-py", THEIRS: "uccl-0.1.1"}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--ranks", type=int, default=2, help="processes of each library, one for each GPU"
    )
    parser.add_argument("--num-tokens", type=int, nargs="+", default=[4096], help="of each rank")
    parser.add_argument("--hidden", type=int, default=7168, help="values of a token")
    parser.add_argument("--num-topk", type=int, default=8, help="experts of a token")
    parser.add_argument("--num-experts", type=int, default=256, help="of all ranks")
    parser.add_argument("--num-sms", type=int, nargs="+", default=[24], help="of both libraries")
    parser.add_argument("--with-layout", action="store_true", help="a dispatch is its layout too")
    parser.add_argument("--rounds", type=int, default=30, help="in which all take turns")
    parser.add_argument("--calls", type=int, default=5, help="that are timed in a turn, each way")
    parser.add_argument("--max-seconds", type=int, default=480, help="after which no more is begun")
    parser.add_argument(
        "--only", default=",".join(USUAL), metavar="NAME,...", help="who takes part"
    )
    parser.add_argument(
        "--wheels", type=Path, metavar="DIR", help="a folder of wheels: UCCL-EP's, this project's"
    )
    parser.add_argument(
        "--python", default=sys.executable, metavar="PATH", help="the Python that has torch"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="for every value")
    parsed = parser.parse_args()
    if unknown := set(parsed.only.split(",")) - set(WHAT):
        parser.error(f"no such names: {', '.join(sorted(unknown))}")
    if parsed.num_experts % parsed.ranks or any(sms % 2 or sms <= 0 for sms in parsed.num_sms):
        parser.error("every rank has as many experts, and SMs are even and more than 0")
    return parsed


def shapes(args: argparse.Namespace) -> list[Shape]:
    """The shapes, from the fewest tokens on."""
    return [
        Shape(args.ranks, tokens, args.hidden, args.num_topk, args.num_experts)
        for tokens in sorted(args.num_tokens)
    ]


class Beside:
    """One run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._until = args, time.monotonic() + args.max_seconds
        self._groups: dict[str, Group] = {}
        #: By name: the reason for which a participant was dropped.
        self.lost: dict[str, str] = {}

    def start(self) -> None:
        """Starts all processes; a participant that fails is dropped."""
        folders: dict[str, Path] = {}
        failures: dict[str, str] = {}
        if self._args.wheels:
            folders, failures = wheels.unpack(self._args.wheels, self._args.python)
        for name in self._args.only.split(","):
            peer = PEER.get(name, "")
            if peer in failures:
                self._lose(name, failures[peer])
            elif name == THEIRS and peer not in folders:
                self._lose(name, "its wheel is not in the folder that --wheels says")
            else:
                env = wheels.environment(folders[peer]) if peer in folders else {}
                count = 1 if name == COPY else self._args.ranks
                self._groups[name] = Group(count, self._args.python, env)
        for name in list(self._groups):
            try:
                self._groups[name].greet(self._hellos(name), self._limit_s(START_S))
            except BenchError as failed:
                self._drop(name, str(failed))

    def measure(self, shape: Shape, sms: int) -> Measured:
        """All rounds of a shape, or as many as there is time for."""
        measured = Measured(shape, sms)
        for name in list(self._groups):
            remarks = self._ask(
                name, {"do": "prepare", "shape": shape.as_dict(), "sms": sms}, PREPARE_S
            )
            if remarks:
                measured.remarks[name] = remarks[0]
        for number in range(self._args.rounds):
            turns = [
                (name, what, how) for name in self._groups for what in WHAT[name] for how in HOW
            ]
            # In a fixed order, the same call would always come before a call and bias it.
            for name, what, how in random.Random(number).sample(turns, len(turns)):
                self._turn(measured, name, what, how)
            if time.monotonic() > self._until:
                say(f"no time is left after round {number + 1} of {self._args.rounds}")
                break
        return measured

    def is_over(self) -> bool:
        """Whether no participant is left, or no time for another shape: a shape that is cut short
        would look like a failure."""
        return not self._groups or time.monotonic() > self._until - LEAST_S

    def end(self) -> None:
        """Ends all processes."""
        for group in self._groups.values():
            group.end()

    def _turn(self, measured: Measured, name: str, what: str, how: str) -> None:
        if name not in self._groups:
            return
        asked = {"do": "measure", "what": what, "how": how, "count": self._args.calls}
        ranks = self._ask(name, asked, MEASURE_S)
        if ranks:
            measured.add((name, what), how, [max(taken) for taken in zip(*ranks)])

    def _ask(self, name: str, message: dict[str, Any], limit_s: float) -> list[Any]:
        """Every process's answer; none if one failed."""
        try:
            return self._groups[name].ask(message, self._limit_s(limit_s))
        except BenchError as failed:
            self._drop(name, f"{', '.join(map(str, message.values()))}: {failed}")
            return []

    def _hellos(self, name: str) -> list[dict[str, Any]]:
        """The greetings of a participant's processes."""
        args = self._args
        hello = {
            "kind": KIND[name],
            "most": shapes(args)[-1].as_dict(),
            "sms": max(args.num_sms),
            "with_layout": args.with_layout,
            # A process that is not ended by this program ends itself after this time.
            "limit_s": args.max_seconds + START_S,
        }
        return [{**hello, "rank": rank} for rank in range(1 if name == COPY else args.ranks)]

    def _limit_s(self, most: float) -> float:
        """``most`` seconds, or the rest of the run if that is less, but at least ten, for a clean
        end."""
        return max(10.0, min(most, self._until - time.monotonic()))

    def _drop(self, name: str, reason: str) -> None:
        """Ends a participant's processes; the run continues without it."""
        self._groups.pop(name).end()
        self._lose(name, reason)

    def _lose(self, name: str, reason: str) -> None:
        self.lost[name] = reason
        say(f"{name} takes no part any more: {reason}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    args = options()
    run, done = Beside(args), []
    try:
        run.start()
        for shape in shapes(args):
            for sms in args.num_sms:
                if run.is_over():
                    say(f"left out: {shape.tokens} tokens with {sms} SMs")
                else:
                    done.append(run.measure(shape, sms))
                    # A later shape may fail: this one's results are printed and kept now.
                    print(report(done[-1]), flush=True)
                    write(args, done, run.lost)
    finally:
        run.end()
    for name, reason in run.lost.items():
        print(f"{name} failed: {reason.splitlines()[0]}")
    return 1 if run.lost or not done else 0


def write(args: argparse.Namespace, done: list[Measured], lost: dict[str, str]) -> None:
    """Writes every value to the file of ``--json``, if there is one."""
    if args.json:
        said = {
            "with_layout": args.with_layout,
            "failed": lost,
            "measured": [each.as_dict() for each in done],
        }
        args.json.write_text(json.dumps(said) + "\n")


if __name__ == "__main__":
    sys.exit(main())
