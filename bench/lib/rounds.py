"""A run: the present peers, and rounds in which they take turns. `run.py` and `gpu.py` share it."""

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial

from bench.lib import report
from bench.lib.machine import Gate
from bench.lib.paths import ROOT
from bench.lib.results import Results
from bench.peers import BenchError, Case, Context, Peer


def names(parser: argparse.ArgumentParser, option: str, given: str | None, known) -> list[str]:
    """The names in a list option, or all known ones without it; an unknown name ends the
    program."""
    chosen = given.split(",") if given else list(known)
    unknown = [name for name in chosen if name not in known]
    if unknown:
        parser.error(f"{option}: unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    return chosen


def say(text: str) -> None:
    """Progress, beside the result and not in it."""
    print(text, file=sys.stderr, flush=True)


def present(
    every: Sequence[Peer], wanted: list[str], context: Context
) -> tuple[list[Peer], dict[str, dict[str, str]]]:
    """The peers that can run here, and of every peer its version or the reason for its absence."""
    running, said = [], {}
    for peer in every:
        if peer.name not in wanted:
            said[peer.name] = {"absent": "not asked for (--peers)"}
            continue
        try:
            reason = peer.available(context)
            said[peer.name] = {"absent": reason} if reason else {"version": peer.version(context)}
        except BenchError as failed:
            reason = str(failed)
            said[peer.name] = {"absent": reason}
        if reason:
            say(f"{peer.name} is absent: {reason}")
        else:
            running.append(peer)
    return running, said


class Bench:
    """One run: rounds of every group of cases by every peer, in turn; every other round in the opposite order.

    `groups` are lists of cases that a peer is asked for at once. Without a `gate` nothing waits for a quiet machine.
    """

    #: A peer that failed this often at a group is not asked for it again.
    TRIES = 2

    def __init__(
        self,
        options: argparse.Namespace,
        context: Context,
        running: list[Peer],
        groups: list[list[Case]],
        gate: Gate | None = None,
    ):
        self.options, self.context, self.running = options, context, running
        self.gate, self._groups = gate, groups
        self.results = Results()
        self.rounds_done = 0
        self._start = time.monotonic()

    @property
    def took_s(self) -> float:
        return time.monotonic() - self._start

    def run(self) -> None:
        """All rounds; when the run is interrupted, the values so far remain."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            self._rounds()
        except KeyboardInterrupt:
            say("interrupted: what was measured so far follows")

    def _rounds(self) -> None:
        for number in range(1, self.options.rounds + 1):
            self.context.round = number
            # The first peer of a round finds the machine in another state than the second.
            in_turn = self.running if number % 2 else self.running[::-1]
            for cases in self._groups:
                for peer in in_turn:
                    if self.took_s > 60 * self.options.max_minutes:
                        say(
                            f"{self.options.max_minutes:g} minutes have passed: the rest is left out"
                        )
                        return
                    self._measure(number, peer, [case for case in cases if peer.covers(case)])
            self.rounds_done = number

    def _measure(self, number: int, peer: Peer, cases: list[Case]) -> None:
        cases = [
            case
            for case in cases
            if len(self.results.failures.get((peer.name, case), [])) < self.TRIES
        ]
        if not cases:
            return
        title = f"[{number}/{self.options.rounds}, {self.took_s:.0f} s] {cases[0].group.title()}: {peer.name}"
        try:
            work = partial(peer.measure, cases, self.context)
            samples, noise = self.gate.measure(work) if self.gate else (work(), 0.0)
        except BenchError as failed:
            for case in cases:
                self.results.failures[(peer.name, case)].append(str(failed))
            say(f"{title} FAILED: {failed}")
            return
        for sample in samples:
            self.results.add(peer.name, number, sample, noise)
        values = " ".join(report.number(sample.value) for sample in samples)
        say(f"{title} {values} {cases[0].unit}" + (f" (noise {noise:.0%})" if self.gate else ""))


def revision() -> str:
    """The commit that this tree stands at, marked when it has changes."""
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"
