"""The builds that `before.py` measures beside each other: a command, and a wheel with the Python module and NIXL's plugin."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.gpu.peers.pairs import Python
from bench.lib.bars import OURS
from bench.lib.cases import Case, Sample
from bench.lib.proc import BenchError, run
from bench.nixl.peers import LINKS, WHEEL, NixlContext, Uccl
from bench.peers import Peer
from bench.peers import uccl as command


class Build(Peer):
    """One build, with a part for each kind of caller. `Case.by` names the part that measures it."""

    def __init__(self, name: str, parts: dict[str, Peer]):
        self.name, self._parts = name, parts

    def available(self, context: NixlContext) -> str | None:
        reasons = (part.available(context) for part in self._parts.values())
        return next((reason for reason in reasons if reason), None)

    def version(self, context: NixlContext) -> str:
        return "; ".join(part.version(context) for part in self._parts.values())

    def covers(self, case: Case) -> bool:
        return case.by in self._parts

    def measure(self, cases: list[Case], context: NixlContext) -> list[Sample]:
        part = self._parts[cases[0].by]
        try:
            return part.measure(cases, context)
        finally:
            # The next round starts other processes.
            getattr(part, "close", lambda: None)()


@dataclass
class Command(Peer):
    """`uccl bench`. Every byte is looked at in a last, untimed round."""

    binary: Path

    def available(self, context: NixlContext) -> str | None:
        return command.why_no_binary(self.binary)

    def version(self, context: NixlContext) -> str:
        return command.version(self.binary)

    def measure(self, cases: list[Case], context: NixlContext) -> list[Sample]:
        group = cases[0].group
        words = [
            *(
                "bench",
                "--json",
                "-",
                "--op",
                group.op,
                "--iovs",
                str(group.iovs),
                *_memory(group, context),
            ),
            *(
                "--size",
                ",".join(str(case.size) for case in cases),
                "--inflight",
                "1",
                "--buffers",
                "1",
            ),
            *("--duration", f"{round(context.seconds * 1000)}ms"),
        ]
        found = command.rows(self.binary, words, limit_s=context.limit_s(cases), env={})
        by_size = {row["size_bytes"]: row for row in found}
        wrong = [row["size_bytes"] for row in found if row.get("verified") == "no"]
        if wrong or any(case.size not in by_size for case in cases):
            raise BenchError(
                f"wrong bytes of sizes {wrong}" if wrong else "a size is missing from its rows"
            )
        return [Sample(case, command.value(by_size[case.size], case.unit)) for case in cases]


def _memory(case: Case, context: NixlContext) -> list[str]:
    """The options for the link and for the memory at its two ends."""
    transport = ["--transport", "local" if case.link == "gpu" else case.link]
    if case.memory in ("any", "host"):
        return transport
    if case.memory == "alloc":
        return [*transport, "--memory", "alloc"]
    ours, theirs = map(str, context.gpus)
    return [
        *transport,
        "--device",
        "gpu",
        "--peer-device",
        case.memory,
        "--gpu",
        ours,
        "--peer-gpu",
        theirs,
    ]


class Calls(Python):
    """Blocking calls from Python, of the module in a folder, over one link."""

    def __init__(self, link: str, folder: Path):
        super().__init__()
        self.env = {**LINKS[OURS][link], "PYTHONPATH": str(folder)}

    def available(self, context: Any) -> str | None:
        try:
            run(
                [context.python, "-c", "import numpy; from uccl import p2p"],
                limit_s=60,
                env=self.env,
            )
        except BenchError as failed:
            return str(failed)
        return None


class FromPython(Peer):
    """A pair of processes for each link."""

    def __init__(self, folder: Path):
        self._pairs = {link: Calls(link, folder) for link in ("local", "tcp")}

    def available(self, context: NixlContext) -> str | None:
        return self._pairs["tcp"].available(context)

    def version(self, context: NixlContext) -> str:
        return self._pairs["tcp"].version(context)

    def measure(self, cases: list[Case], context: NixlContext) -> list[Sample]:
        return self._pairs[cases[0].link].measure(cases, context)

    def close(self) -> None:
        """Ends its processes."""
        for pair in self._pairs.values():
            pair.close()


class FromNixl(Uccl):
    """NIXL with the plugin of the wheel in a folder."""

    def __init__(self, folder: Path):
        super().__init__(OURS)
        self._folder = folder

    def available(self, context: NixlContext) -> str | None:
        return super().available(replace(context, folders={WHEEL: self._folder}))
